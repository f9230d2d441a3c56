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
RUN_ID = re.compile(r"\b[0-9a-f]{12}\b")
OWN_STATUS = re.compile(r"\bstatus\s*=\s*'finished'|\blatest_runs\b", re.IGNORECASE)


def warn_of_partial_runs(
    store: "Store", connection: duckdb.DuckDBPyConnection, sql: str, values: Mapping[str, Any] | None
) -> None:
    """Log a line, once per store and run, if ``sql`` reads rows of runs that are not finished.

    A query that names runs reads those alone; one that asks for finished runs reads no others. A run that was finished
    once is not looked at again.

    Args:
        connection: one that has the view runs, see ``with_runs``.
    """
    tables, asked = _tables(sql), _runs_named(sql, values)
    if not tables or OWN_STATUS.search(sql) or (asked and asked <= store.runs_looked_at):
        return
    rows = connection.sql(
        """SELECT run_id, scan, shards_done, shards, status, tables FROM runs
           JOIN (SELECT run_id, list_distinct(list(split_part(shard, '/', 1))) AS tables
                 FROM (SELECT run_id, unnest(shards) AS shard FROM run_records) GROUP BY run_id) USING (run_id)
           ORDER BY started_at DESC"""
    ).fetchall()
    read = [row for row in rows if row[0] in asked] or rows
    partial = [
        row[:4]
        for row in read
        if row[4] != "finished" and row[2] and tables & set(row[5]) and row[0] not in store.runs_looked_at
    ]
    store.runs_looked_at |= {row[0] for row in read if row[4] == "finished"} | {row[0] for row in partial}
    if not partial:
        return
    named = ", ".join(f"{run} ({scan}: {done} of {shards} shards)" for run, scan, done, shards in partial[:NAMED])
    more = f" and {len(partial) - NAMED} more" if partial[NAMED:] else ""
    logger.warning(
        f"unfinished: {named}{more}; their effects, ranks and q-values are of what is there by chance. The same command"
        " finishes a run; WHERE status = 'finished' leaves such runs out"
    )


def _runs_named(sql: str, values: Mapping[str, Any] | None) -> set[str]:
    """Ids of runs that the query names, itself or by its values."""
    given = [str(value) for name, value in (values or {}).items() if re.search(rf"\${name}\b", sql)]
    return {*RUN_ID.findall(sql), *(value for value in given if RUN_ID.fullmatch(value))}


def with_runs(sql: str) -> str:
    """Text that names the views of ``sql`` and, where it reads rows of runs, those that tell which are finished."""
    return f"{sql} runs run_records" if _tables(sql) else sql


def _tables(sql: str) -> set[str]:
    """Tables of runs' rows that a query reads, through whichever views."""
    if query.CATALOG_WORDS.search(sql):
        return set()
    stored = catalog().tables
    return {view for view in query.views_of(sql) if view in stored and stored[view].partition == "run_id"}
