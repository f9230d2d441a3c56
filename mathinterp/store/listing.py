"""The views of a store: what each says, its columns, and how many rows it has."""

import threading
import time

import duckdb
import pyarrow as pa

from mathinterp.store.catalog import catalog
from mathinterp.store.store import Store

SECONDS = 5.0  # for counting; rows of derived views must be computed to be counted
_SCHEMA = pa.schema(
    [("view", pa.string()), ("about", pa.string()), ("columns", pa.list_(pa.string())), ("rows", pa.int64())]
)


def list_views(store: Store, seconds: float = SECONDS) -> pa.Table:
    """view, about, columns and rows of every view; rows is null for those that were not counted in ``seconds``."""
    connection = store.connect()
    columns: dict[str, list[str]] = {}
    named = "SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal ORDER BY column_index"
    for view, column in connection.execute(named).fetchall():
        columns.setdefault(view, []).append(column)
    simple_first = [view for view in catalog().order if view in columns]  # each after those it reads
    rows = _counted(connection, sorted(simple_first, key=lambda view: view not in catalog().tables), seconds)
    listed = [
        {"view": view, "about": catalog().about[view], "columns": columns[view], "rows": rows.get(view)}
        for view in sorted(columns)
    ]
    return pa.Table.from_pylist(listed, _SCHEMA)


def _counted(connection: duckdb.DuckDBPyConnection, views: list[str], seconds: float) -> dict[str, int]:
    """View -> rows, in this order for as long as the time lasts."""
    end, rows = time.monotonic() + seconds, {}
    timer = threading.Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        for view in views:
            if time.monotonic() >= end:
                break
            [(rows[view],)] = connection.execute(f"SELECT count(*) FROM {view}").fetchall()
    except (duckdb.InterruptException, RuntimeError) as error:  # the second is what fetching makes of it
        if isinstance(error, RuntimeError) and "interrupted" not in str(error):
            raise
    finally:
        timer.cancel()
    return rows
