"""A service in this process: its Ray, the processes that compute, the router and the HTTP front, for a while.

Knows how the parts are put together. Processes are actors of this one, not detached ones: however it ends, kill -9
included, they end with it. docs/service.md says why.
"""

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import psutil

from mathinterp.cluster.events import Event, Lost
from mathinterp.cluster.places import Placement, RaysWords
from mathinterp.cluster.ray_private import local_gpus, machine_cores
from mathinterp.cluster.ray_workers import RayWorkers
from mathinterp.errors import UserError
from mathinterp.service.front import Front
from mathinterp.service.host import Host, HostSettings
from mathinterp.service.listening import bound_socket, listening
from mathinterp.service.metrics import ServiceMetrics
from mathinterp.service.router import Router
from mathinterp.service.settings import Settings
from mathinterp.service.shelf import Limits

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.5  # of the free host memory that weights of all processes may take by default
GB = 10**9
PROCESS_BYTES = GB  # of a process before it holds a model, about


@dataclass(frozen=True)
class Serving:
    """A service that runs: where, and the end of it."""

    host: str
    port: int
    router: Router


class HostWorkers(RayWorkers):
    """Processes of the service; the death of one that has nothing to do is told as well."""

    def _pulse(self, reference: Any) -> list[Event]:
        slot = self._asked[reference]
        events = super()._pulse(reference)
        if events or any(asked[0] == slot for asked in self._waiting.values()):
            return events
        self.abandon(slot)
        return [Lost(slot, "it ended while it had nothing to do")]


@contextmanager
def serving(settings: Settings) -> Iterator[Serving]:
    """Serve inside the block.

    Raises:
        UserError: the port is taken, no token where one is needed, or no Ray to run on.
    """
    settings.check()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(RaysWords()))
        bound = stack.enter_context(closing(bound_socket(settings.host, settings.port)))
        workers, placed = _processes(settings, stack)
        router = Router(stack.enter_context(closing(workers)), placed.replicas)
        router.start()
        stack.callback(router.stop)
        about = {"device": placed.device, "gpus_per_replica": placed.gpus, "node": socket.gethostname()}
        port = bound.getsockname()[1]
        metrics = stack.enter_context(ServiceMetrics(router, f"{about['node']}:{port}"))
        front = Front(router, about, settings.token, metrics.computed)
        stack.enter_context(listening(front.app(), bound))
        yield Serving(settings.host, port, router)


def _processes(settings: Settings, stack: ExitStack) -> tuple[RayWorkers, Placement]:
    """The processes, how many, and what each has to compute on."""
    from mathinterp.cluster.ray_cluster import connection, existing_cluster, gpus_each, largest_node, place

    if existing_cluster(settings.address) is None:  # a Ray of this machine: what it cannot do is known before it starts
        _check_room(settings, gpus_each(settings.gpus_per_replica))
    stack.enter_context(connection(settings.address))
    gpus = gpus_each(settings.gpus_per_replica)
    placed = place(settings.replicas, gpus, shards=10**6, model_bytes=0)
    if settings.card_gb is not None and placed.device != "cuda":
        raise UserError("`card_gb` limits what lies on GPUs, and none is used here; limit host memory by `memory_gb`")
    cores = int(largest_node("CPU"))
    share = min(placed.gpus, 1.0) or 1.0
    host = HostSettings(placed.device, _limits(settings, placed), cores, settings.experiments, placed.cards, share)
    return HostWorkers(Host, host, num_cpus=placed.cpus, num_gpus=placed.gpus), placed


def _check_room(settings: Settings, gpus: float) -> None:
    """Raise UserError for more processes, of so many GPUs each, than this machine ever has room for.

    Processes may share CPU cores, as replicas of runs do, while memory lasts.
    """
    if settings.replicas is None:
        return
    if gpus:
        room = int(local_gpus() / gpus) if gpus <= 1 else local_gpus() // int(gpus)
        each = f"{gpus:g} GPU{'' if gpus == 1 else 's'}"
    else:
        room, each = max(machine_cores(), psutil.virtual_memory().available // PROCESS_BYTES), "1 GB of free memory"
    if settings.replicas > room:
        raise UserError(f"`replicas` {settings.replicas}: with {each} for each this machine has room for {room}")


def _limits(settings: Settings, placed: Placement) -> Limits:
    """As asked; how large its cards are a process alone knows."""
    free = psutil.virtual_memory().available
    memory = int(MEMORY_SHARE * free / placed.replicas) if settings.memory_gb is None else settings.memory_gb * GB
    card = 0 if settings.card_gb is None else settings.card_gb * GB
    return Limits(card=int(card), memory=int(memory))
