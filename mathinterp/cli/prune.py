"""``mathinterp tune prune``: prune the deep layers to the neurons that a LoRA enhances (paper A, section 6.1)."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.dry_run import print_dry_run
from mathinterp.cli.options import ABOVE_0, out_place, parse_layers
from mathinterp.cli.output import print_json, print_sql_hint, print_table
from mathinterp.cli.running import print_run, run_json
from mathinterp.cli.sweep import lora_options, read_data, resolve_lora_base, run_prompts, say_where, training
from mathinterp.cli.tuning import check_gpus
from mathinterp.errors import UserError
from mathinterp.models.units import Neuron

if TYPE_CHECKING:
    from mathinterp.cluster.run import RunSummary
    from mathinterp.models.catalog import ModelSpec, ResolvedModel
    from mathinterp.prompts.prompt import Prompt
    from mathinterp.tuning.data import Sample
    from mathinterp.tuning.prune import Condition
    from mathinterp.tuning.sft import SftConfig
    from mathinterp.tuning.sft_ray import TuningResult

Neurons = tuple[Neuron, ...]
LORA, TRAINING = "lora", "training"  # what the first training leaves in OUT


@dataclass(frozen=True)
class Plan:
    """What the command was asked for, looked at but not begun."""

    resolved: "ResolvedModel"
    spec: "ModelSpec"
    layer: int  # that has the LoRA
    deep: tuple[int, ...]  # that are pruned
    top: int  # neurons kept a case
    samples: "Sequence[Sample]"
    config: "SftConfig"
    cases: "Sequence[Prompt]"
    tests: "Sequence[Prompt]"
    options: dict[str, Any]

    @property
    def out(self) -> Path:
        """Folder of everything that is written."""
        return Path(self.options["out"]).expanduser().resolve()


@click.command()
@click.option("--layer", type=click.IntRange(min=0), default=None, help="With the LoRA; default by depth (9 of 32).")
@click.option("--deep", default=None, help="Layers to prune, for example 17-31; default by depth (17-31 of 32).")
@click.option("--top", type=click.IntRange(min=1), default=None,
              help="Neurons a case keeps; default: the share 500 is of 165,120.")  # fmt: skip
@click.option("--lr", type=ABOVE_0, default=5e-4, show_default=True, help="Peak learning rate of every LoRA.")
@click.option("--control-seeds", type=click.IntRange(min=0), default=1, show_default=True,
              help="Draws of random neurons; each trains a LoRA of its own.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True,
              help="Data-parallel workers of a training.")  # fmt: skip
@click.option("--gpu/--cpu", "gpu", default=None, help="Of the trainings; default: GPUs if there are enough.")
@click.option("--storage", default=None, callback=out_place, help="Checkpoints: folder or URI; default inside OUT.")
@lora_options()
def prune(
    layer: int | None, deep: str | None, top: int | None, lr: float, control_seeds: int, workers: int,
    gpu: bool | None, storage: str | None, **options: Any,
) -> None:  # fmt: skip
    """Prune the deep layers to the neurons that a LoRA enhances, against random ones (paper A, section 6.1).

    \b
    A LoRA on one layer; the neurons it enhances most on each case (CNA original against tuned); all other neurons of
    the deep layers pruned; a new LoRA on the pruned model. Scored on the same prompts: original, LoRA, pruned and
    random with and without their LoRA. OUT has the pruned models as Hugging Face folders and the LoRAs as PEFT
    adapters. The same command again goes on where it stopped.

    \b
    Examples:
      mathinterp tune prune --epochs 1 --out pruned
      mathinterp tune prune --model smollm2 --target gold --case-limit 100 --out pruned
    """
    from mathinterp.cluster.ray_cluster import connection, existing_cluster
    from mathinterp.models.reading import read_prompts
    from mathinterp.prompts import load_prompts
    from mathinterp.store import Store
    from mathinterp.tuning.depth import deep_layers, lora_layer
    from mathinterp.tuning.prune import default_top, random_kept

    if not existing_cluster(options["address"]):
        check_gpus(gpu, workers)
    if gpu is False and options["gpus_per_replica"] is None:
        options["gpus_per_replica"] = 0.0
    resolved, spec = resolve_lora_base(options)
    shape = resolved.shape
    shape.check_neurons()
    chosen_deep = deep_layers(shape.n_layers) if deep is None else parse_layers(deep, "--deep") or ()
    for each in (*chosen_deep, *(() if layer is None else (layer,))):
        shape.check_layer(each)
    if top is not None and top >= len(chosen_deep) * shape.n_neurons:
        raise UserError(f"--top {top} keeps all {len(chosen_deep) * shape.n_neurons} neurons of the deep layers")
    Store(options["store"])  # refuses what is no store before anything trains
    source = read_data(options, resolved)
    samples = source.samples
    fitting = {"workers": workers, "gpu": gpu, "storage": storage}
    plan = Plan(
        resolved, spec, lora_layer(shape.n_layers) if layer is None else layer, chosen_deep,
        default_top(shape, chosen_deep) if top is None else top, samples, training(options, len(samples), lr),
        load_prompts(options["cases"], seed=options["seed"], limit=options["case_limit"]),
        load_prompts(options["test"], seed=options["seed"], limit=options["test_limit"]), {**options, **fitting},
    )  # fmt: skip
    click.echo(
        f"LoRA on layer {plan.layer}; layers {chosen_deep[0]} to {chosen_deep[-1]} keep {plan.top} neurons a case",
        err=True,
    )
    if options["dry_run"]:
        print_dry_run([source], (), plan.config, resolved.tokenizer, options)
        return
    check_own(plan.out)
    for prompts in (plan.cases, plan.tests):
        read_prompts(prompts, resolved)  # refuses what the model cannot read before anything trains
    with connection(options["address"]):
        lora = train_lora(plan, plan.spec, plan.resolved, LORA)
        compared = compare(plan, lora)
        kept = kept_neurons(plan, compared)
        click.echo(f"{len(kept):,} of {len(chosen_deep) * shape.n_neurons:,} neurons are kept", err=True)
        sets = [("pruned", 0, kept)]
        sets += [("random", seed, tuple(random_kept(shape, chosen_deep, kept, seed))) for seed in range(control_seeds)]
        scored = score(plan, lora, sets)
    show(plan, compared, scored, len(kept))
    if scored.failed or not scored.complete:
        sys.exit(1)


def check_own(out: Path) -> None:
    """Raise UserError if ``out`` holds something that is not of an earlier call."""
    held = [path.name for path in out.iterdir()] if out.exists() else []
    if held and not {LORA, TRAINING}.intersection(held):
        raise UserError(f"--out '{out}' exists and holds something else; give a new folder")


def train_lora(plan: Plan, spec: "ModelSpec", resolved: "ResolvedModel", name: str) -> "TuningResult":
    """Train, or find finished, the LoRA in ``out``/``name`` on a base."""
    from ray.train import TrainingFailedError

    from mathinterp.tuning.controls import LoraJob
    from mathinterp.tuning.lora_sweep import TARGETS
    from mathinterp.tuning.sft_ray import Tuning, fit, named

    options = plan.options
    job = LoraJob(options["rank"], options["alpha"], TARGETS, (plan.layer,))
    tuning = Tuning(
        job=job, model=spec, model_fingerprint=resolved.fingerprint, samples=plan.samples, held_out=(),
        config=plan.config, data_label=options["data"], store_url=options["store"],
    )  # fmt: skip
    storage = options["storage"] or str(plan.out / TRAINING)
    try:
        return fit(
            named(tuning, resolved), workers=options["workers"], gpu=options["gpu"], out=plan.out / name,
            storage=storage, address=options["address"],
        )  # fmt: skip
    except TrainingFailedError as error:
        first = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise click.ClickException(f"training failed: {first.strip()}; the same command goes on from here") from error


def compare(plan: Plan, lora: "TuningResult") -> "RunSummary":
    """CNA original against tuned, in the deep layers; stops the command where it cannot be finished."""
    from mathinterp.experiments.neurons import Neurons, OtherModel
    from mathinterp.models.catalog import resolve

    tuned = replace(plan.spec, adapter=str(lora.out))
    other = OtherModel(tuned, resolve(tuned).fingerprint, f"{plan.resolved.label}+lora")
    scan = Neurons("adapter", other=other, target=plan.options["target"], top=plan.top, layers=plan.deep)
    found = run_prompts(scan, plan.spec, plan.cases, plan.options["cases"], plan.options)
    if not found.complete:
        print_run(found)
        sys.exit(1)
    return found


def kept_neurons(plan: Plan, compared: "RunSummary") -> Neurons:
    """The union of the cases' first neurons."""
    from mathinterp.store import Store

    rows = Store(compared.store).rows(
        f"SELECT DISTINCT layer, neuron FROM neuron_changes WHERE run_id = '{compared.run_id}' AND in_top"
        " ORDER BY layer, neuron"
    )
    return tuple(Neuron(row["layer"], row["neuron"]) for row in rows)


