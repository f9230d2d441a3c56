"""A connection that several queries share, and the look at the files behind it.

Knows which views and tables it has already; what to trust it asks the survey, and how to read it the queries.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import duckdb

from mathinterp.store import query
from mathinterp.store.catalog import catalog
from mathinterp.store.files import StoreFiles
from mathinterp.store.survey import Survey, Surveyor


@dataclass
class Held:
    """Grows with what is asked of it; what it has once found stays as it was."""

    connection: duckdb.DuckDBPyConnection | None = None
    views: set[str] = field(default_factory=set)
    found: Survey = field(default_factory=lambda: Survey({}, {}, []))

    def connect(self, files: StoreFiles, surveyor: Surveyor, views: Sequence[str]) -> duckdb.DuckDBPyConnection:
        """The connection, with these views."""
        more = [view for view in views if view not in self.views]
        if self.connection is not None and not more:
            return self.connection
        found = self.survey(surveyor, catalog().tables_of(more))
        text = query.own_views(found.good, more)
        if self.connection is None:
            self.connection = query.connect(files, text, found.good)
        else:
            query.add_views(self.connection, files, text, found.good)
        self.views |= set(more)
        surveyor.name_missing_prompts(found)
        return self.connection

    def survey(self, surveyor: Surveyor, tables: Iterable[str]) -> Survey:
        """What was found in tables, looking only for what is not known already."""
        missing = [table for table in tables if table not in self.found.good]
        if missing or "runs" not in self.found.good:
            new, old = surveyor.survey(missing), self.found
            bad = list(dict.fromkeys([*old.bad, *new.bad]))
            self.found = Survey({**new.records, **old.records}, {**new.good, **old.good}, bad)
        return self.found
