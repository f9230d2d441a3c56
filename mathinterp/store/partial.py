"""Unfinished runs: whoever reads their rows is told in one line which they are.

Knows the view runs and the text of a query; the query itself is run elsewhere.
"""

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import duckdb

from mathinterp.store import query
from mathinterp.store.catalog import catalog

if TYPE_CHECKING:
    from mathinterp.store.store import Store

logger = logging.getLogger(__name__)

NAMED = 3  # runs named in the line
OWN_STATUS = re.compile(r"\bstatus\s*=\s*'finished'|\blatest_runs\b", re.IGNORECASE)


def warn_of_partial_runs(
    store: "Store", connection: duckdb.DuckDBPyConnection, sql: str, values: Mapping[str, Any] | None
) -> None:
    """Log a line, once per store and run, if ``sql`` reads rows of runs that are not finished.

    A query that names runs reads those alone; one that asks for finished runs reads no others.

    Args:
        connection: one that has the view runs, see ``with_runs``.
    """
    tables = _tables(sql)
    if not tables or OWN_STATUS.search(sql):
        return
    rows = connection.sql(
        """SELECT run_id, scan, shards_done, shards, tables FROM runs
           JOIN (SELECT run_id, list_distinct(list(split_part(shard, '/', 1))) AS tables
                 FROM (SELECT run_id, unnest(shards) AS shard FROM run_records) GROUP BY run_id) USING (run_id)
           WHERE status <> 'finished' AND shards_done > 0 ORDER BY started_at DESC"""
    ).fetchall()
    asked = set(re.findall(r"\b[0-9a-f]{12}\b", sql))
    asked |= {str(value) for name, value in (values or {}).items() if re.search(rf"\${name}\b", sql)}
    known = {row[0] for row in connection.sql("SELECT run_id FROM run_records").fetchall()} & asked
    told: set[str] = store.partial_runs_told
    partial = [row for row in rows if tables & set(row[4]) and (not known or row[0] in known) and row[0] not in told]
    if not partial:
        return
    told.update(row[0] for row in partial)
    named = ", ".join(f"{run} ({scan}: {done} of {shards} shards)" for run, scan, done, shards, _ in partial[:NAMED])
    more = f" and {len(partial) - NAMED} more" if partial[NAMED:] else ""
    logger.warning(
        f"unfinished: {named}{more}; their effects, ranks and q-values are of what is there by chance. The same command"
        " finishes a run; WHERE status = 'finished' leaves such runs out"
    )


def with_runs(sql: str) -> str:
    """Text that names the views of ``sql`` and, where it reads rows of runs, those that tell which are finished."""
    return f"{sql} runs run_records" if _tables(sql) else sql


def _tables(sql: str) -> set[str]:
    """Tables of runs' rows that a query reads, through whichever views."""
    if query.CATALOG_WORDS.search(sql):
        return set()
    stored = catalog().tables
    return {view for view in query.views_of(sql) if view in stored and stored[view].partition == "run_id"}
