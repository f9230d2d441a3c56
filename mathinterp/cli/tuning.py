"""What every training command does: find the base, read and report the data, train, and say what came of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.dry_run import out_options, print_dry_run
from mathinterp.cli.options import (
    ABOVE_0,
    Command,
    FiniteRange,
    apply,
    json_option,
    model_options,
    out_place,
    store_option,
    with_scratch,
)
from mathinterp.cli.output import console, print_json, print_sql_hint
from mathinterp.errors import UserError

if TYPE_CHECKING:
    from mathinterp.models.catalog import ModelSpec, ResolvedModel
    from mathinterp.tuning.data import Sample
    from mathinterp.tuning.preview import Source
    from mathinterp.tuning.sft import SftConfig
    from mathinterp.tuning.sft_ray import Tuning, TuningJob, TuningResult


def training_options(learning_rate: float) -> Callable[[Command], Command]:
    """Everything that precise, full and lora share."""
    options = [
        click.option("--data", multiple=True, required=True, metavar="FILE[:WEIGHT]",
                     help="JSON lines (prompt/response, messages, GSM8K, prompt files) or a prompt set; repeatable. "
                          "With weights on all of them samples are drawn in that mixture; short files repeat."),
        click.option("--held-out", multiple=True, metavar="FILE", help="Data to evaluate before and after, likewise."),
        out_options("Folder for what is learnt."),
        click.option("--steps", type=click.IntRange(min=1), default=None, help="Optimizer steps."),
        click.option("--epochs", type=ABOVE_0, default=None, help="Passes over the data instead; default 1."),
        click.option("--batch", type=click.IntRange(min=1), default=128, show_default=True,
                     help="Samples a step, all workers together."),
        click.option("--micro-batch", type=click.IntRange(min=1), default=16, show_default=True,
                     help="Samples a forward on one worker; the rest is accumulated."),
        click.option("--lr", type=ABOVE_0, default=learning_rate, show_default=True, help="Peak learning rate."),
        click.option("--weight-decay", type=FiniteRange(min=0), default=0.0, show_default=True,
                     help="AdamW's, of trained weights."),
        click.option("--max-tokens", type=click.IntRange(min=2), default=512, show_default=True,
                     help="Longer samples are left out and counted."),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Order of the data."),
        click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True,
                     help="Data-parallel workers, a GPU each."),
        click.option("--gpu/--cpu", "gpu", default=None, help="Default: GPUs if there are enough."),
        click.option("--checkpoint-every", type=click.IntRange(min=1), default=100, show_default=True, help="Steps."),
        click.option("--log-every", type=click.IntRange(min=1), default=10, show_default=True, help="Steps."),
        click.option("--recompute", is_flag=True, help="Recompute activations: less memory, more time."),
        click.option("--pack", type=click.IntRange(min=8), default=None, metavar="TOKENS",
                     help="Several short samples in a row of so many tokens, each attending to itself alone."),
        click.option("--cache", is_flag=True,
                     help="Keep the inputs of the lowest trained layer in memory: later epochs skip what lies below."),
        click.option("--compile/--no-compile", "compiled", default=None,
                     help="Layers through torch.compile; default: long runs on GPUs."),
        click.option("--tensorboard", default=None, metavar="DIR", callback=out_place,
                     help="Also write the course of training for it."),
        click.option("--storage", default=None, callback=out_place,
                     help="Checkpoints: folder or URI; default OUT-training."),
        click.option(
            "--address", default=None, callback=with_scratch,
            help="Running Ray cluster; without it a local Ray is started.",
        ),
        model_options(),
        store_option(),
        json_option(),
    ]  # fmt: skip

    return apply(options)


def resolve_base(options: dict[str, Any]) -> "ResolvedModel":
    """The base model, looked at but not loaded; options["gpu"] decides what ``auto`` means."""
    from mathinterp.cluster.ray_cluster import cluster_total, connection, existing_cluster, local_gpus
    from mathinterp.models.catalog import resolve

    if options["adapter"] is not None:
        raise UserError("--adapter: merge it into its base first ('mathinterp tune merge') and train the result")
    if options["dtype"] == "float16":
        raise UserError("--dtype float16 loses small gradients; train in bfloat16 or float32")
    on_gpu = options["gpu"]
    if on_gpu is None and existing_cluster(options["address"]):
        with connection(options["address"]):
            on_gpu = cluster_total("GPU") >= options["workers"]
    elif not existing_cluster(options["address"]):
        check_gpus(on_gpu, options["workers"])
        on_gpu = local_gpus() >= options["workers"] if on_gpu is None else on_gpu
    return resolve(_spec(options), "cuda" if on_gpu else "cpu")


def check_gpus(gpu: bool | None, workers: int) -> None:
    """Raise UserError for more workers on GPUs than this machine has GPUs."""
    from mathinterp.cluster.ray_cluster import local_gpus

    if gpu and local_gpus() < workers:
        raise UserError(f"--gpu: {workers} workers need a GPU each, and this machine has {local_gpus()}")


def _spec(options: dict[str, Any]) -> "ModelSpec":
    from mathinterp.models.catalog import ModelSpec

    return ModelSpec(options["model"], None, options["dtype"], options["trust_remote_code"])


def say_whose_ranking(store: str, run_id: str, resolved: "ResolvedModel") -> None:
    """A line on stderr where the heads of ``--heads-from`` were ranked on another model: that may be meant, or not."""
    from mathinterp.store import Store

    run = Store(store).rows(f"SELECT model, model_fingerprint FROM runs WHERE run_id = '{run_id}'")[0]
    if run["model_fingerprint"] != resolved.fingerprint:
        click.echo(f"run {run_id} ranked the heads of another model, {run['model']}", err=True)


def train(job: "TuningJob", resolved: "ResolvedModel", options: dict[str, Any], chosen_from: str | None = None) -> None:
    """Read and report the data, train, and say what came of it; ``chosen_from``: which run or SQL named the heads."""
    from ray.train import TrainingFailedError

    from mathinterp.tuning.sft_ray import fit, named

    names, weights = _weighted(options["data"])
    data = [_source(name, resolved, options, "data") for name in names]
    held_out = [_source(name, resolved, options, "held out") for name in options["held_out"]]
    tuning = named(_tuning(job, resolved, options, chosen_from, data, weights, held_out), resolved)
    if options["dry_run"]:
        print_dry_run(data, held_out, tuning.config, resolved.tokenizer, options)
        return
    try:
        result = fit(
            tuning, workers=options["workers"], gpu=options["gpu"], out=options["out"], storage=options["storage"],
            address=options["address"],
        )  # fmt: skip
    except TrainingFailedError as error:
        first = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise click.ClickException(f"training failed: {first.strip()}; the same command goes on from here") from error
    _print_result(result, options)


def _tuning(
    job: "TuningJob", resolved: "ResolvedModel", options: dict[str, Any], chosen_from: str | None,
    sources: "Sequence[Source]", weights: Sequence[float], held_out_sources: "Sequence[Source]",
) -> "Tuning":  # fmt: skip
    """The fine-tuning that the options ask for; says on stderr what the data come to."""
    from mathinterp.tuning.sft import SftConfig
    from mathinterp.tuning.sft_ray import Tuning
    from mathinterp.tuning.tensorboard import writer_class

    samples = [sample for source in sources for sample in source.samples]
    held_out = [sample for source in held_out_sources for sample in source.samples]
    trained = {tuple(sample.input_ids) for sample in samples}
    if both := sum(tuple(sample.input_ids) in trained for sample in held_out):
        click.echo(f"warning: {both} of {len(held_out)} held-out samples are trained on too", err=True)
    steps = _steps(options, len(samples))
    config = SftConfig(
        steps=steps, batch_size=options["batch"], learning_rate=options["lr"], micro_batch=options["micro_batch"],
        seed=options["seed"], weight_decay=options["weight_decay"], log_every=options["log_every"],
        checkpoint_every=options["checkpoint_every"], recompute=options["recompute"], pack=options["pack"] or 0,
        cache=options["cache"], compiled=options["compiled"],
        mixture=tuple(zip((len(source.samples) for source in sources), weights, strict=True)) if weights else (),
    )  # fmt: skip
    if options["tensorboard"] is not None:
        writer_class()
    _say_what_is_ahead(config, samples, resolved, options)
    return Tuning(
        job=job, model=replace(_spec(options), dtype=resolved.dtype), model_fingerprint=resolved.fingerprint,
        samples=samples, held_out=held_out, config=config, data_label=", ".join(options["data"]),
        store_url=options["store"], tensorboard=options["tensorboard"], chosen_from=chosen_from,
    )  # fmt: skip


def _say_what_is_ahead(
    config: "SftConfig", samples: "list[Sample]", resolved: "ResolvedModel", options: dict[str, Any]
) -> None:
    from mathinterp.models.catalog import DTYPES
    from mathinterp.tuning.lower_layers import cache_bytes
    from mathinterp.tuning.steps import sample_order

    seen = sample_order(len(samples), config.steps * config.batch_size, config.seed, config.mixture)
    tokens = sum(len(samples[index].input_ids) for index in seen)
    click.echo(
        f"{config.steps:,} steps of {config.batch_size} samples ({len(seen) / len(samples):.3g} epochs), "
        f"{tokens:,} tokens",
        err=True,
    )
    if config.cache:
        size = cache_bytes(samples, resolved.shape.d_model, DTYPES[resolved.dtype])
        click.echo(f"the cache takes up to {size / 2**30:.2f} GiB of memory on each worker", err=True)


def _weighted(data: tuple[str, ...]) -> tuple[list[str], list[float]]:
    """Names and weights of FILE:WEIGHT; no weights if none is given."""
    split = [name.rpartition(":") for name in data]
    weights = [_weight(name, last) if colon else None for name, colon, last in split]
    if all(weight is None for weight in weights):
        return list(data), []
    found = [weight for weight in weights if weight is not None]
    if len(found) < len(weights):
        raise UserError("--data: give all files a weight (FILE:WEIGHT) or none of them")
    return [name for name, _, _ in split], found


def _weight(name: str, text: str) -> float | None:
    """None if ``text`` is no number, and so a part of the name."""
    try:
        weight = float(text)
    except ValueError:
        return None
    if not 0 < weight < math.inf:
        raise UserError(f"--data {name}:{text}: give a weight above 0")
    return weight


def _source(name: str, resolved: "ResolvedModel", options: dict[str, Any], what: str) -> "Source":
    """The samples of a file or set; says on stderr what they come to."""
    from mathinterp.tuning.preview import read_source

    source = read_source(resolved, name, options["seed"], options["max_tokens"])
    click.echo(f"{what}, {name}: {source.budget.line()}", err=True)
    return source


def _steps(options: dict[str, Any], samples: int) -> int:
    if options["steps"] is not None and options["epochs"] is not None:
        raise UserError("give --steps or --epochs, not both")
    if options["steps"] is not None:
        return options["steps"]
    epochs = 1.0 if options["epochs"] is None else options["epochs"]
    return math.ceil(epochs * samples / options["batch"])


def _print_result(result: "TuningResult", options: dict[str, Any]) -> None:
    about = result.about
    if options["as_json"]:
        print_json({**about, "out": str(result.out), "store": options["store"], "trained_now": result.trained_now})
        return
    done = (
        f"trained in {about['seconds']:.0f} s" if result.trained_now else "was finished before, nothing left to compute"
    )
    console.print(
        f"Run {result.run_id}: {about['trained_parameters']:,} parameters {done}; in {result.out}",
        highlight=False,
        soft_wrap=True,
    )
    for when in ("before", "after"):
        if about[when]:
            figures = about[when]
            console.print(
                f"  {when}: loss {figures['loss']:.4f}, {100 * figures['token_accuracy']:.1f} % of answer tokens, "
                f"{100 * figures['exact_match']:.1f} % of answers right on held-out data",
                highlight=False,
            )
    print_sql_hint(options["store"], [f"SELECT * FROM tuning_runs WHERE run_id = '{result.run_id}' ORDER BY step"])
