"""Whose turn it is where one call pushes out what another one needs."""

import time
from dataclasses import replace
from typing import Any

import pytest

from mathinterp.experiments.base import Shard
from mathinterp.service.host import Answer, There
from mathinterp.service.turns import LONGEST_STAY, Call, Turns
from tests.service_case import routed


def call(user: str, session: str = "") -> Call:
    return Call(user, "rows", "m", {"session": session or user}, session=session or user)


def order(turns: Turns, now: float, *there: str) -> list[str]:
    """Sessions of all that waits, as they are served while these are there."""
    found = []
    while (each := turns.next(lambda call: call.session in there, now)) is not None:
        found.append(each.session)
    return found


def waiting(*sessions: str) -> Turns:
    turns = Turns()
    for session in sessions:
        turns.add(call(session[0], session))
    return turns


def test_users_take_turns() -> None:
    assert order(waiting("a1", "a2", "a3", "b1", "c1", "b2"), 0.0) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_what_was_brought_stays_as_long_as_that_took() -> None:
    turns = waiting("a", "b", "b", "c", "a")
    turns.brought(3.0, now=10.0)
    kept = turns.next(lambda call: call.session == "b", 12.9)
    assert kept is not None
    assert kept.session == "b"
    assert order(turns, 13.0, "b") == ["a", "c", "b", "a"], "a's turn and c's were not lost"
    turns = waiting("a", "b")
    turns.brought(1e6, now=0.0)
    assert order(turns, LONGEST_STAY, "b") == ["a", "b"], "nobody waits for ever"


def test_one_user_s_two_questions_do_not_push_each_other_out() -> None:
    turns = waiting("a1", "a2", "a1", "a2")
    turns.brought(5.0, now=0.0)
    assert order(turns, 1.0, "a2") == ["a2", "a2", "a1", "a1"]
    turns = waiting("a1", "b1")
    turns.brought(5.0, now=0.0)
    assert order(turns, 1.0) == ["a1", "b1"], "nothing of what waits is there: no time is lost"


def test_cancelled_calls_have_no_turn() -> None:
    turns = waiting("a", "b")
    first, second = turns.calls()
    first.future.cancel()
    turns.remove(second)
    turns.remove(second)
    assert (order(turns, 0.0), len(turns)) == ([], 0)


class OneAtATime:
    """A process that is ready for one question, and takes ten times as long for another one."""

    def __init__(self) -> None:
        self.prepared: tuple[str, ...] = ()
        self.brought = 0

    def load(self) -> dict[str, Any]:
        return {}

    def run(self, asked: Shard) -> Answer:
        if (asked.work["session"],) != self.prepared:
            self.brought += 1
            self.prepared = (asked.work["session"],)
            time.sleep(0.2)
        time.sleep(0.02)
        return replace(Answer({}), there=There([], self.prepared))


@pytest.mark.slow
def test_two_questions_that_push_each_other_out_are_brought_a_few_times_alone() -> None:
    """Two users who ask for the next of their forty shards when one is there, as runs do."""
    process = OneAtATime()
    with routed(lambda: process) as (router, _):
        router.until_ready()
        open_calls = {user: [call(user) for _ in range(2)] for user in ("ada", "bob")}
        left = {"ada": 38, "bob": 38}
        for each in zip(*open_calls.values(), strict=True):
            for one in each:
                router.submit(one, 0)
        while any(open_calls.values()):
            for user, calls in open_calls.items():
                for done in [each for each in calls if each.future.done()]:
                    calls.remove(done)
                    if left[user]:
                        left[user] -= 1
                        calls.append(call(user))
                        router.submit(calls[-1], 0)
            time.sleep(0.001)
    assert 2 <= process.brought <= 16, "80 where turns go by shard"
