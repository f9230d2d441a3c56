"""What of a store is read: which files can be trusted, connections that have the views, and the results of queries.

Knows SQL and files; knows nothing about how runs are made.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb
import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.store import query
from mathinterp.store.catalog import catalog
from mathinterp.store.files import StoreFiles
from mathinterp.store.integrity import deeper_faults, first_damaged
from mathinterp.store.partial import warn_of_partial_runs
from mathinterp.store.sql_errors import ends_database, is_of_a_file, is_of_a_gone_file
from mathinterp.store.survey import ELSEWHERE, Record, Survey, Surveyor

if TYPE_CHECKING:
    import pandas as pd

    from mathinterp.frame import Frame


Answer = TypeVar("Answer")
_OF_ONE_RUN = re.compile(r"\brun_id = \$run\b")
KEPT_BYTES = 2**18  # of an answer that is kept for those who ask the same again


@dataclass
class Held:
    """A connection that several queries share, and what was found for it."""

    connection: duckdb.DuckDBPyConnection | None = None
    of: tuple[int, int] = (0, 0)  # the process that made it, and the failures of databases before it
    views: set[str] = field(default_factory=set)
    known: dict[str, list[str]] = field(default_factory=dict)  # see query.add_views
    own: str | None = None  # queries see the files of this run alone
    found: Survey = field(default_factory=lambda: Survey({}, {}, []))
    answers: dict[str, pa.Table] = field(default_factory=dict)  # small ones, by query and values


class StoreReader:
    """The reading half of a store. Files that cannot be trusted are never read; see ``problems``."""

    def __init__(self, url: str | os.PathLike[str]):
        """A local folder (made at the first write), or s3://, gs:// or any fsspec URL.

        Raises UserError if the path is a file or the protocol is not available.
        """
        self.given = os.fspath(url)
        self.files = StoreFiles(url)
        self._surveyor = Surveyor(self.files)
        self._held: Held | None = None
        self._of_others = Held()  # where one run is held: what queries of others share
        self.limits: Mapping[str, str] = {}  # settings of DuckDB's for the connections of queries
        # limits, the database, and the process that made it: the threads that it needs are in no fork
        self._shared: tuple[Mapping[str, str], duckdb.DuckDBPyConnection, int] | None = None
        self._failures = 0  # of databases, for good
        self._asked: duckdb.DuckDBPyConnection | None = None  # of the last query
        self.looked_at: set[tuple[str, str]] = set()  # runs and tables, whole or told of: see partial.py

    @property
    def url(self) -> str:
        """Absolute path or URL."""
        return self.files.root

    @property
    def problems(self) -> list[str]:
        """Every file found so far that cannot be trusted, and why, a line each."""
        return self._surveyor.problems

    @property
    def faults(self) -> Mapping[str, str]:
        """Name of each file found so far that cannot be trusted -> why."""
        return self._surveyor.faults

    @property
    def merging(self) -> Iterable[str]:
        """The markers of merges that were found so far; see compacting.py."""
        return sorted(self._surveyor.merging)

    def look(self, tables: Iterable[str] | None = None) -> Survey:
        """The records, and the files of some tables, or of all, as they are now."""
        return self._surveyor.survey(catalog().tables if tables is None else tables)

    def size_of(self, name: str) -> tuple[int, int]:
        """Bytes and rows of a file that a look found good."""
        return self._surveyor.seen(name)

    def first_damaged(self, record: Record, tables: Collection[str]) -> tuple[str, str] | None:
        """Of a run's files in some tables, and of its prompts: the first that is not as it was written, and why."""
        return first_damaged(self.files, self._surveyor, record, tables)

    def require_runs(self) -> None:
        """Raise UserError unless a run was recorded here."""
        if not self.files.find("runs", ".json"):
            raise UserError(f"there is no store at '{self.given}'; run a scan first, or name its folder with `store`")

    def require_files(self) -> None:
        """Raise UserError unless there is something of a store here: a run, or what one left or somebody put there."""
        folders = {"runs", *catalog().tables} & set(self.files.folders(anew=True))
        if not any(self.files.find(folder, "") for folder in sorted(folders)):
            self.require_runs()

    def views_sql(self) -> str:
        """The text of views.sql: macros and views over all files that can be trusted, by absolute path or URL."""
        found = self._survey(catalog().tables, self._held_for(""))
        return query.views_sql(self.files, found.good, found.bad)

    def connect(self, *views: str) -> duckdb.DuckDBPyConnection:
        """An in-memory DuckDB connection with all views; ``problems`` then names what they leave out.

        Only the named ``views``, and those that they read, take a tenth of the time.
        """
        wanted = query.views_of(" ".join(views)) if views else list(catalog().order)
        return self._new_connection(wanted, self._held_for(""), locked=False)

    @contextmanager
    def held(self, run: str | None = None) -> Iterator[None]:
        """Within the block all queries see the files that were there when one first needed them, and are quicker; one
        that was asked before is not asked again.

        Args:
            run: queries with ``run_id = $run``, where that is this run, read nothing of other runs, unless a view that
                they need takes its run_id from elsewhere. In a store of many runs that spares looking at all other
                files.
        """
        before = self._held, self._of_others
        self._held, self._of_others = Held(own=run), Held()
        try:
            yield
        finally:
            self._held, self._of_others = before

    def arrow(self, sql: str, values: Mapping[str, Any] | None = None) -> pa.Table:
        """The result of a query; ``$name`` in it takes the value of that name, if there is one.

        Raises UserError with DuckDB's first line, and for a statement that does more than read the store.
        """
        asked = repr((sql, sorted((values or {}).items())))
        if self._held is not None and (known := self._held_for(sql, values).answers.get(asked)) is not None:
            return known
        found = self._trusting(sql, lambda: query.arrow(self._told_connection(sql, values), sql, values))
        if self._held is not None and found.nbytes <= KEPT_BYTES:
            self._held_for(sql, values).answers[asked] = found
        return found

    def stream(self, sql: str, *, allow_files: bool = False) -> pa.RecordBatchReader:
        """The result of a query in batches, as it is computed; see ``arrow``. allow_files: it may read other files."""
        return self._trusting(
            sql, lambda: query.stream(self._told_connection(sql, allow_files=allow_files), sql, self._failed)
        )

    def interrupt(self) -> None:
        """Stop the query that runs, from another thread; whoever asked it gets a UserError."""
        if self._asked is not None:
            self._asked.interrupt()

    def _told_connection(
        self, sql: str, values: Mapping[str, Any] | None = None, *, allow_files: bool = False
    ) -> duckdb.DuckDBPyConnection:
        """A connection for a query that only reads, whose reader is told of unfinished runs."""
        query.require_reading(sql)
        views = query.views_of(sql)
        held = self._held_for(sql, values)
        of_its_own = allow_files or query.names_database(sql)
        connection = (
            self._new_connection(views, held, allow_files=allow_files) if of_its_own else self._connect(views, held)
        )
        self._asked = connection
        found = self._survey(catalog().tables_of(views), held)
        warn_of_partial_runs(self, found, sql, values)
        return connection

    def _held_for(self, sql: str, values: Mapping[str, Any] | None = None) -> Held:
        """What a query shares with others: those of the run that is held, those of more, or none."""
        held = self._held or Held()
        if held.own is None:
            return held
        of_it = _OF_ONE_RUN.search(sql) and (values or {}).get("run") == held.own
        return held if of_it and catalog().of_other_runs.isdisjoint(query.views_of(sql)) else self._of_others

    def _trusting(self, sql: str, ask: Callable[[], Answer]) -> Answer:
        """The answer of a query; once more if it failed by the fault of a file, which is then left out."""
        told = set(self.looked_at)
        try:
            return ask()
        except UserError as error:
            self.looked_at = told
            if ends_database(error.__cause__):
                self._failed()
            if not is_of_a_file(error.__cause__):
                raise
            found = self._survey(catalog().tables_of(query.views_of(sql)), Held())
            if self._held is not None:
                self._held, self._of_others = Held(own=self._held.own), Held()
            records = query.unreadable_records(self.files, found.good["runs"])
            faults = deeper_faults(self.files, self._surveyor, found, records)
            if not faults and not is_of_a_gone_file(error.__cause__):
                raise
            return ask()

    def _failed(self) -> None:
        """The database, and every connection of it that is held, answers nothing any more."""
        self._shared, self._failures = None, self._failures + 1

    def _new_connection(
        self, views: Sequence[str], held: Held, *, allow_files: bool = False, locked: bool = True
    ) -> duckdb.DuckDBPyConnection:
        """A database of its own, with the views."""
        found = self._survey(catalog().tables_of(views), held)
        self._surveyor.name_missing_prompts(found)
        made = query.database(self.files, allow_files=allow_files, locked=locked, limits=self.limits)
        query.add_views(made, self.files, query.own_views(found.good, views, temporary=False), found.good)
        return made

    def _connect(self, views: Sequence[str], held: Held) -> duckdb.DuckDBPyConnection:
        """The connection of ``held``, with the views."""
        if held.of != (now := (os.getpid(), self._failures)):
            held.connection, held.views, held.known, held.of = None, set(), {}, now
        more = [view for view in views if view not in held.views]
        if held.connection is None or more:
            found = self._survey(catalog().tables_of(more), held)  # first: object stores are read as they were listed
            text = query.own_views(held.found.good, more)  # of a table without files, an empty view
            held.connection = held.connection or self._without_views()
            query.add_views(held.connection, self.files, text, held.found.good, held.known)
            held.views |= set(more)
            self._surveyor.name_missing_prompts(found)
        return held.connection

    def _without_views(self) -> duckdb.DuckDBPyConnection:
        """A cursor of one database for all queries, made by the first of them: none sees the views of another.

        Of an object store each query has a database of its own, which would keep what was read there.
        """
        if not self.files.local:
            return query.database(self.files, limits=self.limits)
        shared, process = self._shared, os.getpid()  # another thread may take it away
        if shared is None or shared[0] != self.limits or shared[2] != process:
            shared = self._shared = dict(self.limits), query.database(self.files, limits=self.limits), process
        return shared[1].cursor()

    def _survey(self, tables: Iterable[str], held: Held) -> Survey:
        """What was found in tables, looking only for what is not held already."""
        wanted, good = set(tables), held.found.good
        # Not where all are looked at: those of other experiments count then, too.
        if ELSEWHERE in good or not catalog().of_runs <= wanted:
            wanted -= good.keys()
        missing = [table for table in catalog().tables if table in wanted]
        if missing or "runs" not in held.found.good:
            new, old = self._surveyor.survey(missing, held.own), held.found
            bad = list(dict.fromkeys([*old.bad, *new.bad]))
            held.found = Survey({**new.records, **old.records}, {**new.good, **old.good}, bad)
        return held.found

    def sql(self, query: str, **values: Any) -> "Frame":
        """The result of a query as a pandas data frame that also gives Arrow and polars.

        Args:
            query: ``$name`` in it takes its value from ``values``.
        Raises:
            UserError: with DuckDB's first line, for a statement that does more than read the store, and where there
                is no store.

        >>> import mathinterp as mi
        >>> mi.open_store("results").sql("SELECT $n + 1 AS more", n=41)
           more
        0    42
        """
        from mathinterp.frame import Frame

        self.require_runs()
        return Frame.of(self.arrow(query, values))

    def dataframe(self, sql: str, values: Mapping[str, Any] | None = None) -> "pd.DataFrame":
        """The result of a query as a pandas data frame; see ``arrow``."""
        frame: pd.DataFrame = self.arrow(sql, values).to_pandas()
        return frame

    def rows(self, sql: str, values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """The result of a query as plain JSON; see ``arrow``."""
        return query.json_rows(self.arrow(sql, values))
