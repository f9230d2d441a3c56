"""The dispatch loop: windows, order, retries, poison, losses, late joiners, and how busy it keeps its replicas."""

import io

import pytest
from ray.exceptions import ActorUnavailableError
from rich.console import Console

from benchmarks.dispatch import actors_busy, many, receipt_for, simulated_busy
from mathinterp.cluster.dispatch import Dispatcher
from mathinterp.cluster.events import Finished, NoReplicaLeft, Observer, Ready, first_line
from mathinterp.cluster.progress import ScanProgress, duration
from mathinterp.cluster.ray_cluster import connection
from mathinterp.cluster.ray_workers import _death
from mathinterp.errors import UserError
from mathinterp.experiments.base import Shard
from tests.scripted_workers import ScriptedWorkers, all_keys, keys, shards


def test_every_shard_once_dearest_first_within_the_window():
    workers = ScriptedWorkers()
    outcome = Dispatcher(workers, shards(20), replicas=3).run()
    assert keys(outcome) == all_keys(20)
    assert [key for _, key in workers.submitted] == list(reversed(all_keys(20)))
    assert workers.deepest == 2
    assert outcome.failures == []
    assert outcome.tries == {}
    assert outcome.notes == {"engine": "scripted"}


def test_the_last_shards_are_left_to_whoever_is_free_first():
    workers = ScriptedWorkers()
    Dispatcher(workers, shards(4), replicas=4).run()
    assert sorted(slot for slot, _ in workers.submitted) == [0, 1, 2, 3]
    assert workers.deepest == 1


def test_a_failed_shard_is_retried_on_another_replica():
    def fails_once(slot, shard, nth):
        return RuntimeError("hiccup") if shard.index == 3 and nth == 1 else None

    workers = ScriptedWorkers(fails_once)
    outcome = Dispatcher(workers, shards(8), replicas=2).run()
    assert keys(outcome) == all_keys(8)
    assert outcome.tries == {"toy/00003": 2}
    first, second = [slot for slot, key in workers.submitted if key == "toy/00003"]
    assert first != second


def test_a_lone_replica_retries_by_itself():
    workers = ScriptedWorkers(lambda slot, shard, nth: RuntimeError("hiccup") if nth == 1 else None)
    assert keys(Dispatcher(workers, shards(5), replicas=1).run()) == all_keys(5)


def test_a_poison_shard_is_reported_and_the_rest_finished():
    def poison(slot, shard, nth):
        return ValueError("bad layer\nand more") if shard.index == 7 else None

    workers = ScriptedWorkers(poison)
    outcome = Dispatcher(workers, shards(10), replicas=2, max_attempts=3).run()
    assert keys(outcome) == all_keys(10, without=(7,))
    (failure,) = outcome.failures
    assert (failure.key, failure.attempts, failure.losses) == ("toy/00007", 3, 0)
    assert failure.error == "ValueError: bad layer"
    assert failure.traceback == "the traceback"
    assert outcome.tries == {"toy/00007": 3}
    assert len([key for _, key in workers.submitted if key == "toy/00007"]) == 3


def test_a_death_is_no_attempt_and_only_the_running_shard_is_blamed():
    def dies_once(slot, shard, nth):
        return "killed" if shard.index == 9 and nth == 1 else None

    workers = ScriptedWorkers(dies_once)
    outcome = Dispatcher(workers, shards(10), replicas=2, max_attempts=1).run()
    assert keys(outcome) == all_keys(10)
    assert outcome.replicas_lost == 1
    assert outcome.tries == {"toy/00009": 2}  # its neighbour in the window ran for the first time later


@pytest.mark.parametrize(("deaths", "soon"), [(1, True), (2, False)])
def test_a_shard_whose_replica_died_is_the_next_that_is_given_out(deaths, soon):
    """Not after the hours that the others take; if it kills again, it waits for the end."""

    def dies(slot, shard, nth):
        return "killed" if shard.index == 39 and nth <= deaths else None

    workers = ScriptedWorkers(dies)
    outcome = Dispatcher(workers, shards(40), replicas=3).run()
    assert keys(outcome) == all_keys(40)
    runs = [place for place, (_, key) in enumerate(workers.submitted) if key == "toy/00039"]
    assert runs[1] <= 12
    assert (runs[-1] <= 12) == soon


def test_a_replica_out_of_reach_is_told_in_plain_words():
    told = _death(ActorUnavailableError("RpcError: RPC error: Socket closed rpc_code: 14", b"\1" * 16))
    assert told == "its process, or its node, no longer answers"


def test_a_shard_that_kills_every_replica_is_given_up():
    workers = ScriptedWorkers(lambda slot, shard, nth: "out of memory" if shard.index == 2 else None)
    outcome = Dispatcher(workers, shards(6), replicas=1, max_losses=4).run()
    assert keys(outcome) == all_keys(6, without=(2,))
    (failure,) = outcome.failures
    assert (failure.attempts, failure.losses) == (0, 4)
    assert failure.error == "its replica died 4 times: out of memory"


def test_a_late_joiner_gets_work():
    workers = ScriptedWorkers(starts=lambda slot, nth: None if slot == 0 else "never")
    finished = []

    class JoinLater(Observer):
        def finished(self, event):
            finished.append(event)
            if len(finished) == 3:
                workers._pending.append(Ready(1))

    outcome = Dispatcher(workers, shards(20), replicas=2, observer=JoinLater()).run()
    assert keys(outcome) == all_keys(20)
    assert len([slot for slot, _ in workers.submitted if slot == 1]) >= 5


