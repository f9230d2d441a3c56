"""Whose turn it is, and what becomes of calls when a process dies or hangs; processes here only say what they got."""

import pickle
import threading
import time
from typing import Any

import pytest

from mathinterp.cluster.events import CardLost
from mathinterp.errors import Unfinished, UserError
from mathinterp.experiments.base import Shard
from mathinterp.service.host import Answer, There, UnknownSession
from mathinterp.service.router import ReplicaLost, Router
from mathinterp.service.turns import Call
from tests.service_case import ThreadWorkers, routed


class Scripted:
    """A process that answers when its gate is open; ``work`` may name an error."""

    def __init__(self, gate: threading.Event):
        self.gate = gate

    def load(self) -> dict[str, Any]:
        return {"node": "here", "pid": 1, "device": "none"}

    def run(self, call: Shard) -> Answer:
        assert self.gate.wait(20)
        if error := call.work.get("error"):
            raise error
        held = [{"fingerprint": "m", "label": "m", "dtype": "float32", "level": "card", "bytes": 8, "in_memory": 0}]
        return Answer({"name": call.work["name"]}, (), There(held))


def call(user: str, name: str, kind: str = "rows", **more: Any) -> Call:
    return Call(user, kind, "m", {"name": name, **more}, session=more.get("session", user))


def served_order(workers: ThreadWorkers) -> list[str]:
    return [shard.work["name"] for _, shard in workers.given]


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def test_users_take_turns_whoever_came_first(gate):
    with routed(lambda: Scripted(gate)) as (router, workers):
        router.until_ready()
        calls = [call("ada", f"a{n}") for n in range(50)]
        for each in calls:
            router.submit(each, 0)
        late = [call("bob", f"b{n}") for n in range(3)] + [call("eve", "e0")]
        for each in late:
            router.submit(each, 0)
        users = {row["user"]: (row["running"], row["waiting"]) for row in router.status()["users"]}
        gate.set()
        for each in [*calls, *late]:
            each.future.result(20)
        assert users["bob"] == (0, 3)
        assert sum(users["ada"]) == 50
        order = served_order(workers)
        places = [order.index(name) for name in ("b0", "e0", "b1", "b2")]
        assert places == sorted(places)
        assert places[-1] <= 8  # behind 50 calls of another user
        assert [name for name in order if name[0] == "a"] == [f"a{n}" for n in range(50)]


def test_what_waits_is_cancelled_and_what_runs_is_forgotten(gate):
    with routed(lambda: Scripted(gate)) as (router, workers):
        router.until_ready()
        running, waiting, other = call("ada", "a0"), call("ada", "a1"), call("bob", "b0")
        for each in (running, waiting, other):
            router.submit(each, 0)
        while not workers.given:
            time.sleep(0.01)
        router.cancel_session("ada")
        assert (router.status()["queue"], router._slots[0].turns.calls()) == (1, [other])
        gate.set()
        assert other.future.result(20).facts == {"name": "b0"}
        assert running.future.cancelled()
        assert waiting.future.cancelled()
        assert served_order(workers) == ["a0", "b0"]


def test_a_dead_process_is_replaced_and_its_calls_are_lost_or_asked_again(gate):
    with routed(lambda: Scripted(gate)) as (router, workers):
        router.until_ready()
        first, waits, lasting = call("ada", "a0"), call("ada", "a1"), call("bob", "b0", "ablate")
        for each in (first, waits, lasting):
            router.submit(each, 0)
        while not workers.given:
            time.sleep(0.01)
        workers.die(0, "killed by a test")
        for each in (first, waits):
            with pytest.raises(ReplicaLost, match="killed by a test"):
                each.future.result(20)
        gate.set()
        assert lasting.future.result(20).facts == {"name": "b0"}
        assert workers.lives[0] == 3  # started, died, started
        assert router.status()["replaced"] == 1


