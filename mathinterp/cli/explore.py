"""``mathinterp explore``: the report page, served over a store that may still be written."""

import click

from mathinterp.cli import interrupt
from mathinterp.cli.options import Whole, store_option
from mathinterp.cli.output import print_line
from mathinterp.cli.runs_shown import page_options

PORT = 8391


@click.command()
@store_option()
@page_options()
@click.option(
    "--port", type=Whole(0, 65535), default=PORT, show_default=True, help="Port to listen on; 0: one that is free."
)
@click.option(
    "--host", default="127.0.0.1", show_default=True,
    help="Address to listen on. By default only this machine reaches the page; what goes to others is not encrypted.",
)  # fmt: skip
def explore(
    store: str, run_ids: tuple[str, ...], compare: tuple[str, str] | None, port: int, host: str
) -> None:  # fmt: skip
    """Look at a store in a browser, also while runs are still written to it, and ask it in SQL.

    The page of 'mathinterp report', and what is finished meanwhile; how far other runs are; and a place for queries
    that only read. The printed URL has a token in it, without which nothing is answered: whoever has it can read the
    store. Ctrl-C ends it. From another machine: ssh -L 8391:127.0.0.1:8391 HOST, and open the same URL.

    \b
    Examples:
      mathinterp explore
      mathinterp explore --store s3://bucket/results --port 0
    """
    from mathinterp.report.explore import explore as serve

    interrupt.say("the page is no longer served")
    with serve(store, host=host, port=port, run_ids=run_ids, compare=compare) as page:
        print_line(f"{page.url}\nOpen it in a browser; Ctrl-C ends it")
        page.wait()
