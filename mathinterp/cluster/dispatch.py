"""The bounded-window loop: hands shards to replicas, takes receipts back, retries, and gives up in good order.

Knows slots, shards, attempts and windows; knows nothing about Ray, models or files. A slot is a place for one
replica: its process may die and be replaced, the slot stays. Result rows never come through here: a replica writes
its shard's file (the commit record) and answers with a receipt of a few numbers.

The rules:
- Dearest shards first, at most ``window`` shards on a replica, so that it never waits for the driver; near the end
  only one, so that what is left goes to whoever is free first.
- An exception inside a shard is an attempt; after ``max_attempts`` the shard is poison, reported, and the rest is
  finished. A retry prefers a replica on which the shard has not failed, and waits until fresh shards are handed out.
- A replica that dies is replaced. Its waiting shards go back to the front unblamed; the shard that was running is
  blamed with a loss, not an attempt, and is poison only after ``max_losses``: it may be the killer. The first time it
  is the next to be given out, to whoever is free first; from then on it waits as other retries do.
- A replica is used from the moment it is ready, however late, and one that never comes blocks nothing.
- A replica says every few seconds, from a thread that does not compute, that it is there, how far its shard is and
  whether the thread that computes moves (vital.py). One that has done so and then says nothing for ``silence`` seconds,
  or only that nothing moves, hangs, and is ended and replaced like a dead one. However long a shard, a load or a
  compilation takes, it moves meanwhile. Only time in which this loop itself ran is counted: a suspension is no silence.
- Before a shard of a dead or silent replica is given to another one, or waited for, its file is looked for.
- Shards may follow from finished ones (``source``). A replica with nothing to do while others work gets one before it
  is known to be needed; a lone replica never does.
- A UserError, which no retry can put right, ends the run at once; so does Unfinished, a store that gave out for good.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mathinterp.cluster.events import (
    Event,
    Failed,
    Finished,
    Lost,
    NoReplicaLeft,
    Observer,
    Observers,
    Pulse,
    Ready,
    Receipt,
    Source,
    Workers,
    first_line,
)  # fmt: skip
from mathinterp.errors import Unfinished, UserError
from mathinterp.experiments.base import Shard
from mathinterp.logs import about
from mathinterp.text import counted

SILENCE = 300.0  # seconds without a pulse after which a replica hangs; --hangs-after
LOOK = 20.0  # seconds without a pulse after which it gets no further shards, and its files are looked for
COUNTED = 5.0  # most seconds that one turn of the loop adds to a silence


@dataclass(frozen=True)
class ShardFailure:
    """A poison shard: given up after the cap of attempts or losses."""

    key: str
    error: str  # first line
    traceback: str  # where it was raised; empty for a process that died
    attempts: int
    losses: int


@dataclass
class Outcome:
    """What the loop leaves behind."""

    receipts: list[Receipt] = field(default_factory=list)
    failures: list[ShardFailure] = field(default_factory=list)
    tries: dict[str, int] = field(default_factory=dict)  # shard key -> runs begun, where it took more than one
    notes: dict[str, Any] = field(default_factory=dict)  # of the first replica that was ready
    ready_seconds: float = 0.0  # summed over replicas: from being ready to its death or the last shard
    replicas_lost: int = 0

    @property
    def busy(self) -> float:
        """Part of the ready replicas' time that went into finished shards; 0 if no replica was ever ready."""
        worked = sum(receipt.seconds for receipt in self.receipts)
        return worked / self.ready_seconds if self.ready_seconds else 0.0


@dataclass
class _Task:
    shard: Shard
    attempts: int = 0
    losses: int = 0
    failed_on: set[int] = field(default_factory=set)


