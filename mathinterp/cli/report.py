"""``mathinterp report``: figures and a page from a store."""

from pathlib import Path

import click

from mathinterp.cli.options import json_option, out_folder, store_option
from mathinterp.cli.output import console, print_json


@click.command()
@click.option("--run", "run_ids", multiple=True, help="Run to draw; may be repeated. Default: all that can be drawn.")
@store_option()
@click.option(
    "--out", default="report", show_default=True, callback=out_folder, help="Folder for the page and the figures."
)
@json_option()
def report(run_ids: tuple[str, ...], store: str, out: str, as_json: bool) -> None:
    """Draw finished runs (PNG and SVG) and write one HTML page about them; computes nothing again.

    Each run has its figure, the tables and sentences that its own command prints, and SQL to go on with.

    \b
    Examples:
      mathinterp report
      mathinterp report --run 1a2b3c4d5e6f --out figures
    """
    from mathinterp.report.page import write_report
    from mathinterp.store import Store

    opened = Store(store)
    opened.require_runs()
    written = write_report(opened, Path(out), run_ids)
    if as_json:
        print_json({"page": str(written.page), "figures": [str(path) for path in written.figures]})
        return
    drawn = f"{len(written.figures) // 2} runs drawn, figures as PNG and SVG beside it"
    console.print(f"{written.page}: {drawn}", highlight=False, soft_wrap=True)
