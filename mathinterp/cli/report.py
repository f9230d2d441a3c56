"""``mathinterp report``: a page of a store's runs, in a folder."""

from pathlib import Path

import click

from mathinterp.cli.options import json_option, out_file, out_folder, store_option
from mathinterp.cli.output import print_json, print_line
from mathinterp.cli.runs_shown import page_options
from mathinterp.text import counted


@click.command()
@page_options()
@click.option("--pictures", is_flag=True, help="Also each figure as PNG and SVG, beside the page.")
@store_option()
@click.option("--out", default="report", show_default=True, callback=out_folder, help="Folder for the page.")
@json_option()
@click.option(
    "--card", callback=out_file, metavar="FILE",
    help="Write a results card in place of the page: what was found, and how sure, on a page of Markdown.",
)  # fmt: skip
def report(
    run_ids: tuple[str, ...], compare: tuple[str, str] | None, pictures: bool, store: str, out: str, as_json: bool,
    card: str | None,
) -> None:  # fmt: skip
    """Write a page about finished runs that opens by double-click, offline; computes nothing again.

    Each run has its figure, the tables and sentences that its own command prints, where its numbers come from, and SQL
    to go on with; scans of heads, MLPs and paths have every node on every prompt, down to the sentences that change.
    Runs that are not whole are named and not drawn.

    \b
    Examples:
      mathinterp report
      mathinterp report --run 1a2b3c4d5e6f --out figures --pictures
      mathinterp report --compare 1a2b3c4d5e6f 6f5e4d3c2b1a
      mathinterp report --card card.md
    """
    from mathinterp.report.card import write_card
    from mathinterp.report.page import write_report
    from mathinterp.store import Store

    opened = Store(store)
    opened.require_runs()
    if card is not None:
        made = write_card(opened, card, run_ids)
        print_json({"card": str(made)}) if as_json else print_line(str(made))
        return
    written = write_report(opened, Path(out), run_ids, compare, pictures=pictures)
    if as_json:
        print_json({"page": str(written.page), "figures": [str(path) for path in written.figures]})
        return
    drawn = f"{counted(written.runs, 'run')}; opens in any browser, also offline"
    beside = f"; {len(written.figures)} figures beside it" if written.figures else ""
    print_line(f"{written.page}: {drawn}{beside}")