def score(plan: Plan, lora: "TuningResult", sets: "Sequence[tuple[str, int, Neurons]]") -> "RunSummary":
    """Export each pruned model, train its LoRA, and score all of them on the same prompts."""
    from mathinterp.tuning.prune import Condition, Prune

    conditions = [Condition("lora", adapter=str(lora.out), trained_as=lora.run_id)]
    for name, seed, kept in sets:
        conditions += _pruned_conditions(plan, name, seed, kept)
    return run_prompts(Prune(tuple(conditions), plan.deep), plan.spec, plan.tests, plan.options["test"], plan.options)


def _pruned_conditions(plan: Plan, name: str, seed: int, kept: Neurons) -> "list[Condition]":
    """The model pruned to ``kept``, as it is and with a LoRA of its own."""
    from mathinterp.models.catalog import resolve
    from mathinterp.tuning.edit import ABOUT_FILE, export_edited
    from mathinterp.tuning.prune import Condition, pruned_neurons

    folder = plan.out / (name if name == "pruned" else f"{name}-{seed}")
    about = {"edit": "prune", "kept": [f"{layer}.{neuron}" for layer, neuron in kept]}
    gone = pruned_neurons(plan.resolved.shape, plan.deep, kept)
    if not (folder / ABOUT_FILE).is_file():
        export_edited(plan.resolved, folder, neurons=gone, about=about)
    _check_same(folder, plan.resolved.fingerprint, about["kept"])
    spec = replace(plan.spec, name=str(folder))
    trained = train_lora(plan, spec, resolve(spec), f"{folder.name}-lora")
    return [
        Condition(name, seed, kept),
        Condition(f"{name}_lora", seed, kept, str(trained.out), trained.run_id),
    ]


