"""What the commands that train share: their options, ``--dry-run``, and how a result is told."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mathinterp.cli.experiment import own_options
from mathinterp.cli.options import (
    PLACE,
    Command,
    Real,
    apply,
    fields_of,
    json_option,
    model_options,
    out_folder,
    out_place,
    spec_of,
    store_option,
    with_scratch,
)
from mathinterp.cli.output import console, print_json, print_line, print_sql_hint, print_table
from mathinterp.cli.verbosity import say_on_stderr
from mathinterp.text import quoted
from mathinterp.tuning.settings import TuneSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mathinterp.tuning.preview import Source
    from mathinterp.tuning.sft import SftConfig
    from mathinterp.tuning.sft_ray import TuningJob, TuningResult


def options_for(owner: type) -> Callable[[Command], Command]:
    """The options of a settings class's fields."""

    def decorate(command: Command) -> Command:
        for option in reversed(own_options(owner)):
            command.__dict__.setdefault("__click_params__", []).append(option)
        return command

    return decorate


def training_options(learning_rate: float) -> Callable[[Command], Command]:
    """Everything that precise, full and lora share."""
    return apply(
        [
            options_for(TuneSettings),
            click.option("--lr", type=Real(0, above=True), default=learning_rate, show_default=True,
                         help="Peak learning rate."),
            out_options("Folder for what is learnt."),
            place_options(),
            click.option("--compile/--no-compile", "compiled", default=None,
                         help="Layers through torch.compile; default: long runs on GPUs."),
            click.option("--tensorboard", default=None, metavar="DIR", callback=out_place,
                         help="Also write the course of training for it."),
            click.option("--address", default=None, callback=with_scratch,
                         help="Running Ray cluster; without it a local Ray is started."),
            model_options(),
            store_option(),
            json_option(),
        ]
    )  # fmt: skip


def place_options() -> Callable[[Command], Command]:
    """--gpu, --storage: where trainings run and keep their checkpoints."""
    return apply(
        [
            click.option("--gpu/--cpu", "gpu", default=None, help="Of trainings; default: GPUs if there are enough."),
            click.option("--storage", default=None, callback=out_place,
                         help="Checkpoints: folder or URI; default: beside, or in, --out."),
        ]
    )  # fmt: skip


def out_options(text: str) -> Callable[[Command], Command]:
    """--out, which a dry run does not need, and --dry-run."""
    return apply(
        [
            click.option("--out", default=None, type=PLACE, callback=_out_unless_dry, help=text),
            click.option("--dry-run", is_flag=True, is_eager=True,
                         help="Train nothing: show what the data come to, the first sample's tokens, and which of them "
                              "count. Needs no --out."),
        ]
    )  # fmt: skip


def _out_unless_dry(context: click.Context, parameter: click.Parameter, value: Path | None) -> Any:
    if value is None and not context.params.get("dry_run"):
        raise click.MissingParameter(ctx=context, param=parameter)
    return value if value is None else out_folder(context, parameter, value)


def say(line: str) -> None:
    """A line on the way, on stderr."""
    say_on_stderr(line)


def train(
    make: "Callable[..., TuningJob]", options: dict[str, Any], chosen_from: str | None = None, dtype: str | None = None
) -> None:
    """Train what ``make`` (called with base and store) gives with these options, and say what came of it.

    Args:
        chosen_from: which run or SQL named the heads.
        dtype: what ``auto`` means here; None: float32 on a CPU, bfloat16 on a GPU.
    """
    from mathinterp.store import Store
    from mathinterp.tuning.finetune import prepare_tuning, resolve_tuned, run_tuning

    settings: TuneSettings = fields_of(TuneSettings, options)
    if options["dtype"] == "auto" and dtype is not None:
        options["dtype"] = dtype
    base = resolve_tuned(spec_of(options), settings)
    job = make(base, Store(settings.store))
    prepared = prepare_tuning(job, base, settings, chosen_from=chosen_from, say=say)
    if options["dry_run"]:
        config = prepared.tuning.config
        print_dry_run(prepared.data, prepared.held_out, config, base.tokenizer, options["as_json"])
        return
    _print_result(run_tuning(prepared, settings, options["out"], say), settings.store, options["as_json"])


def print_dry_run(
    data: "Sequence[Source]", held_out: "Sequence[Source]", config: "SftConfig", tokenizer: "PreTrainedTokenizerBase",
    as_json: bool,
) -> None:  # fmt: skip
    """What a training would read; the figures of each source are on stderr already."""
    from mathinterp.tuning.preview import preview

    found: dict[str, Any] = {
        "dry_run": True, "steps": config.steps, "batch": config.batch_size,
        "data": [preview(source, tokenizer) for source in data],
        "held_out": [preview(source, tokenizer) for source in held_out],
    }  # fmt: skip
    if as_json:
        print_json(found)
        return
    for source in (*found["data"], *found["held_out"]):
        rows = [{**row, "trained": "yes" if row["trained"] else ""} for row in source["first_sample"]]
        print_table(rows, title=f"First sample of {source['name']}")
        ends = ", ".join(f"{token} {count:,} times" for token, count in source["end_tokens"].items())
        console.print(f"Special tokens with loss: {ends or 'none'}")
    console.print("A dry run: nothing was loaded or trained.")


def _print_result(result: "TuningResult", store: str, as_json: bool) -> None:
    about = result.about
    if as_json:
        print_json({**about, "out": str(result.out), "store": store, "trained_now": result.trained_now})
        return
    done = (
        f"trained in {about['seconds']:.0f} s" if result.trained_now else "was finished before, nothing left to compute"
    )
    print_line(f"Run {result.run_id}: {about['trained_parameters']:,} parameters {done}; in {result.out}")
    for when in ("before", "after"):
        if about[when]:
            figures = about[when]
            console.print(
                f"  {when}: loss {figures['loss']:.4f}, {100 * figures['token_accuracy']:.1f} % of answer tokens, "
                f"{100 * figures['exact_match']:.1f} % of answers right on held-out data"
            )
    print_sql_hint(store, [f"SELECT * FROM tuning_runs WHERE run_id = {quoted(result.run_id)} ORDER BY step"])
