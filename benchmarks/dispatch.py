"""How busy the dispatch loop keeps its replicas: run `python benchmarks/dispatch.py` (about 30 s, two CPU cores).

Three figures, all "seconds spent in shards / (replicas x seconds from ready to the last shard)":
- 64 simulated replicas and 10 ms shards: the loop alone, 6,400 shards a second;
- 1,000 simulated replicas and 100,000 shards of 200 ms, with the progress that a user sees, and by how much the driver
  grows over all but the first 10,000 of them: receipts come pickled, as from another process;
- 8 real Ray actors on CPU and 200 ms shards that sleep: the loop and Ray's round trips.
Knows the dispatcher and Ray's actors; knows nothing about models.
"""

import gc
import heapq
import itertools
import json
import os
import pickle
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import click
import psutil

from mathinterp.cluster.dispatch import Dispatcher
from mathinterp.cluster.events import Event, Finished, Ready, Receipt
from mathinterp.cluster.progress import ScanProgress
from mathinterp.cluster.ray_cluster import connection
from mathinterp.cluster.ray_workers import RayWorkers
from mathinterp.experiments.base import Shard

MANY = 100_000
VERSIONS = dict.fromkeys(("python", "torch", "transformers", "numpy", "ray", "cuda", "device", "code"), "2026.11.29")


def sleeping_shards(count: int) -> list[Shard]:
    """``count`` shards that compute nothing."""
    return [Shard("sleep", index) for index in range(count)]


def receipt_for(shard: Shard, seconds: float) -> Receipt:
    """The receipt of a shard that only took time."""
    return Receipt(shard.key, 0, seconds, socket.gethostname(), os.getpid(), 0, 0)


@dataclass
class SimulatedWorkers:
    """Replicas that exist only as a heap of finishing times.

    The clock is simulated: it runs with this thread's CPU time, which is the loop's own cost, and jumps over the
    time that the loop would sleep. So the figure does not depend on what else the machine does.
    """

    seconds: float
    _events: list[tuple[float, int, Event]] = field(default_factory=list)
    _free_at: dict[int, float] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _skipped: float = field(default_factory=lambda: -time.thread_time())

    def now(self) -> float:
        """Simulated seconds since the start."""
        return self._skipped + time.thread_time()

    def start(self, slot: int) -> None:
        """Ready at once."""
        self._free_at[slot] = self.now()
        self._add(self._free_at[slot], Ready(slot))

    def submit(self, slot: int, shard: Shard) -> None:
        """Busy for ``seconds``, from now or from the end of what it already has."""
        self._free_at[slot] = max(self._free_at[slot], self.now()) + self.seconds
        self._add(self._free_at[slot], Finished(slot, shard, receipt_for(shard, self.seconds)))

    def wait(self, timeout: float) -> list[Event]:
        """Jump to the next finishing time, then return all that are due."""
        self._skipped += max(0.0, min(self._events[0][0] - self.now(), timeout))
        events, now = [], self.now()
        while self._events and self._events[0][0] <= now:
            events.append(heapq.heappop(self._events)[2])
        return events

    def abandon(self, slot: int) -> None:
        """Never asked for: nobody hangs here."""
        raise AssertionError(slot)

    def _add(self, at: float, event: Event) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))


class SleepingReplica:
    """A replica whose shards sleep."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def load(self) -> dict[str, float]:
        """Nothing to load."""
        return {}

    def run(self, shard: Shard) -> Receipt:
        """Sleep."""
        started = time.perf_counter()
        time.sleep(self._seconds)
        return receipt_for(shard, time.perf_counter() - started)


class TogetherWorkers(RayWorkers):
    """Actors that begin together, so that starting processes is not counted: none is ready before all are."""

    def __init__(self, replicas: int, seconds: float):
        super().__init__(SleepingReplica, seconds, num_cpus=0, num_gpus=0)
        self._held: list[Event] = []
        self._replicas = replicas

    def wait(self, timeout: float) -> list[Event]:
        """Hold back Ready events until there is one of every replica."""
        events = super().wait(timeout)
        if len(self._held) == self._replicas:
            return events
        self._held += events
        return self._held if len(self._held) == self._replicas else []


def simulated_busy(replicas: int = 64, seconds: float = 0.010, shards_each: int = 200) -> float:
    """Busy part of simulated replicas' time."""
    gc.collect()
    gc.freeze()  # scanning what other modules have made (torch: 0.1 s) is not the loop's cost
    try:
        workers = SimulatedWorkers(seconds)
        Dispatcher(workers, sleeping_shards(replicas * shards_each), replicas=replicas).run()
    finally:
        gc.unfreeze()
    return shards_each * seconds / workers.now()


class PickledWorkers(SimulatedWorkers):
    """Simulated replicas whose receipts are as long as real ones, and share no object with each other."""

    def wait(self, timeout: float) -> list[Event]:
        """As above; notes the memory of the driver after the first tenth of all shards, not counted as its time."""
        events = super().wait(timeout)
        started = time.thread_time()
        for index, event in enumerate(events):
            if isinstance(event, Finished):
                receipt = replace(event.receipt, versions=VERSIONS, sha256=f"{self.finished:064x}")
                events[index] = replace(event, receipt=pickle.loads(pickle.dumps(receipt)))
                self.finished += 1
                if self.finished == MANY // 10:
                    self.memory = psutil.Process().memory_info().rss
        self._skipped -= time.thread_time() - started
        return events

    finished, memory = 0, 0


def many(replicas: int = 1000, seconds: float = 0.200) -> tuple[float, float]:
    """Busy part of simulated replicas' time over MANY shards, and MiB that the driver grew after the first tenth."""
    shards = sleeping_shards(MANY)
    shown = ScanProgress(shards, dict.fromkeys((shard.key for shard in shards), 1), replicas)
    gc.collect()
    gc.freeze()
    try:
        workers = PickledWorkers(seconds)  # whose clock starts
        dispatcher = Dispatcher(workers, shards, replicas=replicas, observer=shown)
        with shown:
            dispatcher.run()
    finally:
        gc.unfreeze()
    grown = psutil.Process().memory_info().rss - workers.memory
    return MANY // replicas * seconds / workers.now(), grown / 2**20


def actors_busy(replicas: int = 8, seconds: float = 0.200, shards_each: int = 20) -> float:
    """Busy part of real actors' time, from the moment when all are ready; Ray must be running."""
    workers = TogetherWorkers(replicas, seconds)
    try:
        return Dispatcher(workers, sleeping_shards(replicas * shards_each), replicas=replicas).run().busy
    finally:
        workers.close()


@click.command()
@click.option("--replicas", default=8, show_default=True, help="Real actors.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object last.")
def main(replicas: int, as_json: bool) -> None:
    """Print all figures."""
    simulated = simulated_busy()
    print(f"64 simulated replicas, 10 ms shards: {simulated:.1%} busy")
    thousand, grown = many()
    print(f"1,000 simulated replicas, {MANY:,} shards of 200 ms: {thousand:.1%} busy, driver grown by {grown:.0f} MiB")
    with connection(None):
        actors = actors_busy(replicas)
    print(f"{replicas} actors on CPU, 200 ms shards: {actors:.1%} busy")
    if as_json:
        print(
            json.dumps(
                {
                    "simulated_busy": simulated,
                    "thousand_busy": thousand,
                    "grown_mib": grown,
                    "actors": replicas,
                    "actors_busy": actors,
                }
            )
        )


if __name__ == "__main__":
    main()
