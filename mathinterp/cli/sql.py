"""``mathinterp sql``: query a store."""

from contextlib import suppress

import click

from mathinterp.cli.options import json_option, store_option
from mathinterp.cli.output import print_json, print_sql_hint, print_table


@click.command()
@click.argument("query", required=False)
@store_option()
@json_option()
def sql(query: str | None, store: str, as_json: bool) -> None:
    """Run a DuckDB SQL query over a store's views; without a query, list the views.

    Accuracies, drops, effects and shares are fractions of 1, where the tables of other commands print per cent; only
    the views paper_*, head_operations and evaluation_table are in per cent and points.

    Files that cannot be trusted (half-written, foreign) are left out and named on stderr.

    \b
    Examples:
      mathinterp sql "SELECT * FROM runs"
      mathinterp sql "SELECT layer, head, drop, q_value FROM head_effects
                      WHERE operation = 'all' ORDER BY drop DESC LIMIT 10"
    """
    from mathinterp.errors import UserError
    from mathinterp.store import Store

    opened = Store(store)
    if not opened.files.find("runs", ".json"):
        raise UserError(f"there is no store at '{store}'; run a scan first, or name its folder with --store")
    with opened.held():
        with suppress(OSError):  # a store that can only be read has to do with the views.sql it has
            opened.write_views()
        rows = opened.rows(query or "SELECT view_name AS view FROM duckdb_views() WHERE NOT internal ORDER BY ALL")
    print_json(rows) if as_json else print_table(rows)
    if query is None and not as_json:
        print_sql_hint(store, ["SELECT run_id, scan, model, prompts, status FROM runs"])
