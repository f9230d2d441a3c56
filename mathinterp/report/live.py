"""A store's runs as they are now, and the page about them: both made anew only when something has changed.

Knows the store and contents.py; knows nothing about HTTP. Each object is asked from one thread at a time.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mathinterp.gates import shortened
from mathinterp.report.contents import contents
from mathinterp.report.scripts import vega_bundle
from mathinterp.store import Store
from mathinterp.store.run_list import RunRow
from mathinterp.text import one_line

LEAST_SECONDS = 1.0  # between looks at a store
SHARE = 0.1  # of the time, at most, that looks take
PAGE_SHARE = 0.3  # the same of pages
MOST_SECONDS = 60.0  # that a page is behind
LONGEST = 200  # characters of a name
AT_WORK = 60.0  # seconds since the last write of a run that may still be computed


@dataclass(frozen=True)
class State:
    """What whoever looks is told.

    version: of the page that there would be now.
    body: JSON: the version, how many runs are finished, and all others with how far they are.
    """

    version: str
    body: bytes
    tag: str  # changes with the body


class Looking:
    """What a store holds, looked up as often as is cheap."""

    def __init__(self, store: str, run_ids: Sequence[str] = (), compare: tuple[str, str] | None = None):
        self._store, self._all, self._named = Store(store), not run_ids, {*run_ids, *(compare or ())}
        self._state: State | None = None
        self._next = 0.0

    def state(self) -> State:
        """As it is now, or was a moment ago; raises UserError while the store is away."""
        if self._state is None or time.monotonic() >= self._next:
            started = time.monotonic()
            self._state = self._look()
            ended = time.monotonic()
            self._next = ended + max(LEAST_SECONDS, (ended - started) / SHARE)
        return self._state

    def _look(self) -> State:
        self._store.require_runs()
        rows = self._store.runs.list()
        shown = sorted(
            (row.run_id, row.shards_done, row.files)
            for row in rows
            if row.run_id in self._named or (self._all and row.status == "finished")
        )
        version = hashlib.sha256(repr(shown).encode()).hexdigest()[:16]
        finished = sum(row.status == "finished" for row in rows)
        others = [_progress(row) for row in rows if row.status != "finished"]
        body = json.dumps({"version": version, "finished": finished, "others": others}).encode()
        return State(version, body, f'"{hashlib.sha256(body).hexdigest()[:16]}"')


def _progress(row: RunRow) -> dict[str, Any]:
    status = row.status
    if status == "unfinished":
        status = "at work" if row.last_write is not None and row.last_write < AT_WORK else "stopped"
    named = {"run": row.run_id, "scan": row.scan, "model": row.model, "prompts": row.prompts}
    return {
        **{name: shortened(one_line(text), LONGEST) for name, text in named.items()}, "status": status,
        "done": row.shards_done, "shards": row.shards,
    }  # fmt: skip


class Pages:
    """The page's files, of a version that is not far behind."""

    def __init__(self, store: str, run_ids: Sequence[str] = (), compare: tuple[str, str] | None = None):
        self._given, self._run_ids, self._compare = store, run_ids, compare
        self.version = ""
        self._files: Mapping[str, bytes] = {}
        self._next = 0.0

    def files(self, version: str) -> Mapping[str, bytes]:
        """Name -> bytes; the index says which version it is, in ``data-version`` of its body.

        Raises UserError as ``contents`` does.
        """
        if version != self.version and (not self._files or time.monotonic() >= self._next):
            vega_bundle()  # the first time it takes seconds
            started = time.monotonic()
            files = dict(contents(Store(self._given), self._run_ids, self._compare, served=True))
            mark = f'<body data-version="{version}">'.encode()
            self._files = {**files, "index.html": files["index.html"].replace(b"<body>", mark, 1)}
            self.version = version
            ended = time.monotonic()
            self._next = ended + min((ended - started) / PAGE_SHARE, MOST_SECONDS)
        return self._files