class Dispatcher:
    """Runs shards on replicas until every one is finished or poison.

    Args:
        workers: starts replicas and runs shards on them.
        shards: what to run, in any order.
        replicas: number of slots.
        window: most shards on one replica at a time, running and waiting.
        max_attempts: exceptions after which a shard is poison.
        max_losses: deaths of its replica after which a shard is poison.
        max_starts: failed starts in a row after which a slot is given up.
        patience: seconds without any ready replica after which NoReplicaLeft is raised.
        silence: seconds without a pulse after which a replica is replaced; None: SILENCE.
        found: receipts of those of the given shards whose files are in the store.
        observer: told what happens.
        check: looks at each replica that joins, and may return a line of warning about it.
        source: gives more shards while the loop runs; None: there are no more.
    """

    def __init__(
        self,
        workers: Workers,
        shards: Iterable[Shard],
        *,
        replicas: int,
        window: int = 2,
        max_attempts: int = 3,
        max_losses: int = 5,
        max_starts: int = 3,
        patience: float = 1800.0,
        silence: float | None = None,
        found: Callable[[Collection[str]], Mapping[str, Receipt]] = lambda keys: {},
        observer: Observer | Observers | None = None,
        check: Callable[[Ready], str | None] = lambda event: None,
        source: Source | None = None,
    ):
        assert replicas >= 1
        assert window >= 1
        self._workers = workers
        self._window = window
        self._max_attempts = max_attempts
        self._max_losses = max_losses
        self._max_starts = max_starts
        self._patience = patience
        self._silence = SILENCE if silence is None else silence
        self._found = found
        self._shared: dict[tuple[Any, ...], tuple[str, dict[str, str]]] = {}  # node and versions of receipts
        self._silent: dict[int, float] = {}  # slot whose replica gives pulses -> seconds since it was heard of
        self._observer = observer or Observer()
        self._check = check
        self._source = source
        self._fresh = deque(_Task(shard) for shard in sorted(shards, key=lambda shard: -shard.cost))
        self._retries: list[_Task] = []
        self._unfinished = len(self._fresh)
        self._in_flight: dict[int, dict[str, _Task]] = {slot: {} for slot in range(replicas)}  # in submission order
        self._ready: dict[int, float] = {}  # slot -> since when, time.monotonic()
        self._starting: set[int] = set()
        self._failed_starts = dict.fromkeys(range(replicas), 0)
        self._last_trouble, self._last_told = "none of them ever started", ""
        self.outcome = Outcome()  # grows while the loop runs, and tells how far it came when it raises

    def run(self) -> Outcome:
        """Run everything; raises UserError from a replica, NoReplicaLeft, or KeyboardInterrupt from the terminal."""
        try:
            self._loop()
        finally:
            for slot in list(self._ready):
                self._not_ready(slot)
        return self.outcome

    def _loop(self) -> None:
        for slot in self._in_flight:
            self._start(slot)
        last_ready = turn = time.monotonic()
        while self._unfinished:
            if not self._ready and not self._starting:
                raise NoReplicaLeft(
                    f"no replica is left to run {counted(self._unfinished, 'shard')}: {self._last_trouble}",
                    self._last_told,
                )
            for event in self._workers.wait(timeout=1.0):
                self._handle(event)
            turn, before = time.monotonic(), turn
            self._listen(min(turn - before, COUNTED))
            self._fill()
            waiting = len(self._fresh) + len(self._retries)
            self._observer.queue(waiting, self._unfinished - waiting)
            self._observer.tick(len(self._ready), len(self._starting))
            if self._ready:
                last_ready = time.monotonic()
            elif time.monotonic() - last_ready > self._patience:
                raise NoReplicaLeft(
                    f"no replica was ready for {self._patience:.0f} s: {self._last_trouble}", self._last_told
                )

    def _start(self, slot: int) -> None:
        self._starting.add(slot)
        self._workers.start(slot)

    def _not_ready(self, slot: int) -> None:
        since = self._ready.pop(slot)
        self.outcome.ready_seconds += time.monotonic() - since

    def _listen(self, seconds: float) -> None:
        """Count how long each replica has been silent; look for files of those that are, end those that hang."""
        for slot, before in list(self._silent.items()):
            now = self._silent[slot] = before + seconds
            if now // LOOK > before // LOOK:
                self._look(slot)
            if now >= self._silence:
                self._workers.abandon(slot)
                self._replica_lost(Lost(slot, f"it hangs: nothing in it has moved for {now:.0f} s"))

    def _look(self, slot: int) -> None:
        """Count the shards of the slot's window whose files are there."""
        tasks = self._in_flight[slot]
        for key, receipt in (self._found(list(tasks)) if tasks else {}).items():
            self._finished(Finished(slot, tasks[key].shard, receipt))

    def _finished(self, event: Finished) -> None:
        task = self._in_flight[event.slot].pop(event.shard.key)
        if task.attempts + task.losses:
            self.outcome.tries[task.shard.key] = task.attempts + task.losses + 1
        self._unfinished -= 1
        self.outcome.receipts.append(self._sharing(event.receipt))
        self._observer.finished(event)
        if self._source is not None:
            self._add(self._source.finished(event.shard))

    def _sharing(self, receipt: Receipt) -> Receipt:
        """The receipt with what others hold too in one piece: each came by itself from another process."""
        same = (receipt.node, tuple(receipt.versions.items()))
        node, versions = self._shared.setdefault(same, (receipt.node, receipt.versions))
        return replace(receipt, node=node, versions=versions)

    def _add(self, shards: Sequence[Shard]) -> None:
        if shards:
            self._fresh.extend(_Task(shard) for shard in sorted(shards, key=lambda shard: -shard.cost))
            self._unfinished += len(shards)
            self._observer.added(shards)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Pulse) or event.slot in self._silent:
            self._silent[event.slot] = event.still if isinstance(event, Pulse) else 0.0
        if isinstance(event, Pulse):
            self._observer.pulse(event)
        elif (
            isinstance(event, Finished | Failed) and event.shard and event.shard.key not in self._in_flight[event.slot]
        ):
            return  # its file was found before the replica was heard of again
        elif isinstance(event, Ready):
            self._starting.discard(event.slot)
            self._ready[event.slot] = time.monotonic()
            self._failed_starts[event.slot] = 0
            self.outcome.notes = self.outcome.notes or event.notes
            self._observer.ready(event)
            if warning := self._check(event):
                self._observer.trouble(warning)
        elif isinstance(event, Finished):
            self._finished(event)
        elif isinstance(event, Lost):
            self._replica_lost(event)
        elif isinstance(event.error, UserError | Unfinished):
            raise event.error
        elif event.shard is None:
            self._start_failed(event.slot, f"a replica could not load: {first_line(event.error)}", event.traceback)
        else:
            self._shard_failed(event)

    def _shard_failed(self, event: Failed) -> None:
        assert event.shard is not None
        task = self._in_flight[event.slot].pop(event.shard.key)
        task.attempts += 1
        task.failed_on.add(event.slot)
        error = first_line(event.error)
        with about(shard=task.shard.key):
            self._observer.trouble(f"{task.shard.key} failed, attempt {task.attempts} of {self._max_attempts}: {error}")
        if task.attempts >= self._max_attempts:
            self._give_up(task, error, event.traceback)
        else:
            self._retry(task, "exception")

    def _replica_lost(self, event: Lost) -> None:
        self.outcome.replicas_lost += 1
        self._observer.lost(event.slot)
        self._silent.pop(event.slot, None)
        if event.slot in self._starting:
            self._start_failed(event.slot, f"a replica died while it loaded: {event.reason}", event.traceback)
            return
        self._not_ready(event.slot)
        self._look(event.slot)
        window = list(self._in_flight[event.slot].values())
        self._in_flight[event.slot].clear()
        self._observer.trouble(f"a replica died, {counted(len(window), 'shard')} back to the queue: {event.reason}")
        self._fresh.extendleft(reversed(window[1:]))
        for running in window[:1]:
            running.losses += 1
            running.failed_on.add(event.slot)
            if running.losses >= self._max_losses:
                self._give_up(running, f"its replica died {running.losses} times: {event.reason}", event.traceback)
            else:
                self._retry(running, "lost")
        self._last_trouble, self._last_told = event.reason, event.traceback
        self._start(event.slot)

    def _start_failed(self, slot: int, message: str, told: str) -> None:
        self._starting.discard(slot)
        self._silent.pop(slot, None)
        self._failed_starts[slot] += 1
        self._last_trouble, self._last_told = message, told
        self._observer.trouble(message)
        if self._failed_starts[slot] < self._max_starts:
            self._start(slot)

    def _retry(self, task: _Task, why: str) -> None:
        self._retries.append(task)
        self._observer.retried(task.shard, why)

    def _give_up(self, task: _Task, error: str, traceback: str) -> None:
        self._unfinished -= 1
        self.outcome.tries[task.shard.key] = task.attempts + task.losses
        self.outcome.failures.append(ShardFailure(task.shard.key, error, traceback, task.attempts, task.losses))
        self._observer.given_up(task.shard)

    def _fill(self) -> None:
        """Give every ready replica a shard before any gets a second one."""
        self._start_early()
        for depth in range(1, self._window + 1):
            for slot in self._ready:
                if len(self._in_flight[slot]) >= depth or self._silent.get(slot, 0.0) >= LOOK:
                    continue
                if depth > 1 and len(self._fresh) <= len(self._ready):
                    return
                task = self._take(slot)
                if task is not None:
                    self._in_flight[slot][task.shard.key] = task
                    self._workers.submit(slot, task.shard)

    def _start_early(self) -> None:
        """As many shards as there are replicas with nothing to do, while others are at work."""
        idle = [slot for slot in self._ready if not self._in_flight[slot] and self._silent.get(slot, 0.0) < LOOK]
        while self._source is not None and len(self._ready) > 1 and len(self._fresh) + len(self._retries) < len(idle):
            shard = self._source.early()
            if shard is None:
                return
            self._add([shard])

    def _take(self, slot: int) -> _Task | None:
        for index, task in enumerate(self._retries):
            if (task.losses, task.attempts) == (1, 0):
                return self._retries.pop(index)
        if self._fresh:
            return self._fresh.popleft()
        for index, task in enumerate(self._retries):
            if slot not in task.failed_on or self._ready.keys() <= task.failed_on:
                return self._retries.pop(index)
        return None
