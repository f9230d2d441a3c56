"""Does the thread that computes move? What the kernel says of it, so that a deadlock is told from a long computation.

Knows threads, processes and the GPU; knows nothing about shards or Ray. Where there is no /proc, everything moves.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mathinterp.engine import batching
from mathinterp.logs import as_here

TASKS = Path("/proc/self/task")
LOOK_SECONDS = 4.0  # at least, between two looks
COUNTED = 10.0  # most seconds that one look adds: a process that was stopped meanwhile has not stood still
SHARE = 0.002  # of one core: what waits for something that never comes, and looks now and then, takes less
NOTHING = (0.0, 0, 0.0)  # evaluations, bytes, processor seconds
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Vital:
    """Says for how long the thread that computes has stood still, seen from another thread.

    It moves if it runs, may run or waits for a disk; if it, a thread begun since, or a child process (a compiler) takes
    processor time; if one of these threads reads or writes (files, also of a network; TLS connections); if the GPU has
    work; or if the engine counts evaluations. Made before anything computes: threads that are there already (those of
    Ray) do not count.
    """

    def __init__(self) -> None:
        self._others = _threads()
        self._thread: int | None = None
        self._seen, self._at, self._still = NOTHING, time.monotonic(), 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The calling thread computes from now on."""
        with self._lock:
            self._thread, self._seen = threading.get_native_id(), NOTHING
            self._at, self._still = time.monotonic(), 0.0

    def end(self) -> None:
        """It computes no more."""
        self._thread = None

    def still(self) -> float:
        """Seconds since anything moved; 0 where nothing computes."""
        with self._lock:
            thread, now = self._thread, time.monotonic()
            if thread is None:
                return 0.0
            if now - self._at < LOOK_SECONDS:
                return self._still
            threads = self._counted(thread)
            seen = (batching.evaluated, sum(map(_transferred, threads)), _processor_seconds(threads))
            before, since = self._seen, now - self._at
            self._seen, self._at = seen, now
            moved = seen[:2] != before[:2] or abs(seen[2] - before[2]) >= max(
                SHARE * since, TICK
            )  # less: a child ended
            moved = moved or _state(thread) in ("R", "D", "") or _gpu_works()
            self._still = 0.0 if moved else self._still + min(since, COUNTED)
            return self._still

    def _counted(self, thread: int) -> set[int]:
        return ({thread} | (_threads() - self._others)) - {threading.get_native_id()}


def _threads() -> set[int]:
    try:
        return {int(name) for name in os.listdir(TASKS)}
    except OSError:
        return set()


def _fields(place: Path) -> list[str]:
    """Fields of a stat file after the name, state first; empty if there is none."""
    try:
        return (place / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(thread: int) -> str:
    return (_fields(TASKS / str(thread)) or [""])[0]


def _seconds(place: Path) -> float:
    fields = _fields(place)
    return (int(fields[11]) + int(fields[12])) * TICK if fields else 0.0


def _transferred(thread: int) -> int:
    """Bytes that a thread has read and written; 0 where the kernel does not tell."""
    try:
        lines = (TASKS / str(thread) / "io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _processor_seconds(threads: set[int]) -> float:
    return sum(_seconds(TASKS / str(each)) for each in threads) + _children_seconds()


def _children_seconds() -> float:
    import psutil

    found = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        found += times.user + times.system
    return found


def _gpu_works() -> bool:
    return torch.cuda.is_initialized() and not torch.cuda.default_stream().query()


def watch(still: Callable[[], float], silence: float, warn: Callable[[str], None]) -> Callable[[], None]:
    """Call ``warn`` with one line, from a thread, each time that nothing has moved for ``silence`` seconds; ends it."""
    ended = threading.Event()

    def look() -> None:
        told = False
        while not ended.wait(min(LOOK_SECONDS, silence / 4)):
            stands = still() >= silence
            if stands and not told:
                warn(
                    f"the shard that runs has not moved for {silence:.0f} s: it waits for what may never come;"
                    " Ctrl-C ends the run, and the same command goes on from here"
                )
            told = stands

    threading.Thread(target=as_here(look), name="watch", daemon=True).start()
    return ended.set