def _check_same(folder: Path, fingerprint: str, kept: Any) -> None:
    """Raise UserError if a folder of an earlier call holds another pruned model."""
    from mathinterp.tuning.about import read_about
    from mathinterp.tuning.edit import ABOUT_FILE

    found = read_about(folder / ABOUT_FILE, "base_fingerprint", "kept")
    if (found["base_fingerprint"], found["kept"]) != (fingerprint, kept):
        raise UserError(f"{folder} holds another pruned model (other settings, data or base); give a new --out")


def show(plan: Plan, compared: "RunSummary", scored: "RunSummary", kept: int) -> None:
    """The table, where everything is, and the SQL behind it."""
    from mathinterp.store import Store

    query = (
        f"SELECT * EXCLUDE (run_id) FROM paper_a_table11 WHERE run_id = '{scored.run_id}'"
        " ORDER BY condition = 'origin' DESC, condition = 'lora' DESC, condition, seed"
    )
    rows = Store(scored.store).rows(query) if scored.complete else []
    if plan.options["as_json"]:
        found = {"layer": plan.layer, "deep": list(plan.deep), "top": plan.top, "kept": kept, "out": str(plan.out)}
        print_json({"neurons": run_json(compared), **run_json(scored), **found, "accuracy": rows})
        return
    print_table(rows, title="Accuracy (%) on the test prompts, deep layers pruned")
    say_where("Pruned models and adapters", plan.out)
    print_sql_hint(scored.store, [query, f"SELECT * FROM prune_neurons WHERE run_id = '{scored.run_id}' LIMIT 20"])
    print_run(compared)
    print_run(scored)