def test_a_call_that_kills_every_process_is_given_up(gate):
    with routed(lambda: Scripted(gate)) as (router, workers):
        router.until_ready()
        killer = call("ada", "a0", "ablate")
        router.submit(killer)
        for times in range(3):
            while len(workers.given) <= times:
                time.sleep(0.01)
            workers.die(0)
        with pytest.raises(ReplicaLost):
            killer.future.result(20)


def test_a_process_that_hangs_is_ended_and_replaced(gate):
    with routed(lambda: Scripted(gate), silence=0.5) as (router, workers):
        router.until_ready()
        stuck = call("ada", "a0")
        router.submit(stuck, 0)
        while not workers.given:
            time.sleep(0.01)
        workers.quiet.add(0)
        with pytest.raises(ReplicaLost, match="it hangs"):
            stuck.future.result(20)
        assert workers.abandoned == [0]
        workers.quiet.clear()
        gate.set()
        after = call("ada", "a1")
        router.submit(after, 0)
        assert after.future.result(20).facts == {"name": "a1"}


def test_a_process_that_never_starts_is_given_up(gate):
    class Broken(Scripted):
        def load(self) -> dict[str, Any]:
            raise RuntimeError("no card")

    with routed(lambda: Broken(gate)) as (router, _):
        waits = call("ada", "a0", "ablate")
        router.submit(waits)
        with pytest.raises(ReplicaLost, match="no card"):
            waits.future.result(20)
        after = call("ada", "a1", "ablate")
        router.submit(after)
        with pytest.raises(ReplicaLost, match="no card"):
            after.future.result(20)
        assert router.best("m") is None
        with pytest.raises(UserError, match="a replica could not start: RuntimeError: no card"):
            router.until_ready()


@pytest.mark.slow
def test_a_process_that_waits_for_a_machine_after_a_failed_start_does_not_hang(gate):
    starts: list[int] = []

    class SecondIsLate(Scripted):
        def load(self) -> dict[str, Any]:
            starts.append(len(starts))
            if len(starts) == 1:
                time.sleep(0.1)  # it says that it is there
                workers.quiet.add(0)
                raise RuntimeError("no card")
            assert self.gate.wait(20)
            return super().load()

    with routed(lambda: SecondIsLate(gate), silence=0.3) as (router, workers):
        waits = call("ada", "a0", "ablate")
        router.submit(waits)
        while len(starts) < 2:
            time.sleep(0.01)
        time.sleep(1.0)
        gate.set()
        assert waits.future.result(20).facts == {"name": "a0"}
        assert (workers.abandoned, len(starts)) == ([], 2)


def test_a_call_that_cannot_be_handed_over_is_refused_and_the_next_one_is_answered(gate, monkeypatch):
    """Ray packs what it sends, and cannot pack what is nested too deep."""
    submit = ThreadWorkers.submit

    def packed(workers: ThreadWorkers, slot: int, shard: Shard) -> None:
        pickle.dumps(shard.work)
        submit(workers, slot, shard)

    monkeypatch.setattr(ThreadWorkers, "submit", packed)
    gate.set()
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    with routed(lambda: Scripted(gate)) as (router, _):
        router.until_ready()
        wrong, after = call("ada", "a0", deep=deep), call("bob", "b0")
        for each in (wrong, after):
            router.submit(each, 0)
        with pytest.raises(RecursionError):
            wrong.future.result(5)
        assert after.future.result(20).facts == {"name": "b0"}


def test_a_process_whose_card_is_lost_is_replaced(gate):
    """It would answer every question with an error for ever."""
    gate.set()
    errors: list[Exception] = [CardLost("its GPU gives nothing but errors")]

    class LosesItsCard(Scripted):
        def run(self, call: Shard) -> Answer:
            if errors:
                raise errors.pop()
            return super().run(call)

    with routed(lambda: LosesItsCard(gate)) as (router, workers):
        router.until_ready()
        lasting = call("ada", "a0", "ablate")
        router.submit(lasting, 0)
        assert lasting.future.result(20).facts == {"name": "a0"}
        assert (workers.lives[0], router.status()["replaced"]) == (2, 1)
        errors.append(CardLost("its GPU gives nothing but errors"))
        rows = call("ada", "a1")
        router.submit(rows, 0)
        with pytest.raises(ReplicaLost, match="nothing but errors") as lost:
            rows.future.result(20)
        assert "errors.pop()" in lost.value.told


