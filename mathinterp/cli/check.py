"""``mathinterp check``, also ``mathinterp runs check``: whether the files of a store are whole."""

import sys
from dataclasses import asdict

import click

from mathinterp.cli.completing import run_id
from mathinterp.cli.options import json_option, store_option
from mathinterp.cli.output import print_json, print_line, print_table
from mathinterp.cli.runs_shown import mend, opened_store, to_go, told


@click.command()
@click.option(
    "--runs", "run_ids", multiple=True, metavar="RUN", shell_complete=run_id,
    help="Run to check; may be repeated. Default: all.",
)  # fmt: skip
@store_option()
@json_option()
def check(run_ids: tuple[str, ...], store: str, as_json: bool) -> None:
    """Read every file of a store to its end and compare checksums; exit code 1 if something is damaged or foreign.

    \b
    Each file that is missing, truncated, damaged, a duplicate, foreign (also what others put into the folders of runs
    and tables), stale (temporary, of a dead process; a views.sql of before) or left by an interrupted command is named
    with what mends it. What is damaged is left out from then on, and the run's own command computes it anew. Shards and
    prompts that an early version wrote without checksums are counted as such; they are only read. A shard not computed
    yet is no damage, nor is a stale file.

    \b
    Examples:
      mathinterp check
      mathinterp runs check --store s3://bucket/results --runs 1a2b3c4d5e6f
    """
    opened = opened_store(store)
    found = opened.runs.check(run_ids or None)
    if as_json:
        print_json({
            "runs": [asdict(each) for each in found.runs],
            "problems": found.problems,
            "faults": [{**asdict(each), "mend": mend(each, store, opened.files.address)} for each in found.faults],
        })  # fmt: skip
    else:
        rows = [{**asdict(each), "missing": len(each.missing)} for each in found.runs]
        print_table([{"without checksum" if k == "unproved" else k: v for k, v in row.items()} for row in rows])
        for each in found.faults:
            print_line(told(each, store, opened.files.address))
        for run in found.runs:
            if run.missing and not any(fault.run == run.run_id for fault in found.faults):
                print_line(to_go(run, store))
    if not found.harmless:
        sys.exit(1)
