"""``mathinterp sql``: query a store."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mathinterp.cli.options import json_option, lasting, store_option
from mathinterp.cli.output import console, print_line, print_sql_hint, print_table

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = 500  # rows of a printed table; rich takes some milliseconds each


@click.command()
@click.argument("query", required=False)
@store_option()
@json_option()
@click.option("--csv", "as_csv", is_flag=True, help="Print all rows as CSV.")
@click.option(
    "--output", callback=lasting, metavar="FILE",
    help="Write all rows to a file: .csv, .parquet or .json.",
)  # fmt: skip
@click.option(
    "--allow-files", is_flag=True, help="Let the query read files outside the store too. It can never write any."
)
def sql(query: str | None, store: str, as_json: bool, as_csv: bool, output: str | None, allow_files: bool) -> None:
    """Run a DuckDB SQL query over a store's views; without a query, list the views.

    A query is one statement that reads: SELECT, DESCRIBE, SHOW or EXPLAIN. A table shows the first rows; --json, --csv
    and --output give all of them.

    Accuracies, drops, effects and shares are fractions of 1, where the tables of other commands print per cent.

    Files that cannot be trusted (half-written, foreign) are left out and named on stderr.

    \b
    Examples:
      mathinterp sql "SELECT * FROM runs"
      mathinterp sql "SELECT run_id, model, layer, head, drop, q_value
                      FROM head_effects JOIN latest_runs USING (run_id)
                      WHERE operation = 'all' ORDER BY drop DESC LIMIT 10"
      mathinterp sql "SELECT * FROM head_scan" --output head_scan.parquet
    """
    from mathinterp.errors import UserError
    from mathinterp.store import Store
    from mathinterp.store.export import check_export, export, write_csv, write_json
    from mathinterp.store.listing import list_views

    if sum([as_json, as_csv, output is not None]) > 1:
        raise UserError("give one of --json, --csv and --output")
    if output is not None:
        check_export(Path(output))
    opened = Store(store)
    opened.require_runs()
    with opened.held():
        with suppress(OSError):  # a store that can only be read has to do with the views.sql it has
            opened.write_views()
        listed = None if query else list_views(opened)
        rows = opened.stream(query or "", allow_files=allow_files) if listed is None else listed.to_reader()
        if output is not None:
            print_line(f"{export(rows, Path(output)):,} rows: {output}")
        elif as_json or as_csv:
            write = write_json if as_json else write_csv
            write(rows, sys.stdout.buffer)
        elif listed is None:
            _print_first(rows)
        else:
            print_table([{**row, "columns": ", ".join(row["columns"])} for row in listed.to_pylist()])
            if listed["rows"].null_count:
                console.print("-: not counted in the time for that; SELECT count(*) FROM the view counts it")
    if query is None and not (as_json or as_csv or output):
        print_sql_hint(store, ["SELECT run_id, scan, model, prompts, status FROM runs"])


def _print_first(rows: "pa.RecordBatchReader") -> None:
    """The first rows as a table, and how many there are."""
    import pyarrow as pa

    from mathinterp.store.query import json_rows

    first, count = [], 0
    for batch in rows:
        first += [batch.slice(0, SHOWN - count)] if count < SHOWN else []
        count += batch.num_rows
    print_table(json_rows(pa.Table.from_batches(first, rows.schema), finite=False))
    if count > SHOWN:
        print_line(f"showing {SHOWN} of {count:,} rows; --csv or --output FILE for all")
