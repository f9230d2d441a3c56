"""``mathinterp runs ...``: how far the runs of a store are; what they are, differ in and take; mend and free them."""

import sys
from dataclasses import asdict, replace
from pathlib import Path

import click

from mathinterp.cli.check import check
from mathinterp.cli.completing import run_id
from mathinterp.cli.experiment import ExperimentCommand
from mathinterp.cli.group import Group
from mathinterp.cli.options import json_option, lasting, store_option
from mathinterp.cli.output import print_json, print_line, print_sql_hint, print_table
from mathinterp.cli.runs_shown import (
    facts,
    first_line,
    in_store,
    mends_told,
    opened_store,
    print_difference,
    print_planned,
    shown_row,
    verdict,
    written_bytes,
)  # fmt: skip
from mathinterp.errors import UserError
from mathinterp.report.cells import format_value
from mathinterp.text import counted


@click.group(cls=Group)
def runs() -> None:
    """List, show, compare, delete, export, check and compact the runs of a store.

    All of it from the store alone: no cluster, no model. In Python: mathinterp.open_store("results").runs.

    \b
    Examples:
      mathinterp runs list
      mathinterp runs show RUN
    """


@runs.command("list")
@click.option("--scan", default=None, help="Runs of this scan alone.")
@click.option("--model-name", default=None, metavar="TEXT", help="Runs of models with this in their name.")
@click.option("--status", default=None, help="finished, failed or unfinished.")
@store_option()
@json_option()
def list_(scan: str | None, model_name: str | None, status: str | None, store: str, as_json: bool) -> None:
    """Show every run and how far it is, the newest first.

    \b
    Status: finished; failed: some shards were given up; unfinished: running, or stopped before its end ("written" says
    how long ago something of it was last written). Rows and bytes are of the files that are there.

    \b
    Examples:
      mathinterp runs list
      mathinterp runs list --scan heads --status unfinished --json
    """
    found = opened_store(store).runs.list(scan=scan, model=model_name, status=status)
    if as_json:
        print_json([asdict(row) for row in found])
        return
    print_table([shown_row(row) for row in found])
    print_sql_hint(store, [])


@runs.command()
@click.argument("run", shell_complete=run_id)
@store_option()
@json_option()
def show(run: str, store: str, as_json: bool) -> None:
    """Show all that is known of one run: what it was asked, what computed it, what is missing, and how to go on.

    \b
    Example:
      mathinterp runs show RUN
    """
    card = opened_store(store).runs.show(run)
    card = replace(card, command=in_store(card.command, store))
    if as_json:
        print_json(asdict(card))
        return
    print_table([{"field": name, "value": format_value(value)} for name, value in facts(card)], title=f"Run {run}")
    print_table([asdict(table) for table in card.tables], title="Tables")
    if card.missing:
        rows = [{"shard": shard, "attempts": card.attempts.get(shard), "error": first_line(card.errors.get(shard))}
                for shard in card.missing]  # fmt: skip
        print_table(rows, title=f"Missing: {counted(len(rows), 'shard')} of {card.run.shards}")
        print_line(f"To go on: {card.command or 'the command or call that began it'}")
    for name, why in card.problems.items():
        print_line(f"{name}: {why}; left out")
    print_sql_hint(store, card.queries)


@runs.command()
@click.argument("run", shell_complete=run_id)
@click.argument("other", shell_complete=run_id)
@store_option()
@json_option()
def compare(run: str, other: str, store: str, as_json: bool) -> None:
    """Show what differs between two runs: parameters, code, fingerprints, and their rows cell by cell.

    \b
    Rows of a table are joined by its key columns. Cells are compared exactly, NaN equals NaN; largest_difference is of
    pairs of finite numbers, flips of true and false. Beside them, each run's noise floor: how far a change of nothing
    moves its rows. Exit code 0 whether or not they differ; --json has "same_rows": null where a run lacks shards, or is
    not finished, and no difference was found in what is there. Ids that both runs have, for other prompts (of another
    --seed, for example), are counted: rows are paired by id, and then not the same. Files are first read against their
    checksums; a damaged one is named with what mends it.

    \b
    Example:
      mathinterp runs compare RUN OTHER
    """
    opened = opened_store(store)
    with mends_told(store, opened.files.address):
        found = opened.runs.compare(run, other)
    if as_json:
        print_json({**asdict(found), "same_rows": found.same_rows})
        return
    differing = {**found.facts, **{f"parameters: {name}": pair for name, pair in found.parameters.items()}}
    differing |= {"shards": found.shards, "noise floor": found.noise_floors}
    print_table([{"field": name, run: a, other: b} for name, (a, b) in differing.items()], title="What differs")
    for table in found.tables:
        print_difference(table, run, other)
    print_line(verdict(found))


