"""What the driver shows while a scan runs: one bar on a terminal, else one line every ten seconds; to stderr,
or to the log where that is JSON.

Knows shards, their cost and their forward evaluations; knows nothing about Ray or files.
"""

import heapq
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

from mathinterp import logs
from mathinterp.cluster.events import Finished, Observer, Pulse, Ready
from mathinterp.cluster.places import REPLICAS
from mathinterp.experiments.base import Shard

LINE_SECONDS = 10.0
PROMISED = 0.1  # part of the cost from which on the time to go is told: what little is done before says too little
LEAST = 1e-6  # cost of a shard that is said to cost nothing
NEARLY = 0.95  # most of a running shard that counts as done

logger = logging.getLogger(__name__)


class QuietProgress(Observer):
    """No bar; troubles go to the log."""

    def trouble(self, message: str) -> None:
        """Log one line."""
        logger.warning(message)


class Pace:
    """How much of a scan's cost is done, and how long the rest will take.

    Finished shards count by their cost. A running one counts by the part that its replica tells, else by the time it
    has had at the pace of the finished ones: with few large shards most of the work is in those that run.

    Args:
        shards: what is to run now.
    """

    def __init__(self, shards: Sequence[Shard]):
        self._left: dict[str, float] = {}  # shards that are not finished -> cost
        self._total = 0.0
        self.add(shards)
        self._seconds = 0.0  # that replicas took for the finished shards
        self._since: dict[int, float] = {}  # slot -> when what it computes now began
        self._told: dict[int, float] = {}  # slot -> part of its running shard, as told
        self.started: float | None = None  # when the first replica was ready

    def add(self, shards: Sequence[Shard]) -> None:
        """More shards are to run."""
        new = {shard.key: max(shard.cost, LEAST) for shard in shards}
        self._left |= new
        self._total += sum(new.values())

    def ready(self, slot: int, now: float) -> None:
        """The replica of ``slot`` computes from now on."""
        self.started = now if self.started is None else self.started
        self._begins(slot, now)

    def finished(self, event: Finished, now: float) -> None:
        """A shard is done, and the slot's next one begins."""
        self._left.pop(event.shard.key)
        self._seconds += now - self._since.get(event.slot, now)
        self._begins(event.slot, now)

    def tell(self, slot: int, part: float) -> None:
        """So much of the running shard of ``slot`` is done."""
        self._told[slot] = part

    def _begins(self, slot: int, now: float) -> None:
        self._since[slot] = now
        self._told.pop(slot, None)

    def _running(self, now: float) -> list[tuple[float, float, float]]:
        """Cost, part done and seconds of each shard that runs: the dearest that are left, as these come first."""
        pace = (self._total - sum(self._left.values())) / self._seconds if self._seconds else 0.0
        found = []
        dearest = sorted(self._left.values(), reverse=True)
        for cost, (slot, since) in zip(dearest, sorted(self._since.items(), key=lambda item: item[1]), strict=False):
            part = self._told.get(slot) or pace * (now - since) / cost
            found.append((cost, min(part, NEARLY), now - since))
        return found

    def done(self, now: float) -> float:
        """The part of the cost that is done, 0 to 1."""
        running = sum(cost * part for cost, part, _ in self._running(now))
        return 1 - (sum(self._left.values()) - running) / self._total

    def to_go(self, now: float) -> float | None:
        """Seconds until the last replica is done, at the pace so far; None before there is enough to tell."""
        done, running = self.done(now), self._running(now)
        if self.started is None or done < PROMISED:
            return None
        pace = done * self._total / (self._seconds + sum(seconds for _, part, seconds in running if part))
        free = [cost * (1 - part) / pace for cost, part, _ in running] or [0.0]  # when each replica is free
        heapq.heapify(free)
        for cost in sorted(self._left.values(), reverse=True)[len(running) :]:
            heapq.heapreplace(free, free[0] + cost / pace)
        return max(free)


class ScanProgress(QuietProgress):
    """Shards done, forward evaluations per second, time taken and time to go, brought up to date every second.

    Args:
        shards: what is to run now.
        evaluations: shard key -> forward evaluations in it.
        replicas: number asked for.
        console: where to write; None: stderr.
        inside: tells the part of the running shard that is done, where a replica computes in this process.
        awaited: what the first shard waits for, in words.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        evaluations: Mapping[str, int],
        replicas: int,
        console: Console | None = None,
        inside: Callable[[], float] | None = None,
        awaited: str = REPLICAS,
    ):
        self._console = console or Console(stderr=True)
        self._evaluations = evaluations
        self._total = len(shards)
        self._replicas = replicas
        self._pace = Pace(shards)
        self._inside, self._awaited = inside, awaited
        self._grows = False
        self._shards_done = 0
        self._evaluations_done = 0
        self._ready = 0
        self._begun = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not logs.AS_JSON:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("shards"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("waiting for replicas", total=self._total)
        if self._inside is not None:  # whose thread computes and cannot call tick
            threading.Thread(target=logs.as_here(self._tick_by_itself), name="progress", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()

    def _tick_by_itself(self) -> None:
        assert self._inside is not None
        while not self._ended.wait(1.0):
            self._pace.tell(0, self._inside())
            self._show()

    def added(self, shards: Sequence[Shard]) -> None:
        """More shards than were known: what is done is then a part of those known so far."""
        self._total += len(shards)
        self._pace.add(shards)
        self._grows = True
        if self._bar is not None:
            self._bar.update(self._task, total=self._total)

    def ready(self, event: Ready) -> None:
        """The clock of the pace starts with the first replica."""
        self._pace.ready(event.slot, time.monotonic())
        self._ready = max(self._ready, 1)

    def finished(self, event: Finished) -> None:
        """Count a shard."""
        self._shards_done += 1
        self._pace.finished(event, time.monotonic())
        self._evaluations_done += self._evaluations[event.shard.key]

    def pulse(self, event: Pulse) -> None:
        """Count what is done of a running shard."""
        self._pace.tell(event.slot, event.done)

    def trouble(self, message: str) -> None:
        """Print one line above the bar."""
        if logs.AS_JSON:
            super().trouble(message)
            return
        self._console.print(message, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def tick(self, ready: int, waiting: int) -> None:
        """Show where the scan stands."""
        self._ready = ready
        self._show()

    def _show(self) -> None:
        """Bring the bar up to date, or print a line if the last one is ten seconds old."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._shards_done, description=self.describe(self._ready))
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            line = f"shards {self._shards_done}/{self._total}, {self.describe(self._ready)}"
            if logs.AS_JSON:
                logs.shown(logger, line, shards_done=self._shards_done, shards=self._total, replicas_ready=self._ready)
            else:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def describe(self, ready: int) -> str:
        """One line: pace, part done, time taken and to go, replicas."""
        now = time.monotonic()
        told = [f"{duration(now - self._begun)} so far", f"{ready} of {self._replicas} replicas"]
        if self._pace.started is None:
            return f"waiting for {self._awaited}, {', '.join(told)} ready"
        if (to_go := self._pace.to_go(now)) is not None:
            told.insert(1, f"about {duration(to_go)} to go")
        pace = self._evaluations_done / max(now - self._pace.started, 1e-9)
        told.insert(0, f"{pace:,.0f} evaluations/s" if self._shards_done else "first shards running")
        known = " of what is known to be needed" if self._grows else ""
        return f"{self._pace.done(now):.0%} done{known}, {', '.join(told)}"


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3 min 20 s or 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
