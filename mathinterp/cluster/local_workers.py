"""One replica in this process: the dispatcher's ``Workers`` interface without Ray.

Knows threads; knows nothing about experiments or stores. The replica lives as long as these workers, and torch has as
many threads afterwards as before.
"""

import logging
import traceback
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from mathinterp.cluster import dispatch
from mathinterp.cluster.events import CardLost, Event, Failed, Finished, Ready
from mathinterp.cluster.job import ReplicaJob
from mathinterp.cluster.replica import Replica
from mathinterp.cluster.vital import watch
from mathinterp.errors import Unfinished
from mathinterp.experiments.base import Shard

logger = logging.getLogger(__name__)

LOADING = None  # in place of a shard


class LocalWorkers:
    """Runs one ``Replica`` here, in slot 0.

    Args:
        job: of the replica.
        at_once: shards that it works on side by side; one alone is computed in the thread that waits for it, so that
            a key press ends it.
    """

    def __init__(self, job: ReplicaJob, at_once: int = 1):
        self._job, self._replica = job, Replica(job)
        self._threads = torch.get_num_threads()
        self._asked: deque[Shard | None] = deque()
        self._pool = ThreadPoolExecutor(at_once, "shard") if at_once > 1 else None
        self._running: dict[Future[Event], Shard | None] = {}
        self._unwatch = watch(lambda: self._replica.pulse()[1], dispatch.SILENCE, logger.warning)

    def start(self, slot: int) -> None:
        """Load the model as soon as somebody waits."""
        self._replica.close()
        self._replica = Replica(self._job)
        self._ask(LOADING)

    def submit(self, slot: int, shard: Shard) -> None:
        """Queue ``shard``."""
        self._ask(shard)

    def abandon(self, slot: int) -> None:
        """Never asked for: what hangs in this process cannot be ended, and is told by a warning."""
        raise AssertionError(slot)

    def pulse(self) -> float:
        """The part of the running shard that is done, if known."""
        return self._replica.pulse()[0]

    def _ask(self, shard: Shard | None) -> None:
        if self._pool is None:
            self._asked.append(shard)
        else:
            self._running[self._pool.submit(self._event, shard)] = shard

    def wait(self, timeout: float) -> list[Event]:
        """The next event; computes it now where there is no pool."""
        if self._pool is None:
            return [self._event(self._asked.popleft())] if self._asked else []
        ended, _ = wait(self._running, timeout, FIRST_COMPLETED)
        for future in ended:
            del self._running[future]
        return [future.result() for future in ended]

    def _event(self, shard: Shard | None) -> Event:
        try:
            if shard is LOADING:
                return Ready(0, self._replica.load())
            return Finished(0, shard, self._replica.run(shard))
        except CardLost as error:  # this process cannot be replaced
            lost = Unfinished(f"{error}; the same call in a new process goes on")
            lost.__cause__ = error
            return Failed(0, shard, lost, traceback.format_exc())
        except Exception as error:
            return Failed(0, shard, error, traceback.format_exc())

    def close(self) -> None:
        """Let go of the replica; what it has written stays."""
        self._unwatch()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._replica.close()
        torch.set_num_threads(self._threads)
