"""Replicas whose processes outlive a run, on the Ray that tests share: torch is imported once, not for every replica.

Each replica is still an object of its own that loads its model in another process, and all goes through Ray as ever;
only the process may have computed for an earlier run. Tests with a Ray of their own, and drivers that are processes of
their own, have replicas in fresh processes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from mathinterp.cluster import ray_workers
from mathinterp.cluster.ray_workers import RayWorkers
from mathinterp.experiments import registry
from mathinterp.experiments.base import Shard

KEPT = 2  # idle processes, of half a gigabyte each


class Host:
    """What a process of Ray holds: one replica after another."""

    def __init__(self) -> None:
        self._asked: tuple[type, tuple[Any, ...]] | None = None
        self._replica: Any = None

    def hold(self, replica_class: type, *arguments: Any) -> None:
        """Know the next replica; it is made when it loads, whose failure is told."""
        assert self._replica is None
        self._asked = (replica_class, arguments)

    def drop(self) -> None:
        """Let go of the replica, and of experiments that it brought."""
        if self._replica is not None:
            self._replica.close()
        self._replica = self._asked = None
        registry._added.clear()
        registry.stored.cache_clear()
        registry.experiments.cache_clear()
        gc.collect()

    def load(self) -> dict[str, Any]:
        """As of the replica, which is made now."""
        assert self._asked is not None
        replica_class, arguments = self._asked
        self._replica = replica_class(*arguments)
        return self._replica.load()

    def run(self, shard: Shard) -> Any:
        """As of the replica."""
        return self._replica.run(shard)

    def pulse(self) -> tuple[float, float]:
        """As of the replica, if there is one by now."""
        replica = self._replica
        return (0.0, 0.0) if replica is None else replica.pulse()


class WarmWorkers(RayWorkers):
    """``RayWorkers`` that takes idle processes first, and keeps those that have answered all they were asked."""

    idle: ClassVar[list[Any]] = []

    def __init__(self, replica_class: type, *arguments: Any, num_cpus: float, num_gpus: float, at_once: int = 1):
        assert (num_gpus, at_once) == (0, 1)
        # An idle process must not reserve a core that a training waits for.
        super().__init__(Host, replica_class, *arguments, num_cpus=0, num_gpus=0)
        self._hosts, self._actor_class = self._actor_class, self

    def remote(self, *arguments: Any) -> Any:
        """The handle of a process that holds a replica of ``arguments``."""
        host = self.idle.pop() if self.idle else self._hosts.remote()
        host.hold.remote(*arguments)
        return host

    def close(self) -> None:
        """Keep processes for the next run; kill those that still compute."""
        at_work = {slot for slot, _ in self._waiting.values()}
        for slot in [slot for slot in self._actors if slot not in at_work]:
            if len(self.idle) < KEPT:
                host = self._actors.pop(slot)
                host.drop.remote()
                self.idle.append(host)
        super().close()


@contextmanager
def warm_replicas() -> Iterator[None]:
    """Within the block scans of this process that run on Ray have such replicas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_workers, "RayWorkers", WarmWorkers)
        yield
        WarmWorkers.idle.clear()
