"""What is said between the dispatcher and whoever runs replicas: events and receipts, and the interfaces of both sides.

Knows shards; decides nothing.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from mathinterp.errors import Unfinished
from mathinterp.experiments.base import Shard


@dataclass(frozen=True, slots=True)  # a driver keeps one for each of its shards
class Receipt:
    """What a replica answers when a shard's file is written."""

    key: str
    rows: int
    seconds: float  # computing, and writing where no other shard computes meanwhile
    node: str
    pid: int
    bytes: int  # of the written file
    peak_memory: int  # bytes: device memory on a GPU, resident memory on a CPU
    versions: dict[str, str] = field(default_factory=dict)  # of what computed it
    sha256: str = ""  # of the written file
    halved: int = 0  # how often memory ran out, so that the replica now computes in smaller batches


@dataclass(frozen=True)
class Ready:
    """The replica of ``slot`` has loaded and takes shards; ``notes`` are facts worth storing with the run."""

    slot: int
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """A shard's file is written."""

    slot: int
    shard: Shard
    receipt: Receipt


@dataclass(frozen=True)
class Failed:
    """An exception inside a living replica: in a shard, or (shard None) while it loaded."""

    slot: int
    shard: Shard | None
    error: BaseException
    traceback: str = ""


@dataclass(frozen=True)
class Lost:
    """The replica's process or node is gone, or of no use any more, and with it whatever was in its window."""

    slot: int
    reason: str
    traceback: str = ""  # of what was raised in it before


@dataclass(frozen=True)
class Pulse:
    """The replica of ``slot`` is there; ``done`` is the part of the running shard that it has computed, if known."""

    slot: int
    done: float = 0.0
    still: float = 0.0  # seconds for which the shard has not moved


Event = Ready | Finished | Failed | Lost | Pulse


class Workers(Protocol):
    """All that the loop asks of whatever runs the replicas."""

    def start(self, slot: int) -> None:
        """Ask for a fresh replica; Ready, Failed or Lost follows, or nothing while there is no machine for it."""

    def submit(self, slot: int, shard: Shard) -> None:
        """Queue a shard on a ready replica, which runs its shards in the order given."""

    def abandon(self, slot: int) -> None:
        """End the replica of ``slot``, which does not answer; no event follows."""

    def wait(self, timeout: float) -> list[Event]:
        """What has happened, oldest first; blocks for the first event, at most ``timeout`` seconds."""


class Source(Protocol):
    """Where shards come from that follow from others (see experiments/growing.py)."""

    def finished(self, shard: Shard) -> Sequence[Shard]:
        """A shard is written: those that can run now and could not before."""

    def early(self) -> Shard | None:
        """A shard for a replica that has nothing to do, while others are at work; None: let it wait."""


class Observer(AbstractContextManager["Observer", None]):
    """Told what happens within its ``with`` block, for a progress bar or a log; does nothing by itself."""

    def __exit__(self, *error: object) -> None:
        """The run is over, or has failed."""

    def added(self, shards: Sequence[Shard]) -> None:
        """There are more shards than were said at first."""

    def ready(self, event: Ready) -> None:
        """A replica has loaded."""

    def finished(self, event: Finished) -> None:
        """A shard is written."""

    def trouble(self, message: str) -> None:
        """A shard or a replica failed; one line."""

    def pulse(self, event: Pulse) -> None:
        """How far the running shard of a replica is."""

    def retried(self, shard: Shard, why: str) -> None:
        """A shard will run again: after an "exception", or its replica was "lost"."""

    def given_up(self, shard: Shard) -> None:
        """A shard is poison."""

    def lost(self, slot: int) -> None:
        """The replica of a slot died or was ended."""

    def queue(self, waiting: int, running: int) -> None:
        """Before each ``tick``: how many shards no replica has, and how many are with one."""

    def tick(self, ready: int, waiting: int) -> None:
        """Called at least once a second with the numbers of ready and of still awaited replicas."""


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer):
        self._observers, self._stack = observers, ExitStack()

    def __enter__(self) -> Self:
        for observer in self._observers:
            self._stack.enter_context(observer)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        """A method that calls that of each."""

        def tell(*arguments: Any) -> None:
            for observer in self._observers:
                getattr(observer, name)(*arguments)

        return tell


class NoReplicaLeft(Unfinished):
    """Shards remain and there is no replica to run them, nor will there be one.

    Args:
        message: one line.
        told: the traceback of what kept the last one from starting, if any; a note of the exception.
    """

    def __init__(self, message: str, told: str = ""):
        super().__init__(message)
        if told:
            self.add_note(told)


class CardLost(RuntimeError):
    """A GPU of this process gives nothing but errors any more, whatever is asked; another process must take over."""


def first_line(error: BaseException) -> str:
    """The error as one line: its type and the first line of its message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
