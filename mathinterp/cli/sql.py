"""``mathinterp sql``: query a store."""

from contextlib import suppress
from pathlib import Path

import click

from mathinterp.cli.options import json_option, store_option
from mathinterp.cli.output import print_json, print_table


@click.command()
@click.argument("query", required=False)
@store_option()
@json_option()
def sql(query: str | None, store: str, as_json: bool) -> None:
    """Run a DuckDB SQL query over a store's views; without a query, list the views.

    \b
    Examples:
      mathinterp sql "SELECT * FROM runs"
      mathinterp sql "SELECT layer, head, drop, q_value FROM head_effects
                      WHERE operation = 'all' ORDER BY drop DESC LIMIT 10"
    """
    from mathinterp.errors import UserError
    from mathinterp.store import Store

    opened = Store(store)
    if "://" not in store and not Path(store).is_dir():
        raise UserError(f"there is no store at '{store}'; run a scan first, or name its folder with --store")
    with suppress(OSError):  # a store that can only be read has to do with the views.sql it has
        opened.write_views()
    if query is None:
        query = "SELECT view_name AS view FROM duckdb_views() WHERE NOT internal ORDER BY ALL"
    rows = opened.rows(query)
    for problem in opened.problems:
        click.echo(f"warning: {problem}", err=True)
    print_json(rows) if as_json else print_table(rows)
