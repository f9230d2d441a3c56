"""``mathinterp tune sweep``: a LoRA in each layer by itself (paper A, section 5)."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.dry_run import out_options, print_dry_run
from mathinterp.cli.options import (
    ABOVE_0,
    Command,
    apply,
    cluster_options,
    json_option,
    model_options,
    parse_layers,
    store_option,
)
from mathinterp.cli.output import console, print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_json
from mathinterp.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mathinterp.cluster.run import RunSummary
    from mathinterp.experiments.base import Experiment
    from mathinterp.models.catalog import ModelSpec, ResolvedModel
    from mathinterp.prompts.prompt import Prompt
    from mathinterp.tuning.preview import Source
    from mathinterp.tuning.sft import SftConfig

MOST_EPOCHS = 4


def _known_target(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Refuse an unknown target here: the scan that has it comes after the training."""
    from mathinterp.engine.lens.neurons import TARGETS

    if value not in TARGETS:
        raise UserError(f"--target '{value}' is not known; take one of {', '.join(TARGETS)}")
    return value


def lora_options() -> Callable[[Command], Command]:
    """What the sweep and pruning share: data, test prompts, the LoRA and its training."""
    options = [
        click.option("--data", default="signed_two_digit_train", show_default=True, help="What trains: a set or file."),
        click.option("--test", default="signed_two_digit_test", show_default=True, help="What is scored: prompts."),
        click.option("--test-limit", type=click.IntRange(min=1), default=None, help="At most so many of them."),
        click.option("--cases", default="one_digit", show_default=True, help="Prompts that neurons are compared on."),
        click.option("--case-limit", type=click.IntRange(min=1), default=None, help="At most so many of them."),
        click.option("--rank", type=click.IntRange(min=1), default=32, show_default=True, help="Of the LoRA."),
        click.option("--alpha", type=click.IntRange(min=1), default=64, show_default=True, help="Of the LoRA."),
        click.option("--steps", type=click.IntRange(min=1), default=None, help="Optimizer steps."),
        click.option("--epochs", type=ABOVE_0, default=None, help=f"Passes over the data; default {MOST_EPOCHS}."),
        click.option("--batch", type=click.IntRange(min=1), default=128, show_default=True, help="Samples a step."),
        click.option("--micro-batch", type=click.IntRange(min=1), default=128, show_default=True,
                     help="Samples a forward; the rest is accumulated."),
        click.option("--max-tokens", type=click.IntRange(min=2), default=512, show_default=True,
                     help="Longer samples are left out and counted."),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of data and training."),
        click.option("--target", default="predicted", show_default=True, callback=_known_target,
                     help="The token that neurons are compared on: predicted by the original model, or gold."),
        out_options("Folder, seen by all nodes."),
        model_options(),
        store_option(),
        cluster_options(),
        json_option(),
    ]  # fmt: skip

    return apply(options)


@click.command()
@click.option("--layers", default=None, help="Layers, for example 0-3,17; default all.")
@click.option(
    "--rates", default="1e-3,5e-4,1e-4", show_default=True, help="Learning rates, of which the best is taken."
)
@click.option(
    "--validation", type=click.IntRange(min=1), default=500, show_default=True,
    help="Samples kept from training, by which the learning rate is chosen.",
)  # fmt: skip
@click.option("--top", type=click.IntRange(min=50), default=50, show_default=True, help="Neurons kept a prompt.")
@lora_options()
def sweep(layers: str | None, rates: str, validation: int, top: int, **options: Any) -> None:
    """Train a LoRA in each layer's attention by itself: accuracy by layer, and whose coefficients grow (paper A, 5).

    \b
    Trials, one (layer, learning rate), run in parallel, one on each replica; on GPUs --gpus-per-replica 0.25 puts four
    on each. The same command again keeps finished trials. Their adapters are in OUT. The paper's layer bands (1-9,
    10-16, 17-30 of 32) are taken by share of the depth. On a model that cannot do the cases yet, --target gold asks
    about the right answer instead of the predicted one.

    \b
    Examples:
      mathinterp tune sweep --epochs 1 --out sweep
      mathinterp tune sweep --model smollm2 --target gold --gpus-per-replica 0.25 --out sweep
    """
    from mathinterp.cluster.ray_cluster import connection
    from mathinterp.models.reading import read_prompts
    from mathinterp.prompts import load_prompts
    from mathinterp.store import Store
    from mathinterp.tuning.lora_sweep import LoraSweep, claim_folder, split_samples
    from mathinterp.tuning.sweep_neurons import SweepNeurons, missing_adapters

    store, chosen_rates, chosen_layers = Store(options["store"]), parse_rates(rates), parse_layers(layers)
    resolved, spec = resolve_lora_base(options)
    tests = load_prompts(options["test"], seed=options["seed"], limit=options["test_limit"])
    cases = load_prompts(options["cases"], seed=options["seed"], limit=options["case_limit"])
    for prompts in (tests, cases):
        read_prompts(prompts, resolved)  # refuses what the model cannot read before anything trains
    source = read_data(options, resolved)
    trained, kept = split_samples(source.samples, validation, options["seed"])
    folder = "" if options["out"] is None else str(options["out"].expanduser().resolve())
    config = training(options, len(trained), 1.0)
    scan = LoraSweep(
        trained, kept, config, folder, chosen_rates, chosen_layers,
        options["rank"], options["alpha"], resolved.label,
    )  # fmt: skip
    scan.chosen(resolved.shape)
    if options["dry_run"]:
        print_dry_run([source], (), config, resolved.tokenizer, options)
        return
    claim_folder(Path(folder), scan, resolved.fingerprint, resolved.dtype)
    with connection(options["address"]):
        swept = run_prompts(scan, spec, tests, options["test"], options)
        if not swept.complete:
            print_run(swept)
            sys.exit(1)
        trials = chosen_trials(swept)
        if lost := missing_adapters(folder, trials):
            raise UserError(f"{len(lost)} adapters of the sweep are not in --out {folder}, first {lost[0].name}")
        compared = run_prompts(
            SweepNeurons(swept.run_id, trials, folder, top, options["target"]),
            spec,
            cases,
            options["cases"],
            options,
        )
    queries = {
        "accuracy": f"SELECT * EXCLUDE (run_id) FROM paper_a_table9 WHERE run_id = '{swept.run_id}' ORDER BY layer",
        "coefficients": "SELECT * EXCLUDE (run_id) FROM paper_a_table10"
        f" WHERE run_id = '{compared.run_id}' ORDER BY band = '1-9' DESC, band",
    }
    rows = {name: store.rows(query) for name, query in queries.items()} if compared.complete else {}
    if options["as_json"]:
        print_json({"sweep": run_json(swept), "neurons": run_json(compared), "out": folder, **rows})
    else:
        print_table(rows.get("accuracy", []), title="Accuracy (%) with a LoRA in one layer (-1: none)")
        print_table(rows.get("coefficients", []), title="Increase (%) of the coefficients of the most enhanced neurons")
        print_sql_hint(
            swept.store, [*queries.values(), "SELECT * FROM lora_sweep_trials ORDER BY layer, learning_rate"]
        )
        print_run(swept)
        print_run(compared)
    if compared.failed or not compared.complete:
        sys.exit(1)


