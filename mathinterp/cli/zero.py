"""``mathinterp tune zero``: a model with heads or neurons knocked out for good, as a folder that anything can load."""

from pathlib import Path
from typing import Any

import click

from mathinterp.cli.options import PLACE, Whole, model_options, out_folder, run_option, spec_of, store_option
from mathinterp.cli.output import print_line
from mathinterp.cli.tuning import say


@click.command()
@click.option("--heads", default=None, help="layer.head, for example 17.22,14.19.")
@run_option("--heads-from", "heads_from", "The first heads of a head scan, path scan, masking.")
@click.option("--top", type=Whole(1), default=32, show_default=True, help="So many heads of --from.")
@click.option("--neurons", default=None, help="layer.neuron, for example 12.345,13.7.")
@click.option("--out", required=True, type=PLACE, callback=out_folder, help="Folder for the model.")
@model_options()
@store_option()
def zero(heads: str | None, heads_from: str | None, top: int, neurons: str | None, out: Path, store: str,
         **options: Any) -> None:  # fmt: skip
    """Write a model whose heads (o_proj columns) or neurons (down_proj columns) are zero; nothing else changes.

    \b
    Negative transfer of tuned heads: do generic sets suffer because of the heads that were tuned? Tune them, knock the
    same heads out of the tuned and of the base model, and evaluate all four folders:
      mathinterp tune precise --from RUN_ID --data train.jsonl --out tuned
      mathinterp tune merge tuned --out merged
      mathinterp tune zero --adapter tuned --from RUN_ID --out tuned-without
      mathinterp tune zero --from RUN_ID --out base-without
      mathinterp evaluate --help
    tuned-without and base-without are the same model to the last bit if the heads alone were tuned; what merged loses
    against the base and tuned-without does not is what their new values did.
    Transfer to a sibling: a ranking found on one model is taken by another of the same shape as it is:
      mathinterp knockout --model SIBLING --from RUN_ID
      mathinterp tune precise --model SIBLING --from RUN_ID --data train.jsonl --out sibling-tuned
      mathinterp sql "SELECT * FROM head_transfer"

    \b
    Example:
      mathinterp tune zero --heads 0.6,0.1 --out without
    """
    from mathinterp.tuning import edit

    found = edit.zero(
        spec_of(options), out, heads=heads, heads_from=heads_from, top=top, neurons=neurons, store=store, say=say
    )
    print_line(
        f"{found.base.label} without {len(found.heads)} heads and {len(found.neurons)} neurons ({found.base.dtype})"
        f" is in {out}"
    )
