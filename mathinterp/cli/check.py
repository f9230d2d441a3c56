"""``mathinterp check``: are the files of a store those that were written?"""

import sys

import click

from mathinterp.cli.options import json_option, store_option
from mathinterp.cli.output import print_json, print_table


@click.command()
@click.option("--runs", "run_ids", multiple=True, metavar="RUN", help="Run to check; may be repeated. Default: all.")
@store_option()
@json_option()
def check(run_ids: tuple[str, ...], store: str, as_json: bool) -> None:
    """Read every file of a store to its end and compare checksums; exit code 1 if something is damaged or foreign.

    What is damaged is named and left out from then on, and the run's own command computes it anew. Shards and prompts
    that an early version wrote without checksums are counted as such; they are only read. A shard not computed yet is
    no damage.

    \b
    Examples:
      mathinterp check
      mathinterp check --store s3://bucket/results --runs 1a2b3c4d5e6f
    """
    from dataclasses import asdict

    from mathinterp.store import Store

    opened = Store(store)
    opened.require_runs()
    checked = opened.check(run_ids or None)
    rows = [{**asdict(each), "missing": len(each.missing)} for each in checked]
    if as_json:
        print_json({"runs": [asdict(each) for each in checked], "problems": opened.problems})
    else:
        print_table([{"without checksum" if k == "unproved" else k: v for k, v in row.items()} for row in rows])
    if opened.problems:
        sys.exit(1)
