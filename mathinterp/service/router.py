"""Who computes what next: a queue for each process, in which users take turns, and processes that are replaced.

Knows calls, users and the ``Workers`` interface; knows nothing about models, HTTP or Ray. A call is given to one
process and answered, refused with an error, or lost with its process; whoever asked decides what to do then (for shards
that is the dispatcher of the client's run). Calls without a state there, LASTING, go to the process that follows.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mathinterp.cluster import dispatch
from mathinterp.cluster.dispatch import COUNTED
from mathinterp.cluster.events import Event, Finished, Lost, Pulse, Ready, Workers, first_line
from mathinterp.errors import Unfinished, UserError
from mathinterp.experiments.base import Shard
from mathinterp.service.host import There, UnknownSession
from mathinterp.service.turns import Call, Turns

logger = logging.getLogger(__name__)

POLL = 0.02  # seconds between looks at new calls, while others are computed
IDLE = 1.0  # seconds between looks at processes, while nothing is computed
MOST_STARTS = 3  # failed starts in a row after which a process is given up
MOST_LOSSES = 3  # deaths under a lasting call after which it is given up: it may be the killer
LASTING = ("prepare", "ablate")
SHOWN = ("fingerprint", "dtype", "level", "bytes", "in_memory")  # of a model
DISTANCE = {"card": 0.0, "memory": 0.5, "disk": 2.0}  # of a model, in calls that it is worth waiting for


class ReplicaLost(Unfinished):
    """The process that was to answer died, or hung and was ended; ``told``: what was raised in it, if any."""

    def __init__(self, line: str, told: str = ""):
        super().__init__(line)
        self.told = told


@dataclass
class _Slot:
    turns: Turns = field(default_factory=Turns)  # what waits
    current: Call | None = None
    began: float = 0.0  # when that was asked
    brings: bool = False  # whether something had to be brought for it
    ready: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    there: There = field(default_factory=There)
    silent: float | None = None  # seconds since it was heard of; None: it has given no pulse
    failed_starts: int = 0
    broken: str = ""  # why it is given up

    @property
    def load(self) -> int:
        """Calls that wait or are answered."""
        return len(self.turns) + (self.current is not None)

    def at_hand(self, call: Call) -> bool:
        """Whether the process need neither load nor prepare anything for the call."""
        if call.kind == "rows":
            return call.session in self.there.prepared
        held = self.there.held  # the model used last, which is first, is where models compute
        ready = {row["fingerprint"] for row in held if row["level"] == held[0]["level"]}
        return call.kind == "end" or call.model in ready


class Router:
    """Hands calls to processes, from a thread of its own.

    Args:
        workers: starts and asks the processes.
        slots: how many there are.
        silence: seconds without a pulse after which one hangs; None: as for runs.
    """

    def __init__(self, workers: Workers, slots: int, silence: float | None = None):
        self._workers, self._silence = workers, dispatch.SILENCE if silence is None else silence
        self._slots = [_Slot() for _ in range(slots)]
        self._changed = threading.Condition()
        self._stopping = False
        self._requests: dict[str, int] = {}  # by model
        self._number, self.replaced = 0, 0
        self.ended = threading.Event()  # nothing will be answered any more
        self.fault: BaseException | None = None  # what ended it, where that was not ``stop``
        self._thread = threading.Thread(target=self._work, name="router", daemon=True)

    def start(self) -> None:
        """Start the processes."""
        self._thread.start()

    def stop(self) -> None:
        """Answer nothing more; every call that waits is refused."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        for slot in self._slots:
            for call in self._calls(slot):
                _refuse(call, ReplicaLost("the service is stopping"))

    def until_ready(self, tell: Callable[[int], None] = lambda ready: None) -> None:
        """Wait for the first process, and tell how many are ready; raises UserError, and whatever ended the thread."""
        with self._changed:
            while not self._stopping and not (ready := sum(slot.ready for slot in self._slots)):
                tell(ready)
                if self.fault is not None:
                    raise self.fault
                if all(slot.broken for slot in self._slots):
                    raise UserError(self._slots[0].broken)
                self._changed.wait(IDLE)

    def until_ended(self) -> None:
        """Wait for the end; raises whatever ended the thread, and Unfinished when the last process is given up."""
        self.ended.wait()
        if self.fault is not None:
            raise self.fault
        if all(slot.broken for slot in self._slots):
            raise Unfinished(f"the service has no replica left: {self._slots[0].broken}")

    @property
    def slots(self) -> int:
        """Processes, whether they are ready or not."""
        return len(self._slots)

    def submit(self, call: Call, slot: int | None = None) -> int:
        """Queue a call, on a given process or on the one that suits it best; returns which."""
        with self._changed:
            chosen = self._best(call.model) if slot is None else slot
            if broken := self._slots[chosen].broken:
                _refuse(call, ReplicaLost(broken))
                return chosen
            self._slots[chosen].turns.add(call)
            if call.kind in ("prepare", "ablate"):
                self._requests[call.model] = self._requests.get(call.model, 0) + 1
            self._changed.notify_all()
            return chosen

    def best(self, model: str, taken: Collection[int] = ()) -> int | None:
        """The process for a question about a model, but none of ``taken``; None: there is no other."""
        with self._changed:
            left = [number for number, slot in enumerate(self._slots) if number not in taken and not slot.broken]
            return self._best(model, left) if left else None

    def _best(self, model: str, among: Collection[int] | None = None) -> int:
        def price(number: int) -> tuple[bool, bool, float]:
            slot = self._slots[number]
            level = next((row["level"] for row in slot.there.held if row["fingerprint"] == model), "disk")
            return bool(slot.broken), not slot.ready, slot.load + DISTANCE[level]

        return min(range(len(self._slots)) if among is None else among, key=price)

    def cancel(self, call: Call) -> None:
        """Forget a call that waits; of one that is computed, forget the answer."""
        with self._changed:
            for slot in self._slots:
                slot.turns.remove(call)
            call.future.cancel()

    def cancel_session(self, session: str) -> None:
        """Forget all calls of a question."""
        with self._changed:
            calls = [call for slot in self._slots for call in self._calls(slot) if call.session == session]
        for call in calls:
            self.cancel(call)

    def status(self) -> dict[str, Any]:
        """Models with their levels and requests, processes, users; plain JSON."""
        with self._changed:
            models = [
                {"model": row["label"], **{name: row[name] for name in SHOWN},
                 "requests": self._requests.get(row["fingerprint"], 0), "replica": number}
                for number, slot in enumerate(self._slots) for row in slot.there.held
            ]  # fmt: skip
            replicas = [
                {"replica": number, "state": _state(slot), "queue": _waiting(slot),
                 **{name: slot.facts.get(name) for name in ("node", "pid", "device", "card_bytes")}}
                for number, slot in enumerate(self._slots)
            ]  # fmt: skip
            users: dict[str, dict[str, int]] = {}
            for slot in self._slots:
                for call in filter(_is_asked, self._calls(slot)):
                    row = users.setdefault(call.user, {"running": 0, "waiting": 0})
                    row["running" if call is slot.current else "waiting"] += 1
            queue = sum(map(_waiting, self._slots))
        return {
            "models": models, "replicas": replicas, "queue": queue, "replaced": self.replaced,
            "users": [{"user": user, **row} for user, row in sorted(users.items())],
        }  # fmt: skip

    # ---- the thread ----

    def _work(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self.fault = error
        finally:
            self.ended.set()

    def _loop(self) -> None:
        for number in range(len(self._slots)):
            self._workers.start(number)
        turn = time.monotonic()
        while not self._stopping:
            at_work = any(slot.current or not (slot.ready or slot.broken) for slot in self._slots)
            for event in self._workers.wait(timeout=POLL if at_work else 0.0):
                self._handle(event)
            turn, before = time.monotonic(), turn
            self._listen(min(turn - before, COUNTED))
            with self._changed:
                self._fill()
                if not any(map(_has_work, self._slots)) and not self._stopping:
                    self._changed.wait(IDLE if all(slot.ready or slot.broken for slot in self._slots) else POLL)

    def _fill(self) -> None:
        now = time.monotonic()
        for number, slot in enumerate(self._slots):
            call = slot.turns.next(slot.at_hand, now) if slot.ready and slot.current is None else None
            if call is not None:
                slot.current, slot.began, slot.brings = call, now, not slot.at_hand(call)
                self._number += 1
                try:
                    self._workers.submit(number, Shard("call", self._number, {"kind": call.kind, **call.work}))
                except Exception as error:  # it cannot be packed: what is nested too deep
                    slot.current = None
                    _refuse(call, error)

    def _handle(self, event: Event) -> None:
        slot = self._slots[event.slot]
        if isinstance(event, Pulse):
            slot.silent = event.still
        elif isinstance(event, Ready):
            with self._changed:
                slot.ready, slot.facts, slot.failed_starts = True, event.notes, 0
                self._changed.notify_all()
        elif isinstance(event, Lost):
            self._lost(event.slot, event.reason, event.traceback)
        elif isinstance(event, Finished):
            answer: Any = event.receipt  # what ``Host.run`` returns, which is no receipt of a file
            call = self._ended(slot, answer.there)
            with suppress(InvalidStateError):  # cancelled
                call.future.set_result(answer)
        elif event.shard is None:
            self._start_failed(event.slot, f"a replica could not start: {first_line(event.error)}")
        else:
            error = event.error
            call = self._ended(slot, error.__dict__.pop("there", None))
            if isinstance(error, UnknownSession):
                error = ReplicaLost(str(error))
            error.__dict__.setdefault("told", event.traceback)
            _refuse(call, error)

    def _ended(self, slot: _Slot, there: There | None) -> Call:
        with self._changed:
            call, slot.current = slot.current, None
            if there is not None:
                slot.there = there
            if slot.brings:
                now = time.monotonic()
                slot.turns.brought(now - slot.began, now)
        assert call is not None
        if slot.silent is not None:
            slot.silent = 0.0
        return call

    def _listen(self, seconds: float) -> None:
        """End processes that hang."""
        for number, slot in enumerate(self._slots):
            if slot.silent is None:
                continue
            slot.silent += seconds
            if slot.silent >= self._silence:
                self._workers.abandon(number)
                self._lost(number, f"it hangs: nothing in it has moved for {slot.silent:.0f} s")

    def _lost(self, number: int, reason: str, told: str = "") -> None:
        """Calls that need what it held are lost, others wait for its successor; ``told`` is for whose question ran."""
        slot = self._slots[number]
        logger.warning(f"replica {number} is replaced: {reason}")
        self.replaced += 1
        with self._changed:
            current, was_ready = slot.current, slot.ready
            slot.current, slot.ready, slot.there, slot.silent = None, False, There(), None
            waiting = [call for call in slot.turns.calls() if call.kind not in LASTING]
            for call in waiting:
                slot.turns.remove(call)
        for call in waiting:
            own = current is not None and call.session == current.session
            _refuse(call, ReplicaLost(f"a replica died: {reason}", told if own else ""))
        if current is not None:
            current.losses += 1
            if current.kind in LASTING and current.losses < MOST_LOSSES:
                with self._changed:
                    slot.turns.add(current, first=True)
            else:
                _refuse(current, ReplicaLost(f"a replica died: {reason}", told))
        if was_ready:
            self._workers.start(number)
        else:
            self._start_failed(number, f"a replica died while it started: {reason}")

    def _start_failed(self, number: int, message: str) -> None:
        slot = self._slots[number]
        slot.failed_starts, slot.silent = slot.failed_starts + 1, None
        logger.warning(message)
        if slot.failed_starts < MOST_STARTS:
            self._workers.start(number)
            return
        with self._changed:
            slot.broken = message
            calls = self._calls(slot)
            slot.turns.clear()
            if all(each.broken for each in self._slots):
                self.ended.set()
        for call in calls:
            _refuse(call, ReplicaLost(message))

    def _calls(self, slot: _Slot) -> list[Call]:
        """The one that is answered, and those that wait."""
        waiting = slot.turns.calls()
        return waiting if slot.current is None else [slot.current, *waiting]


def _refuse(call: Call, error: BaseException) -> None:
    with suppress(InvalidStateError):
        call.future.set_exception(error)


def _is_asked(call: Call) -> bool:
    """Whether somebody waits for it."""
    return call.kind != "end"


def _waiting(slot: _Slot) -> int:
    return sum(map(_is_asked, slot.turns.calls()))


def _has_work(slot: _Slot) -> bool:
    return bool(slot.current or len(slot.turns))


def _state(slot: _Slot) -> str:
    if slot.broken:
        return "given up"
    return "starting" if not slot.ready else "busy" if slot.current else "ready"
