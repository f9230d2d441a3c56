"""``--dry-run`` of the commands that train: what the data come to, and the first sample's tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from mathinterp.cli.options import Command, apply, out_folder
from mathinterp.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mathinterp.tuning.preview import Source
    from mathinterp.tuning.sft import SftConfig


def out_options(text: str) -> Callable[[Command], Command]:
    """--out, which a dry run does not need, and --dry-run."""
    return apply(
        [
            click.option("--out", default=None, type=click.Path(path_type=Path), callback=_out_unless_dry, help=text),
            click.option("--dry-run", is_flag=True, is_eager=True,
                         help="Train nothing: show what the data come to, the first sample's tokens, and which of them "
                              "count. Needs no --out."),
        ]
    )  # fmt: skip


def print_dry_run(
    data: "Sequence[Source]", held_out: "Sequence[Source]", config: "SftConfig", tokenizer: "PreTrainedTokenizerBase",
    options: dict[str, Any],
) -> None:  # fmt: skip
    """What a training would read; the figures of each source are on stderr already."""
    from mathinterp.tuning.preview import preview

    found: dict[str, Any] = {
        "dry_run": True, "steps": config.steps, "batch": config.batch_size,
        "data": [preview(source, tokenizer) for source in data],
        "held_out": [preview(source, tokenizer) for source in held_out],
    }  # fmt: skip
    if options["as_json"]:
        print_json(found)
        return
    for source in (*found["data"], *found["held_out"]):
        rows = [{**row, "trained": "yes" if row["trained"] else ""} for row in source["first_sample"]]
        print_table(rows, title=f"First sample of {escape(source['name'])}")
        ends = ", ".join(f"{token} {count:,} times" for token, count in source["end_tokens"].items())
        console.print(f"Special tokens with loss: {ends or 'none'}", highlight=False, markup=False)
    console.print("A dry run: nothing was loaded or trained.", highlight=False)


def _out_unless_dry(context: click.Context, parameter: click.Parameter, value: Path | None) -> Any:
    if value is None and not context.params.get("dry_run"):
        raise click.MissingParameter(ctx=context, param=parameter)
    return value if value is None else out_folder(context, parameter, value)
