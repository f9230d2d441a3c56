"""Replicas as Ray actors: the dispatcher's ``Workers`` interface on a real cluster.

Knows Ray; knows nothing about scans or stores. One actor is one life of one process: ``max_restarts`` and
``max_task_retries`` stay 0 and the dispatcher replaces what dies. Ray's own endless retries would hide a shard that
kills every process it meets, and would keep the shards of a lost node waiting for a machine that may never come.
"""

import re
import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from mathinterp.cluster import dispatch
from mathinterp.cluster.events import CardLost, Event, Failed, Finished, Lost, Pulse, Ready
from mathinterp.experiments.base import Shard

PULSE_SECONDS = 5.0  # at most, between a replica's answer and the next question whether it is there
PULSES = 4  # so many are to come before silence is taken for a hang

_DEATHS = ("The actor is dead because", "The actor died because")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class RayWorkers:
    """Runs ``actor_class(*arguments)`` in each slot; the class has ``load() -> dict`` and ``run(shard) -> Receipt``.

    If it has ``pulse()`` too, the part of the running shard that is done and for how long it has stood still, it is
    asked for that all the time.

    Args:
        actor_class: a plain class.
        arguments: its constructor's arguments; pass large ones as object references.
        num_cpus: CPUs an actor reserves.
        num_gpus: GPUs an actor reserves; a fraction shares a GPU.
        at_once: shards that an actor works on side by side, each in a thread of its own.
    """

    def __init__(self, actor_class: type, *arguments: Any, num_cpus: float, num_gpus: float, at_once: int = 1):
        self._pulses = hasattr(actor_class, "pulse")
        aside: dict[str, Any] = {"concurrency_groups": {"pulse": 1}} if self._pulses else {}  # it never computes
        remote: Any = ray.remote
        self._actor_class: Any = remote(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=at_once,
            scheduling_strategy="SPREAD",
            # Threads that spin while they wait take the core from whoever they wait for, when cores are shared. Their
            # number decides the last bits of sums, and is never to depend on how busy the machine is.
            runtime_env={"env_vars": {"OMP_WAIT_POLICY": "PASSIVE", "OMP_DYNAMIC": "FALSE"}},
            **aside,
        )(actor_class)
        self._arguments = arguments
        self._actors: dict[int, Any] = {}
        self._waiting: dict[Any, tuple[int, Shard | None]] = {}  # reference -> slot and shard; None: it is loading
        self._asked: dict[Any, int] = {}  # reference of a pulse -> slot
        self._due: dict[int, float] = {}  # slot -> when to ask for the next one

    def start(self, slot: int) -> None:
        """Ask for a fresh actor in ``slot``; Ray starts it as soon as, and wherever, there is room."""
        self._actors[slot] = self._actor_class.remote(*self._arguments)
        self._waiting[self._actors[slot].load.remote()] = (slot, None)
        if self._pulses:
            self._due[slot] = 0.0

    def submit(self, slot: int, shard: Shard) -> None:
        """Queue ``shard`` on the slot's actor."""
        self._waiting[self._actors[slot].run.remote(shard)] = (slot, shard)

    def wait(self, timeout: float) -> list[Event]:
        """Events of all calls that have ended; blocks for the first, at most ``timeout`` seconds."""
        self._ask_for_pulses()
        references = [*self._waiting, *self._asked]
        ended, _ = ray.wait(references, num_returns=1, timeout=timeout)
        if ended:
            ended, _ = ray.wait(references, num_returns=len(references), timeout=0)
        events: list[Event] = []
        for reference in ended:
            if reference in self._waiting:  # not if its actor was found dead earlier in this batch
                events.append(self._event(reference))
            elif reference in self._asked:
                events += self._pulse(reference)
        return events

    def _ask_for_pulses(self) -> None:
        for slot in [slot for slot, due in self._due.items() if due <= time.monotonic()]:
            del self._due[slot]
            self._asked[self._actors[slot].pulse.options(concurrency_group="pulse").remote()] = slot

    def _pulse(self, reference: Any) -> list[Event]:
        """That of a living actor; the death of another is told by the call that waits for it."""
        slot = self._asked.pop(reference)
        try:
            done, still = ray.get(reference)
        except RayError:
            return []
        self._due[slot] = time.monotonic() + min(PULSE_SECONDS, dispatch.SILENCE / PULSES)
        return [Pulse(slot, done, still)]

    def _event(self, reference: Any) -> Event:
        slot, shard = self._waiting[reference]
        try:
            value = ray.get(reference)
        except RayTaskError as error:
            cause, told = _cause(error), _COLOUR.sub("", str(error))
            if shard is None or isinstance(cause, CardLost):
                self.abandon(slot)  # it holds its card, and gives pulses
            else:
                del self._waiting[reference]
            if isinstance(cause, CardLost):
                return Lost(slot, str(cause), told)
            return Failed(slot, shard, cause, told)
        except (RayActorError, OutOfMemoryError) as error:
            self.abandon(slot)
            return Lost(slot, _death(error))
        except RayError as error:
            if shard is None:
                self.abandon(slot)
                return Failed(slot, None, error, str(error))
            del self._waiting[reference]
            return Failed(slot, shard, error, str(error))
        del self._waiting[reference]
        return Ready(slot, value) if shard is None else Finished(slot, shard, value)

    def abandon(self, slot: int) -> None:
        """Drop the slot's actor, killed in case it is stopped or out of reach, and everything it was asked."""
        ray.kill(self._actors.pop(slot))
        self._due.pop(slot, None)
        self._asked = {ref: asked for ref, asked in self._asked.items() if asked != slot}
        self._waiting = {ref: asked for ref, asked in self._waiting.items() if asked[0] != slot}

    def close(self) -> None:
        """Kill every actor; what they have written stays."""
        for slot in list(self._actors):
            self.abandon(slot)


def _cause(error: RayTaskError) -> BaseException:
    return error.cause if isinstance(error.cause, BaseException) else error


def _death(error: RayError) -> str:
    """The informative line of what Ray tells about a dead actor, cut to a readable length."""
    if isinstance(error, ActorUnavailableError):  # Ray knows no more yet, and says so in terms of its protocol
        return "its process, or its node, no longer answers"
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    in_constructor = [line for line in lines if "creation task" in line]
    told = lines[-1:] if in_constructor else [line for line in lines if line.startswith(_DEATHS)]
    line = (told or lines or [type(error).__name__])[0].split(" Some common causes")[0]
    return line if len(line) <= 240 else line[:239] + "…"
