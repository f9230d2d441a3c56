"""How busy the dispatch loop keeps its replicas: run `python benchmarks/dispatch.py` (about 20 s, two CPU cores).

Two figures, both "seconds spent in shards / (replicas x seconds from ready to the last shard)":
- 64 simulated replicas and 10 ms shards: the loop alone, 6,400 shards a second;
- 8 real Ray actors on CPU and 200 ms shards that sleep: the loop and Ray's round trips.
Knows the dispatcher and Ray's actors; knows nothing about models.
"""

import gc
import heapq
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import click

from mathinterp.cluster.dispatch import Dispatcher
from mathinterp.cluster.events import Event, Finished, Ready, Receipt
from mathinterp.cluster.ray_cluster import connection
from mathinterp.cluster.ray_workers import RayWorkers
from mathinterp.experiments.base import Shard


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
    """Print both figures."""
    simulated = simulated_busy()
    print(f"64 simulated replicas, 10 ms shards: {simulated:.1%} busy")
    with connection(None):
        actors = actors_busy(replicas)
    print(f"{replicas} actors on CPU, 200 ms shards: {actors:.1%} busy")
    if as_json:
        print(json.dumps({"simulated_busy": simulated, "actors": replicas, "actors_busy": actors}))


if __name__ == "__main__":
    main()
