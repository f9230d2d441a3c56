"""A service in this process, without Ray: hosts in threads, and the router and front of a real one."""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from mathinterp.cluster.events import CardLost, Event, Failed, Finished, Lost, Pulse, Ready
from mathinterp.experiments.base import Shard
from mathinterp.models.catalog import LoadedModel, ResolvedModel
from mathinterp.service.front import Front
from mathinterp.service.host import Answer, Host, HostSettings
from mathinterp.service.listening import bound_socket, listening
from mathinterp.service.router import Router
from mathinterp.service.shelf import Limits, Shelf

ROOM = Limits(card=0, memory=10**10)


class OneAtATime(Shelf):
    """Random weights are drawn from a generator of the whole process, which real hosts do not share."""

    lock = threading.Lock()

    def take(self, resolved: ResolvedModel) -> LoadedModel:
        with self.lock:
            return super().take(resolved)


class ThreadWorkers:
    """The dispatcher's ``Workers``: what ``make`` makes, in a thread each; a test may say that one died."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self.hosts: dict[int, Any] = {}
        self.threads: dict[int, ThreadPoolExecutor] = {}
        self.lives: dict[int, int] = {}
        self.given: list[tuple[int, Shard]] = []
        self.abandoned: list[int] = []
        self.events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        self.quiet: set[int] = set()  # slots that give no pulses

    def start(self, slot: int) -> None:
        self.lives[slot] = self.lives.get(slot, 0) + 1
        self.hosts[slot] = self._make()
        self.threads[slot] = ThreadPoolExecutor(1)
        self._work(slot, None, lambda: Ready(slot, self.hosts[slot].load()))

    def submit(self, slot: int, shard: Shard) -> None:
        self.given.append((slot, shard))
        self._work(slot, shard, lambda: Finished(slot, shard, self.hosts[slot].run(shard)))

    def _work(self, slot: int, shard: Shard | None, work: Callable[[], Event]) -> None:
        life = self.lives[slot]

        def run() -> None:
            try:
                event = work()
            except CardLost as error:  # as RayWorkers tell it
                event = Lost(slot, str(error), traceback.format_exc())
            except Exception as error:
                event = Failed(slot, shard, error, traceback.format_exc())
            self.events.put((life, event))

        self.threads[slot].submit(run)

    def die(self, slot: int, reason: str = "killed") -> None:
        self.lives[slot] += 1
        self.events.put((self.lives[slot], Lost(slot, reason)))

    def abandon(self, slot: int) -> None:
        self.abandoned.append(slot)
        self.lives[slot] += 1

    def wait(self, timeout: float) -> list[Event]:
        found: list[Event] = [Pulse(slot) for slot in self.hosts if slot not in self.quiet]
        until = time.monotonic() + timeout
        while True:
            try:
                life, event = self.events.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                return found
            if life == self.lives[event.slot]:
                found.append(event)
                until = 0.0


@contextmanager
def routed(
    make: Callable[[], Any], slots: int = 1, silence: float | None = None
) -> Iterator[tuple[Router, ThreadWorkers]]:
    workers = ThreadWorkers(make)
    router = Router(workers, slots, silence)
    router.start()
    try:
        yield router, workers
    finally:
        router.stop()
        assert router.fault is None
        for threads in workers.threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def served(
    slots: int = 1, token: str | None = None, limits: Limits = ROOM, silence: float | None = None,
    make: Callable[[], Host] | None = None, computed: Callable[[str, Answer], None] = lambda experiment, answer: None,
    **about: Any,
) -> Iterator[tuple[str, Router, ThreadWorkers]]:  # fmt: skip
    """The URL of a service whose hosts are real ones, those that ``make`` makes; it tells these facts about itself."""
    settings = HostSettings("cpu", limits, cores=1)

    def host() -> Host:
        made = Host(settings)
        made._shelf = OneAtATime("cpu", limits, made._model_leaves)
        return made

    about = {"device": "cpu", "node": "here", **about}
    with routed(make or host, slots, silence) as (router, workers):
        bound = bound_socket("127.0.0.1", 0)
        with listening(Front(router, about, token, computed).app(), bound):
            yield f"http://127.0.0.1:{bound.getsockname()[1]}", router, workers
        bound.close()
