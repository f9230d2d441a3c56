"""``mathinterp edit``: zero the neurons that add to gender stereotypes (paper A, section 6.2)."""

import sys
from pathlib import Path
from typing import Any

import click

from mathinterp.cli.experiment import print_summary
from mathinterp.cli.options import (
    PLACE,
    Whole,
    cluster_options,
    json_option,
    model_options,
    out_folder,
    service_option,
    spec_of,
    store_option,
)
from mathinterp.cli.output import print_json, print_line
from mathinterp.cli.running import print_run, run_json
from mathinterp.cli.verbosity import say_on_stderr
from mathinterp.experiments.gender_neurons import SHOWN
from mathinterp.gates import MOST_DRAWS


@click.command()
@model_options()
@click.option("--top", type=Whole(1), default=SHOWN, show_default=True, help="Neurons to zero.")
@click.option(
    "--control-seeds", type=Whole(most=MOST_DRAWS), default=5, show_default=True,
    help="Draws of as many random neurons in the same layers.",
)  # fmt: skip
@click.option(
    "--text", type=PLACE, default=None,
    help="Plain text for the perplexity, passages separated by blank lines; default: short pieces that come along.",
)  # fmt: skip
@click.option("--out", type=PLACE, default=None, callback=out_folder, help="Folder for the edited model.")
@store_option()
@cluster_options()
@service_option(" This process writes --out.")
@json_option()
def edit(top: int, control_seeds: int, text: Path | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Find and zero the neurons that add to gender stereotypes of professions (paper A, section 6.2).

    \b
    bias = log p(profession | its stereotyped gender) - log p(profession | the other), nats, over 32 professions and 8
    sentences. Neurons are ranked on the first sentence alone. Random neurons are as many in the same layers. --out is a
    Hugging Face folder whose down_proj columns are zero; it needs no mathinterp.

    \b
    Examples:
      mathinterp edit --model smollm2
      mathinterp edit --model smollm2 --top 18 --text book.txt --out edited
    """
    from mathinterp.workflows.edit import edit_gender

    service = options["service"]
    made = edit_gender(spec_of(options), top=top, control_seeds=control_seeds, text=text, out=out, **options)
    if service is not None and made.out is not None:
        say_on_stderr("the edited model was written by this process, not by the service")
    runs = [run for run in (made.found, made.edited) if run is not None]
    summaries = made.summaries() if made.complete else ()
    if as_json and made.edited is not None:
        rows = {name: rows for summary in summaries for name, rows in summary.data.items()}
        folder = None if made.out is None else str(made.out)
        print_json({"found": run_json(made.found), **run_json(made.edited), "out": folder, **rows})
    else:
        for run, summary in zip(runs, summaries, strict=False):
            print_summary(run.store, summary)
        if made.complete:
            print_line(f"Ordinary text: {'bundled text' if text is None else text}")
        if made.out is not None:
            print_line(f"The edited model is in {made.out}")
        for run in runs:
            print_run(run)
    if not made.complete:
        sys.exit(1)
