"""What the driver shows while a scan runs: one bar on a terminal, else one line every ten seconds; to stderr.

Knows shards, their cost and their forward evaluations; knows nothing about Ray or files.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

from mathinterp.cluster.dispatch import Finished, Observer, Ready
from mathinterp.experiments.base import Shard

LINE_SECONDS = 10.0

logger = logging.getLogger(__name__)


class QuietProgress(Observer):
    """No bar; troubles go to the log."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def trouble(self, message: str) -> None:
        """Log one line."""
        logger.warning(message)


class ScanProgress(QuietProgress):
    """Shards done, forward evaluations per second and time to go.

    The time to go is the remaining cost at the pace so far, counted from the first ready replica: dear shards come
    first, so counting shards would promise too little.

    Args:
        shards: what is to run now.
        evaluations: shard key -> forward evaluations in it.
        replicas: number asked for.
        console: where to write; None: stderr.
    """

    def __init__(
        self, shards: Sequence[Shard], evaluations: Mapping[str, int], replicas: int, console: Console | None = None
    ):
        self._console = console or Console(stderr=True)
        self._evaluations = evaluations
        self._total = len(shards)
        self._replicas = replicas
        self._cost_left = sum(shard.cost for shard in shards)
        self._cost_done = 0.0
        self._shards_done = 0
        self._evaluations_done = 0
        self._started: float | None = None  # when the first replica was ready
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def ready(self, event: Ready) -> None:
        """The clock of the pace starts with the first replica."""
        if self._started is None:
            self._started = time.monotonic()

    def finished(self, event: Finished) -> None:
        """Count a shard."""
        self._shards_done += 1
        self._cost_done += event.shard.cost
        self._cost_left -= event.shard.cost
        self._evaluations_done += self._evaluations[event.shard.key]

    def trouble(self, message: str) -> None:
        """Print one line above the bar."""
        self._console.print(message, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def tick(self, ready: int, waiting: int) -> None:
        """Bring the bar up to date, or print a line if the last one is ten seconds old."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._shards_done, description=self.describe(ready))
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            line = f"shards {self._shards_done}/{self._total}, {self.describe(ready)}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def describe(self, ready: int) -> str:
        """One line: pace, time to go, replicas."""
        replicas = f"{ready} of {self._replicas} replicas"
        if self._started is None:
            return f"waiting for replicas to load, {replicas} ready"
        if not self._shards_done:
            return f"first shards running, {replicas}"
        elapsed = time.monotonic() - self._started
        pace = self._evaluations_done / elapsed
        to_go = self._cost_left / self._cost_done * elapsed
        return f"{pace:,.0f} evaluations/s, {duration(to_go)} to go, {replicas}"


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3 min 20 s or 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
