"""Where a run's shards are computed: in this process, or by replicas on Ray.

Knows what each place needs before and while shards run; knows nothing about experiments. Both compute with as many
threads, so that rows are the same bit for bit. Ray is imported only by runs that use it.
"""

import io
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from mathinterp.cluster.events import Observer, Workers
from mathinterp.cluster.job import AT_ONCE, ReplicaJob
from mathinterp.cluster.ray_private import local_card_bytes, machine_cores
from mathinterp.models.handle import HeldSource, Model
from mathinterp.models.resolved import ResolvedModel

logger = logging.getLogger(__name__)
REPLICAS = "replicas to load"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
THREAD_BYTES = 2 * 2**30  # of weights, for each thread of a replica: cores mostly come with 4 GiB of memory or more


@dataclass(frozen=True)
class Placement:
    """How many replicas, and what each of them reserves."""

    replicas: int
    gpus: float  # each; 0 on CPU
    cpus: float  # each
    threads: int  # CPU threads of each

    @property
    def device(self) -> str:
        """torch device type of the replicas."""
        return "cuda" if self.gpus else "cpu"

    @property
    def cards(self) -> int:
        """GPUs that the layers of one replica's model are dealt out to; 1 on CPU and on a part of a GPU."""
        return max(1, int(self.gpus))

    @property
    def at_once(self) -> int:
        """Shards that one replica works on side by side."""
        return AT_ONCE if self.gpus else 1


