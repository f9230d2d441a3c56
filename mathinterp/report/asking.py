"""SQL asked from a page: one query that only reads, within limits of rows, time and memory.

Knows the store's reader; knows nothing about HTTP.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, BinaryIO

import psutil
import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.report.cells import format_value
from mathinterp.store import Store
from mathinterp.store.export import write_csv
from mathinterp.store.query import json_rows
from mathinterp.text import counted, one_line

ROWS = 1000  # of a table
CELL = 500  # characters of a cell
SECONDS = 30.0  # for a query
COUNT_SECONDS = 3.0  # for counting rows beyond those that are shown
CSV_SECONDS = 600.0  # for all rows
MEMORY_SHARE = 0.25  # of the free memory
STEP = 0.05  # seconds between looks at the clock


@dataclass(frozen=True)
class Answer:
    """The first rows of a query, as text.

    numbers: of each column, whether it holds numbers.
    total: rows that there are, or, where counting them was stopped, that there are at least.
    notes: what whoever reads the rows should know, a line each.
    """

    columns: list[str]
    numbers: list[bool]
    rows: list[list[str]]
    total: int
    counted: bool
    seconds: float
    notes: list[str]

    @property
    def told(self) -> str:
        """How many rows there are, and how many of them are here."""
        took = f"{self.seconds:.2g} s"
        if self.total == len(self.rows):
            return f"{counted(self.total, 'row')}, {took}"
        of = f"{self.total:,}" if self.counted else f"more than {self.total:,} (counting them was stopped)"
        return f"the first {len(self.rows):,} rows of {of}, {took}; the CSV file has all"


class _Clock:
    """Stops what runs when its time is over, or when it is told to."""

    def __init__(self, store: Store, seconds: float):
        self._store, self._until, self._done = store, time.monotonic() + seconds, threading.Event()
        self.over = False

    def shorten(self, seconds: float) -> None:
        self._until = min(self._until, time.monotonic() + seconds)

    def stop(self) -> None:
        self._until = 0.0

    def end(self) -> None:
        self._done.set()

    def run(self) -> None:
        """Interrupts again and again: the first time the query may not have begun yet."""
        while not self._done.wait(STEP):
            if time.monotonic() > self._until:
                self.over = True
                self._store.interrupt()


class Asker:
    """Answers one query at a time, in whichever thread asks."""

    def __init__(self, store: str):
        self._store = Store(store)
        memory = max(int(psutil.virtual_memory().available * MEMORY_SHARE) // 2**20, 256)
        self._store.limits = {"memory_limit": f"{memory}MiB", "temp_directory": ""}
        self._clock: _Clock | None = None

    def table(self, sql: str, seconds: float = SECONDS) -> Answer:
        """The first rows; raises UserError for what is no query that only reads, and for one that takes too long."""
        started, first, total, all_counted = time.monotonic(), list[pa.RecordBatch](), 0, False
        with self._limited(seconds) as clock, _heard() as notes:
            try:
                rows = self._store.stream(sql)
                for batch in rows:
                    first += [batch.slice(0, ROWS - total)] if total < ROWS else []
                    total += batch.num_rows
                    if total > ROWS:
                        clock.shorten(COUNT_SECONDS)
                all_counted = True
            except UserError:
                if not clock.over:
                    raise
                if total <= ROWS:
                    raise _too_long(seconds) from None
        found = json_rows(pa.Table.from_batches(first, rows.schema), finite=False)
        kinds = [field.type for field in rows.schema]
        return Answer(
            columns=[_cell(one_line(name)) for name in rows.schema.names],
            numbers=[pa.types.is_integer(k) or pa.types.is_floating(k) or pa.types.is_decimal(k) for k in kinds],
            rows=[[_cell(value) for value in row.values()] for row in found],
            total=total,
            counted=all_counted,
            seconds=time.monotonic() - started,
            notes=notes,
        )

    def csv(self, sql: str, file: BinaryIO, seconds: float = CSV_SECONDS) -> int:
        """Write all rows, and return their number; what is wrong with a query is told before anything is written."""
        with self._limited(seconds) as clock:
            try:
                rows = self._store.stream(sql)
                batches = iter(rows)
                first = list(islice(batches, 1))
                return write_csv(pa.RecordBatchReader.from_batches(rows.schema, chain(first, batches)), file)
            except UserError:
                if clock.over:
                    raise _too_long(seconds) from None
                raise

    def stop(self) -> None:
        """End the query that runs, from another thread."""
        if (clock := self._clock) is not None:
            clock.stop()

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[_Clock]:
        self._store.require_runs()  # a store that is away has no rows, and must not look as if it had none
        self._store.looked_at.clear()  # each answer says which runs are not finished
        clock = self._clock = _Clock(self._store, seconds)
        watch = threading.Thread(target=clock.run, name="clock", daemon=True)
        watch.start()
        try:
            yield clock
        finally:
            self._clock = None
            clock.end()
            watch.join()


def _too_long(seconds: float) -> UserError:
    return UserError(
        f"SQL: stopped; a query from the page may take {seconds:g} s. Ask for less, or use 'mathinterp sql', which has"
        " no such limit"
    )


def _cell(value: Any) -> str:
    text = format_value(value)
    return text if len(text) <= CELL else f"{text[:CELL]}… ({len(text):,} characters)"


class _Listener(logging.Handler):
    """Lines that the package logs in one thread."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.lines.append(one_line(record.getMessage()))


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What the package warns of in this thread within the block."""
    listener, package = _Listener(), logging.getLogger("mathinterp")
    package.addHandler(listener)
    try:
        yield listener.lines
    finally:
        package.removeHandler(listener)