def resolve_lora_base(options: dict[str, Any]) -> "tuple[ResolvedModel, ModelSpec]":
    """The base, looked at but not loaded, and its spec with the dtype made plain."""
    from mathinterp.cluster.ray_cluster import connection, existing_cluster, gpus_each
    from mathinterp.models.catalog import ModelSpec, resolve

    if options["adapter"] is not None:
        raise UserError("--adapter: merge it into its base first ('mathinterp tune merge') and train the result")
    if options["dtype"] == "float16":
        raise UserError("--dtype float16 loses small gradients; train in bfloat16 or float32")
    spec = ModelSpec(options["model"], None, options["dtype"], options["trust_remote_code"])
    if existing_cluster(options["address"]):
        with connection(options["address"]):
            on_gpu = gpus_each(options["gpus_per_replica"]) > 0
    else:
        on_gpu = gpus_each(options["gpus_per_replica"]) > 0
    resolved = resolve(spec, "cuda" if on_gpu else "cpu")
    name = Path(spec.name).expanduser()
    return resolved, replace(spec, dtype=resolved.dtype, name=str(name.resolve()) if name.exists() else spec.name)


def read_data(options: dict[str, Any], resolved: "ResolvedModel") -> "Source":
    """The training data, tokenized; says on stderr what they come to."""
    from mathinterp.tuning.preview import read_source

    source = read_source(resolved, options["data"], options["seed"], options["max_tokens"])
    click.echo(f"data, {options['data']}: {source.budget.line()}", err=True)
    return source


def training(options: dict[str, Any], samples: int, learning_rate: float) -> "SftConfig":
    """Steps and batches of one training."""
    from mathinterp.tuning.sft import SftConfig

    if options["steps"] is not None and options["epochs"] is not None:
        raise UserError("give --steps or --epochs, not both")
    epochs = MOST_EPOCHS if options["epochs"] is None else options["epochs"]
    steps = options["steps"] or math.ceil(epochs * samples / options["batch"])
    click.echo(f"a training is {steps:,} steps of {options['batch']} samples", err=True)
    return SftConfig(
        steps=steps, batch_size=options["batch"], learning_rate=learning_rate, micro_batch=options["micro_batch"],
        seed=options["seed"],
    )  # fmt: skip


def parse_rates(text: str) -> tuple[float, ...]:
    """ "1e-3,5e-4" -> (0.001, 0.0005); raises UserError for anything else."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(map(math.isfinite, rates)):
        raise UserError(f"--rates '{text}' cannot be read; write them like 1e-3,5e-4")
    return rates


def run_prompts(
    scan: "Experiment", spec: "ModelSpec", prompts: "Sequence[Prompt]", label: str, options: dict[str, Any]
) -> "RunSummary":
    """Run, or resume, a scan on these prompts with the options of store_option and cluster_options."""
    from mathinterp.cluster.dispatch import NoReplicaLeft
    from mathinterp.cluster.run import run_scan

    try:
        return run_scan(
            scan, spec, prompts, options["store"], replicas=options["replicas"],
            gpus_per_replica=options["gpus_per_replica"], address=options["address"], prompts_label=label,
        )  # fmt: skip
    except NoReplicaLeft as error:
        raise click.ClickException(f"{error}; the same command goes on from here") from error


def chosen_trials(swept: "RunSummary") -> tuple[tuple[int, float], ...]:
    """Layer and learning rate of the adapters that the sweep's validation chose."""
    from mathinterp.store import Store

    rows = Store(swept.store).rows(
        f"SELECT layer, learning_rate FROM lora_sweep_trials WHERE run_id = '{swept.run_id}' AND chosen ORDER BY layer"
    )
    return tuple((row["layer"], row["learning_rate"]) for row in rows)


def say_where(what: str, folder: Path) -> None:
    """One line about a folder that was written."""
    console.print(f"{what}: {folder}", highlight=False, soft_wrap=True)
