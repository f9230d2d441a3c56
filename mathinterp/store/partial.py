"""Unfinished runs: whoever reads their rows is told in one line which they are.

Knows the files that were found and the text of a query; the query itself is run elsewhere.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mathinterp.store import query
from mathinterp.store.catalog import catalog
from mathinterp.store.recut import table_of
from mathinterp.store.survey import Record, Survey
from mathinterp.text import counted

if TYPE_CHECKING:
    from mathinterp.store.reader import StoreReader

logger = logging.getLogger(__name__)

NAMED = 3  # runs named in the line
RUN_ID = re.compile(r"\b[0-9a-f]{12}\b")
LEFT_OUT = re.compile(
    rf"(?:<>|!=|\bNOT\s+IN\b|\bNOT\s+(?:\w+\.)?run_id\s+IN\b|\bNOT\s+(?:\w+\.)?run_id\s*=)"
    rf"\s*(?:\([^)]*\)|'?{RUN_ID.pattern}'?)",
    re.IGNORECASE,
)
OWN_STATUS = re.compile(r"\bstatus\s*=\s*'finished'|\blatest_runs\b", re.IGNORECASE)


def warn_of_partial_runs(reader: "StoreReader", found: Survey, sql: str, values: Mapping[str, Any] | None) -> None:
    """Log a line, once per reader and run, if ``sql`` reads tables of which runs lack some files.

    A query that names runs reads those alone; one that asks for finished runs reads no others. A run that was whole
    once is not looked at again.

    Args:
        found: a look at the tables that the query reads.
    """
    tables, (asked, left_out) = _tables(sql), _runs_named(sql, values)
    looked_at = {run for run in asked if all((run, table) in reader.looked_at for table in tables)}
    if not tables or OWN_STATUS.search(sql) or (asked and asked <= looked_at):
        return
    there = Counter(name.split("/")[1].removeprefix("run_id=") for table in tables for name in found.good[table])
    partial = []
    for run in [run for run in asked if run in found.records] or [run for run in found.records if run not in left_out]:
        shards = [shard for shard in found.records[run]["shards"] if table_of(shard) in tables]
        told = all((run, table) in reader.looked_at for table in tables)
        if not told and 0 < there[run] < len(shards):
            partial.append((found.records[run]["started_at"], run, there[run], len(shards)))
        if there[run]:
            reader.looked_at |= {(run, table) for table in tables}
    if not partial:
        return
    partial.sort(reverse=True)  # the newest first
    warn(
        [(found.records[run], done, shards) for _, run, done, shards in partial],
        "their effects, ranks and q-values are of what is there by chance. The same command finishes a run;"
        " WHERE status = 'finished' leaves such runs out",
    )


def warn(partial: Sequence[tuple[Record, int, int]], consequence: str) -> None:
    """Log the line.

    Args:
        partial: records, how many of their shards are there, and how many there should be.
        consequence: what that means for what is read, and what to do.
    """
    named = ", ".join(
        f"{record['run_id']} ({record['scan']}: {done} of {counted(shards, 'shard')})"
        for record, done, shards in partial[:NAMED]
    )
    more = f" and {len(partial) - NAMED} more" if partial[NAMED:] else ""
    logger.warning(f"unfinished: {named}{more}; {consequence}")


def _runs_named(sql: str, values: Mapping[str, Any] | None) -> tuple[set[str], set[str]]:
    """Ids of runs that the query names, itself or by its values; and of those that it names to leave them out."""
    given = {name: str(value) for name, value in (values or {}).items() if RUN_ID.fullmatch(str(value))}
    text = re.sub(r"\$(\w+)", lambda name: given.get(name[1], name[0]), sql)
    left_out = {run for found in LEFT_OUT.findall(text) for run in RUN_ID.findall(found)}
    return set(RUN_ID.findall(LEFT_OUT.sub("", text))), left_out


def _tables(sql: str) -> set[str]:
    """Tables of runs' rows that a query reads, through whichever views."""
    if query.CATALOG_WORDS.search(sql):
        return set()
    known = catalog()
    return known.of_runs & {source for view in query.views_of(sql) for source in known.sources[view]}