def test_a_replica_that_never_comes_blocks_nothing():
    workers = ScriptedWorkers(starts=lambda slot, nth: None if slot == 2 else "never")
    outcome = Dispatcher(workers, shards(12), replicas=4).run()
    assert keys(outcome) == all_keys(12)
    assert {slot for slot, _ in workers.submitted} == {2}


def test_a_replica_that_cannot_load_is_given_up_and_others_go_on():
    workers = ScriptedWorkers(starts=lambda slot, nth: OSError("disk") if slot == 0 else None)
    assert keys(Dispatcher(workers, shards(6), replicas=2, max_starts=2).run()) == all_keys(6)
    assert workers._counts[0] == 2


def test_no_replica_left_is_a_clear_error():
    workers = ScriptedWorkers(starts=lambda slot, nth: OSError("no space on device"))
    with pytest.raises(NoReplicaLeft, match=r"run 6 shards: a replica could not load: OSError: no space on device"):
        Dispatcher(workers, shards(6), replicas=2).run()


def test_replicas_that_die_while_loading_end_the_run():
    workers = ScriptedWorkers(starts=lambda slot, nth: "worker killed")
    with pytest.raises(NoReplicaLeft, match="died while it loaded: worker killed"):
        Dispatcher(workers, shards(6), replicas=2).run()


def test_patience_ends_when_no_replica_ever_comes():
    workers = ScriptedWorkers(starts=lambda slot, nth: "never")
    with pytest.raises(NoReplicaLeft, match="no replica was ready for 0 s"):
        Dispatcher(workers, shards(2), replicas=2, patience=0.01).run()


@pytest.mark.parametrize("where", ["shard", "start"])
def test_a_user_error_ends_the_run_without_retries(where):
    error = UserError("model has NaN weights")
    behaviour = (lambda slot, shard, nth: error) if where == "shard" else None
    workers = ScriptedWorkers(behaviour, starts=lambda slot, nth: error if where == "start" else None)
    with pytest.raises(UserError, match="model has NaN weights"):
        Dispatcher(workers, shards(6), replicas=1).run()
    assert len(workers.submitted) <= 2


def test_an_interrupt_keeps_the_receipts():
    def interrupt(slot, shard, nth):
        if shard.index == 2:
            raise KeyboardInterrupt
        return None

    dispatcher = Dispatcher(ScriptedWorkers(interrupt), shards(6), replicas=1)
    with pytest.raises(KeyboardInterrupt):
        dispatcher.run()
    assert keys(dispatcher.outcome) == ["toy/00003", "toy/00004", "toy/00005"]
    assert dispatcher.outcome.ready_seconds > 0


def test_progress_in_lines_where_there_is_no_terminal(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("mathinterp.cluster.progress.time.monotonic", lambda: now[0])
    output = io.StringIO()
    pieces = [Shard("toy", index, cost=float(4 - index)) for index in range(4)]  # cost 4, 3, 2, 1
    evaluations = {shard.key: 50 for shard in pieces}
    with ScanProgress(pieces, evaluations, replicas=2, console=Console(file=output, width=200)) as progress:
        now[0] += 11
        progress.tick(0, 2)
        progress.ready(Ready(0))
        now[0] += 8
        progress.finished(Finished(0, pieces[0], receipt_for(pieces[0], 8.0)))
        progress.tick(1, 1)  # too soon after the last line
        now[0] += 2
        progress.tick(1, 1)
        progress.trouble("toy/00001 failed, attempt 1 of 3: ValueError: [bold] x")
    assert output.getvalue().splitlines() == [
        "shards 0/4, waiting for replicas to load, 11 s so far, 0 of 2 replicas ready",
        "shards 1/4, 50% done, 5 evaluations/s, 21 s so far, about 10 s to go, 1 of 2 replicas",
        "toy/00001 failed, attempt 1 of 3: ValueError: [bold] x",
    ]


def test_progress_as_one_bar_on_a_terminal():
    output = io.StringIO()
    pieces = shards(2)
    console = Console(file=output, force_terminal=True, width=100)
    with ScanProgress(pieces, dict.fromkeys([shard.key for shard in pieces], 1), 1, console) as progress:
        progress.ready(Ready(0))
        progress.finished(Finished(0, pieces[1], receipt_for(pieces[1], 1.0)))
        progress.tick(1, 0)
    assert "1/2" in output.getvalue()
    assert "evaluations/s" in output.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(41.6, "42 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_errors_in_one_line():
    assert first_line(ValueError("a\nb")) == "ValueError: a"
    assert first_line(KeyError()) == "KeyError"


@pytest.mark.alone
def test_the_loop_alone_keeps_64_replicas_busy():
    assert simulated_busy(replicas=64, seconds=0.010, shards_each=100) > 0.9


@pytest.mark.alone
def test_a_thousand_replicas_are_kept_busy_by_a_driver_that_does_not_grow():
    busy, grown = many()  # 100,000 shards
    assert busy > 0.95
    assert grown < 20, "MiB; 86 with each receipt's own versions"


@pytest.mark.alone
def test_real_actors_are_kept_busy():
    with connection(None):
        busy = sorted(actors_busy(replicas=4, seconds=0.2, shards_each=10) for _ in range(3))
    assert busy[1] > 0.9, busy