@runs.command()
@click.argument("run_ids", metavar="RUN...", nargs=-1, required=True, shell_complete=run_id)
@click.option("--yes", is_flag=True, help="Do not ask, for scripts.")
@click.option("--force", is_flag=True, help="Also a run that a driver may be writing.")
@store_option()
@json_option()
def delete(run_ids: tuple[str, ...], yes: bool, force: bool, store: str, as_json: bool) -> None:
    """Free runs: their records, rows and temporary files, and the prompts that no other run has.

    \b
    Shows what would go, and asks. Links are neither followed nor removed (but for one in the place of the record), and
    files that mathinterp did not write stay.
    A run that is not finished and was written to in the last 15 minutes is refused, as a driver may be at work on it:
    nothing in a store tells. Interrupted, the same command ends what was begun.

    \b
    Examples:
      mathinterp runs delete RUN
      mathinterp runs delete RUN OTHER --yes --store s3://bucket/results
    """
    opened = opened_store(store)
    run_ids = tuple(dict.fromkeys(run_ids))
    planned = [opened.runs.deletion(run, after=run_ids[:i]) for i, run in enumerate(run_ids)]
    for each in planned:
        if each.may_be_at_work and not force:
            opened.runs.delete(each.run_id)  # raises: a driver may be at work
    if not as_json:
        print_planned(planned)
    if not yes:
        if as_json or not at_terminal():
            raise UserError("nothing was deleted: without a terminal to ask on, give --yes")
        click.confirm(f"Delete {counted(len(planned), 'run')}?", abort=True)
    done = [opened.runs.delete(each.run_id, force=force) for each in planned]
    if as_json:
        print_json([{**asdict(each), "files": len(each.files), "prompts": len(each.prompts)} for each in done])
    else:
        files = counted(sum(len(each.files) for each in done), "file")
        print_line(f"Deleted: {files}, {written_bytes(sum(each.bytes for each in done))}.")


@runs.command(cls=ExperimentCommand)  # its mistakes name --out
@click.argument("run", shell_complete=run_id)
@click.option("--out", "output", required=True, callback=lasting, metavar="FILE", help="A .parquet or .csv file.")
@click.option("--view", default=None, metavar="NAME", help="A table or view; default: every table of the run.")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@store_option()
@json_option()
def export(run: str, output: str, view: str | None, force: bool, store: str, as_json: bool) -> None:
    """Write a run's rows to a file, with what they are: in a Parquet file's metadata, or in a .json beside a CSV file.

    \b
    Without --view each table of the run goes to a file: where there are several, FILE gets the table's name
    (rows.head_scan.parquet). A file is there whole or not at all. It has the rows that SQL shows: of distractors, the
    view NAME_logit_differences has them. Files are first read against their checksums; a damaged one is named with what
    mends it.

    \b
    Examples:
      mathinterp runs export RUN --out rows.parquet
      mathinterp runs export RUN --view head_effects --out effects.csv
    """
    opened = opened_store(store)
    with mends_told(store, opened.files.address):
        done = opened.runs.export(run, Path(output), view=view, force=force)
    if as_json:
        print_json([asdict(each) for each in done])
        return
    for each in done:
        beside = "" if each.about == each.path else f", described in {each.about}"
        print_line(f"{each.view}: {each.rows:,} rows: {each.path}{beside}")


@runs.command()
@click.argument("run", shell_complete=run_id)
@store_option()
@json_option()
def compact(run: str, store: str, as_json: bool) -> None:
    """Merge the small files of a finished run into fewer.

    \b
    Rows and their order stay; each merged file says of which shards it was made, and the record has its checksum. Who
    reads meanwhile sees the files of before or of after. Interrupted, the run can be read, and the same command ends
    what was begun. The command that made the run still finds it finished.

    \b
    Example:
      mathinterp runs compact RUN
    """
    done = opened_store(store).runs.compact(run)
    if as_json:
        print_json(asdict(done))
    elif done.files_after == done.files_before:
        print_line(f"Run {run}: nothing to merge in {counted(done.files_before, 'file')}.")
    else:
        before, after = written_bytes(done.bytes_before), written_bytes(done.bytes_after)
        print_line(
            f"Run {run}: {counted(done.files_before, 'file')} ({before}) are {done.files_after:,} now ({after})."
        )


def at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


runs.add_command(check)
