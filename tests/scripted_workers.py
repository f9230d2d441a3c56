"""Workers that do what a script says, for tests of the dispatch loop."""

from collections import defaultdict, deque
from collections.abc import Callable

from benchmarks.dispatch import receipt_for
from mathinterp.cluster.events import Event, Failed, Finished, Lost, Ready
from mathinterp.experiments.base import Shard

Behaviour = Callable[[int, Shard, int], BaseException | str | None]


class ScriptedWorkers:
    """Replicas that do what a script says, one shard each a wait.

    ``behaviour(slot, shard, nth)``: None finishes the shard's nth run, an exception fails it, a string kills its
    replica. ``starts(slot, nth)`` says the same of the nth start of a slot, or "never".
    """

    def __init__(self, behaviour: Behaviour | None = None, starts=lambda slot, nth: None):
        self.behaviour = behaviour or (lambda slot, shard, nth: None)
        self.starts = starts
        self.submitted: list[tuple[int, str]] = []
        self.deepest = 0
        self._windows: dict[int, deque[Shard]] = defaultdict(deque)
        self._counts: dict[object, int] = defaultdict(int)
        self._pending: list[Event] = []

    def start(self, slot: int) -> None:
        self._counts[slot] += 1
        fate = self.starts(slot, self._counts[slot])
        if fate is None:
            self._pending.append(Ready(slot, {"engine": "scripted"}))
        elif isinstance(fate, BaseException):
            self._pending.append(Failed(slot, None, fate, "trace"))
        elif fate != "never":
            self._pending.append(Lost(slot, fate))

    def submit(self, slot: int, shard: Shard) -> None:
        self.submitted.append((slot, shard.key))
        self._windows[slot].append(shard)
        self.deepest = max(self.deepest, len(self._windows[slot]))

    def wait(self, timeout: float) -> list[Event]:
        events, self._pending = self._pending, []
        for slot, window in self._windows.items():
            if window:
                events.append(self._run(slot, window))
        return events

    def _run(self, slot: int, window: deque[Shard]) -> Event:
        shard = window.popleft()
        self._counts[shard.key] += 1
        fate = self.behaviour(slot, shard, self._counts[shard.key])
        if fate is None:
            return Finished(slot, shard, receipt_for(shard, 1.0))
        if isinstance(fate, BaseException):
            return Failed(slot, shard, fate, "the traceback")
        window.clear()
        return Lost(slot, fate)


def shards(count: int) -> list[Shard]:
    return [Shard("toy", index, cost=float(index)) for index in range(count)]


def keys(outcome) -> list[str]:
    return sorted(receipt.key for receipt in outcome.receipts)


def all_keys(count: int, without: tuple[int, ...] = ()) -> list[str]:
    return [f"toy/{index:05d}" for index in range(count) if index not in without]
