"""A replica that needs no model and imports no torch, whose shards do what their table's name asks."""

import os
import signal
import threading

from mathinterp.cluster.events import CardLost
from mathinterp.errors import UserError
from mathinterp.experiments.base import Shard


class Unpicklable(RuntimeError):
    """An exception that cannot travel to the driver as it is."""

    def __init__(self) -> None:
        super().__init__("a lock")
        self.lock = threading.Lock()


class Moody:
    """Finishes a shard, or raises, or dies."""

    def __init__(self, fails: bool):
        if fails:
            raise OSError("cannot begin")

    def load(self) -> dict:
        return {"mood": "good"}

    def run(self, shard: Shard) -> int:
        if shard.table == "user":
            raise UserError("the weights have NaN; use another checkpoint")
        if shard.table == "unpicklable":
            raise Unpicklable
        if shard.table == "card":
            raise CardLost("its GPU gives nothing but errors")
        if shard.table == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return shard.index


class Unloadable(Moody):
    """Begins, says that it is there, and cannot load; its process number is in the error."""

    def load(self) -> dict:
        raise OSError(str(os.getpid()))

    def pulse(self) -> tuple[float, float]:
        return 0.0, 0.0