def threads_for(model_bytes: int, cores: int) -> int:
    """CPU threads of one replica, from the model and the machine's cores alone.

    Threads share a sum, and so their number decides its last bits: it must not follow from the number of replicas, nor
    from that of the shards left, or a run of other replicas, or one resumed, would have other rows.
    """
    return max(1, min(cores, model_bytes // THREAD_BYTES))


class Cards(Protocol):
    """What a replica has for its model's layers."""

    def cards(self) -> int:
        """GPUs that the layers of one replica's model are dealt out to."""

    def card_bytes(self) -> int | None:
        """Memory of the smallest of them; None: not asked for."""


class Place(Cards, Protocol):
    """Where shards are computed: here, on Ray, or by a service.

    awaited: what the first shard waits for, in words.
    """

    awaited: ClassVar[str]

    def device(self) -> str:
        """ "cuda" or "cpu"."""

    def described(self) -> ResolvedModel:
        """The model as it is found there."""

    def placement(self, shards: int, model_bytes: int) -> Placement:
        """How many replicas for so many shards, of models of so many bytes."""

    def observers(self, evaluations: Mapping[str, int], tags: Mapping[str, str], tokens: float) -> list[Observer]:
        """Who is told of the run beside the progress; ``tokens``: that one evaluation reads, on average."""

    def workers(self, job: ReplicaJob, placement: Placement) -> AbstractContextManager[Workers]:
        """They, until the block ends."""


@dataclass(frozen=True)
class Here:
    """This process, without Ray, on the model's own device."""

    awaited: ClassVar[str] = REPLICAS
    model: Model

    def device(self) -> str:
        """Where the model is."""
        return self.model.device

    def cards(self) -> int:
        """One device."""
        return 1

    def card_bytes(self) -> int | None:
        """Not asked for: the model is here, or loaded here at once."""
        return None

    def described(self) -> ResolvedModel:
        """As it is in this process."""
        return self.model.described

    def placement(self, shards: int, model_bytes: int) -> Placement:
        """One replica; as many threads as a Ray of this machine alone would give it."""
        if self.device() == "cuda":
            return Placement(1, 1, 1, 1)
        if model_bytes < 2 * THREAD_BYTES:
            return Placement(1, 0, 1, 1)
        return Placement(1, 0, 1, threads_for(model_bytes, machine_cores()))

    def observers(self, evaluations: Mapping[str, int], tags: Mapping[str, str], tokens: float) -> list[Observer]:
        """None beside the progress."""
        return []

    @contextmanager
    def workers(self, job: ReplicaJob, placement: Placement) -> Iterator[Workers]:
        """One replica here; the model is lent until the block ends."""
        from mathinterp.cluster.local_workers import LocalWorkers

        with ExitStack() as lent:
            here = replace(job, source=HeldSource(self.model, lent))
            with closing(LocalWorkers(here, placement.at_once)) as workers:
                yield workers


class RaysWords(io.TextIOBase):
    """Instead of stdout, which is for results: what Ray prints about dead nodes is logged, the rest is for stderr.

    Such deaths are told by the progress in one line; Ray's many are for --verbose.
    """

    _logged = False  # the text before

    def write(self, text: str) -> int:
        """One record, or as it is."""
        logged, self._logged = self._logged, "(raylet)" in text
        if self._logged:
            logger.info(_COLOUR.sub("", text).strip())
        elif not (logged and text == "\n"):  # which `print` writes by itself
            sys.stderr.write(text)
        return len(text)


@dataclass
class OnRay:
    """Replicas on a cluster, or on a local Ray for this run alone.

    Args:
        stack: in which the connection is kept open.
        replicas, gpus_per_replica, address: as for ``run_scan``.
    """

    awaited: ClassVar[str] = REPLICAS
    model: Model
    stack: ExitStack
    replicas: int | None = None
    gpus_per_replica: float | None = None
    address: str | None = None
    _gpus: float | None = None  # of each replica, once asked for

    def _each(self) -> float:
        from mathinterp.cluster.ray_cluster import connection, existing_cluster, gpus_each

        if self._gpus is None:
            if existing_cluster(self.address):
                self.stack.enter_context(connection(self.address))
            self._gpus = gpus_each(self.gpus_per_replica)
        return self._gpus

    def device(self) -> str:
        """By the GPUs that nodes report; nothing here initialises CUDA."""
        return "cuda" if self._each() else "cpu"

    def cards(self) -> int:
        """GPUs of each replica; 1 on CPU."""
        return max(1, int(self._each()))

    def card_bytes(self) -> int | None:
        """Memory of a GPU, where it is one of this machine."""
        from mathinterp.cluster.ray_cluster import existing_cluster

        return None if existing_cluster(self.address) or not self._each() else local_card_bytes()

    def described(self) -> ResolvedModel:
        """As nodes of that kind will find it."""
        return self.model.described_on(self.device())

    def placement(self, shards: int, model_bytes: int) -> Placement:
        """See ray_cluster.place; starts a local Ray where there is no cluster."""
        from mathinterp.cluster.ray_cluster import connection, place

        self.stack.enter_context(connection(self.address, self.model.carried_bytes))
        return place(self.replicas, self._each(), shards, model_bytes)

    def observers(self, evaluations: Mapping[str, int], tags: Mapping[str, str], tokens: float) -> list[Observer]:
        """Ray's metrics."""
        from mathinterp.cluster.metrics import Metrics

        return [Metrics(evaluations, tags, tokens)]

    @contextmanager
    def workers(self, job: ReplicaJob, placement: Placement) -> Iterator[Workers]:
        """Actors; the job travels through the object store, with the weights of a model that has no name."""
        import ray

        from mathinterp.cluster.ray_workers import RayWorkers
        from mathinterp.cluster.replica import Replica

        kept = ray.put(replace(job, source=self.model.carried(self.described())))
        actors = RayWorkers(
            Replica, kept, num_cpus=placement.cpus, num_gpus=placement.gpus, at_once=placement.at_once
        )  # fmt: skip
        with closing(actors) as workers, redirect_stdout(RaysWords()):
            yield workers


def place_of(
    model: Model, stack: ExitStack, replicas: int | None, gpus_per_replica: float | None, address: str | None
) -> Here | OnRay:
    """This process where nothing is said of replicas or a cluster, else Ray."""
    if replicas is None and gpus_per_replica is None and address is None:
        return Here(model)
    return OnRay(model, stack, replicas, gpus_per_replica, address)