class StartsOnce(Scripted):
    """The first process starts, no later one does."""

    made = 0

    def load(self) -> dict[str, Any]:
        type(self).made += 1
        if type(self).made > 1:
            raise RuntimeError("no card")
        return super().load()


def test_what_is_asked_of_a_process_given_up_is_refused_and_leaves_nothing_behind(gate, monkeypatch):
    monkeypatch.setattr(StartsOnce, "made", 0)
    with routed(lambda: StartsOnce(gate), slots=2) as (router, _):
        given_up: list[int] = []
        while not given_up:
            rows = router.status()["replicas"]
            given_up = [row["replica"] for row in rows if row["state"] == "given up"]
            time.sleep(0.01)
        after = call("ada", "a0")
        router.submit(after, given_up[0])
        with pytest.raises(ReplicaLost, match="no card"):
            after.future.result(20)
        status = router.status()
        assert (status["queue"], status["users"]) == (0, [])
        assert not router.ended.is_set()
        assert sum(len(slot.turns) for slot in router._slots) == 0  # else its thread never rests


@pytest.mark.slow
def test_a_service_ends_when_its_last_process_is_given_up(gate, monkeypatch):
    monkeypatch.setattr(StartsOnce, "made", 0)
    with routed(lambda: StartsOnce(gate)) as (router, workers):
        router.until_ready()
        workers.die(0)
        assert router.ended.wait(20)
        with pytest.raises(Unfinished, match="no replica left: a replica could not start: RuntimeError: no card"):
            router.until_ended()


@pytest.mark.slow
def test_a_fault_before_the_first_process_is_ready_is_raised_there(gate, monkeypatch):
    monkeypatch.setattr(ThreadWorkers, "wait", lambda self, timeout: 1 / 0)
    router = Router(ThreadWorkers(lambda: Scripted(gate)), 1)
    router.start()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            router.until_ready()
        except BaseException as error:
            raised.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(10)
    assert [type(error) for error in raised] == [ZeroDivisionError]


def test_errors_reach_whoever_asked_and_a_forgotten_question_counts_as_lost(gate):
    gate.set()
    with routed(lambda: Scripted(gate)) as (router, _):
        wrong, unknown = (
            call("ada", "a0", error=ArithmeticError("NaN")),
            call("ada", "a1", error=UnknownSession("gone")),
        )
        for each in (wrong, unknown):
            router.submit(each, 0)
        with pytest.raises(ArithmeticError, match="NaN"):
            wrong.future.result(20)
        with pytest.raises(ReplicaLost, match="gone"):
            unknown.future.result(20)


def test_a_question_goes_where_its_model_is(gate):
    gate.set()
    with routed(lambda: Scripted(gate), slots=2) as (router, _):
        while sum(row["state"] == "ready" for row in router.status()["replicas"]) < 2:
            time.sleep(0.01)
        loads = call("ada", "a0", "ablate")
        router.submit(loads, 1)
        loads.future.result(20)
        assert router.best("m") == 1
        assert router.best("m", taken={1}) == 0
        assert router.best("another") in (0, 1)
        assert router.best("m", taken={0, 1}) is None


def test_calls_that_wait_are_refused_when_the_service_stops(gate):
    with routed(lambda: Scripted(gate)) as (router, _):
        waits = call("ada", "a0")
        router.submit(waits, 0)
    with pytest.raises(ReplicaLost, match="stopping"):
        waits.future.result(20)
    gate.set()
