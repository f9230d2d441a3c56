"""A replica that hangs: it is replaced, what it has written counts, and nothing waits for it longer than is said."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.dispatch import receipt_for
from mathinterp.cli.main import main
from mathinterp.cluster import dispatch, progress, vital
from mathinterp.cluster.dispatch import Dispatcher
from mathinterp.cluster.events import Finished, Pulse, Ready
from mathinterp.cluster.found import found_in
from mathinterp.cluster.ray_cluster import connection
from mathinterp.cluster.run import open_run, prepare_work, run_scan
from mathinterp.engine import batching
from mathinterp.errors import UserError
from mathinterp.experiments.base import Shard
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from tests.scripted_workers import all_keys, keys, shards
from tests.toy_scan import ToyScan

MODEL = ModelSpec("random:llama-tiny")
PROMPTS = [Prompt(f"p{a}", f"{a} plus 5 is", str(a + 5), operation="add") for a in (3, 14, 62)]


class Clock:
    """The dispatcher's time: a second for each turn of its loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(dispatch.time, "monotonic", lambda: self.now)


class Hanging:
    """Two replicas: slot 1 stops in its first shard, or only takes ``slow`` seconds for it, and then gives pulses."""

    def __init__(self, clock: Clock, slow: float | None = None, late: bool = False):
        self.clock, self.slow, self.late = clock, slow, late
        self.ready: list[int] = []
        self.held: list[tuple[int, Shard, float]] = []
        self.abandoned: list[int] = []
        self.given: list[tuple[int, str, float]] = []

    def start(self, slot: int) -> None:
        self.ready.append(slot)

    def submit(self, slot: int, shard: Shard) -> None:
        hangs = slot == 1 and not any(given == 1 for given, _, _ in self.given)
        self.given.append((slot, shard.key, self.clock.now))
        self.held.append((slot, shard, self.clock.now + (self.slow or 1e9 if hangs else 10.0)))

    def abandon(self, slot: int) -> None:
        self.abandoned.append(slot)
        self.held = [one for one in self.held if one[0] != slot]

    def wait(self, timeout: float) -> list[dispatch.Event]:
        self.clock.now += 1.0
        events: list[dispatch.Event] = [Ready(slot) for slot in self.ready]
        ended = [one for one in self.held if one[2] <= self.clock.now][:1]
        self.held = [one for one in self.held if one not in ended]
        events += [Finished(slot, shard, receipt_for(shard, 1.0)) for slot, shard, _ in ended]
        stopped = self.slow is None and not self.abandoned and any(given == 1 for given, _, _ in self.given)
        events += [Pulse(slot) for slot in (0, 1) if not (slot == 1 and stopped)]
        self.ready = []
        return events


def test_a_silent_replica_is_replaced_and_its_shards_are_run_by_others(monkeypatch):
    workers = Hanging(Clock(monkeypatch))
    outcome = Dispatcher(workers, shards(6), replicas=2, silence=60).run()
    assert keys(outcome) == all_keys(6)
    assert workers.abandoned == [1]
    assert outcome.replicas_lost == 1
    assert workers.clock.now < 60 + 6 * 20
    assert [
        time for slot, _, time in workers.given if slot == 1 and 25 < time < 60
    ] == []  # nothing more is added to it


def test_a_shard_may_take_any_time_while_its_replica_gives_pulses(monkeypatch):
    workers = Hanging(Clock(monkeypatch), slow=5000)
    outcome = Dispatcher(workers, shards(6), replicas=2, silence=60).run()
    assert (keys(outcome), workers.abandoned, outcome.replicas_lost) == (all_keys(6), [], 0)


def test_time_in_which_the_driver_was_suspended_is_no_silence(monkeypatch):
    clock = Clock(monkeypatch)
    workers = Hanging(clock, slow=300)
    wait = workers.wait

    def suspended_once(timeout):
        if 20 < clock.now < 1000:
            clock.now += 3600
            return []
        return wait(timeout)

    workers.wait = suspended_once
    outcome = Dispatcher(workers, shards(6), replicas=2, silence=60).run()
    assert (keys(outcome), workers.abandoned) == (all_keys(6), [])


def test_a_file_that_is_there_is_not_waited_for(monkeypatch):
    workers = Hanging(Clock(monkeypatch))

    def found(asked):
        stopped_in = [key for slot, key, _ in workers.given if slot == 1][:1]
        return {key: receipt_for(Shard("toy", int(key[-5:])), 2.0) for key in asked if key in stopped_in}

    outcome = Dispatcher(workers, shards(3), replicas=2, silence=600, found=found).run()
    assert keys(outcome) == all_keys(3)
    assert (workers.abandoned, workers.clock.now < 100) == ([], True)


@pytest.mark.slow
def test_receipts_of_found_files_are_those_of_the_files(tmp_path):
    store = Store(tmp_path)
    run_scan(ToyScan(3), MODEL, PROMPTS, str(tmp_path), progress=False)
    (folder,) = tmp_path.glob("mlp_scan/run_id=*")
    (folder / "shard-00001.parquet").unlink()
    run = open_run(store, prepare_work(ToyScan(3), MODEL, PROMPTS, on_gpu=False, store=store))
    found = found_in(store, run)(["mlp_scan/00000", "mlp_scan/00001"])
    assert list(found) == ["mlp_scan/00000"]
    receipt = found["mlp_scan/00000"]
    assert receipt.rows == store.rows("SELECT count(*) AS n FROM mlp_scan WHERE layer = 0")[0]["n"]
    assert receipt.bytes == (folder / "shard-00000.parquet").stat().st_size
    assert receipt.versions["torch"]


@pytest.mark.ray
@pytest.mark.own_ray
@pytest.mark.timeout(240)
def test_sigstop_of_a_replica_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "SILENCE", 12.0)
    whole, store, notebook = tmp_path / "whole", tmp_path / "store", tmp_path / "notebook"
    notebook.mkdir()
    stopped: list[int] = []
    since: list[float] = []

    def stop() -> None:
        while len(list(store.glob("mlp_scan/run_id=*/shard-*.parquet"))) < 2:
            time.sleep(0.05)
        stopped.append(int(next(notebook.glob("pid-*")).name.removeprefix("pid-")))
        os.kill(stopped[0], signal.SIGSTOP)
        since.append(time.monotonic())

    with connection("local"):
        watcher = threading.Thread(target=stop, daemon=True)
        watcher.start()
        scan = ToyScan(10, 0.5, str(notebook), together=2)
        summary = run_scan(scan, MODEL, PROMPTS, str(store), address="local", replicas=2, progress=False)
        seconds = time.monotonic() - since[0]
    watcher.join()
    run_scan(ToyScan(10), MODEL, PROMPTS, str(whole), progress=False)
    assert (summary.complete, summary.replicas_lost, len(stopped)) == (True, 1, 1)
    assert seconds < 12 + 60  # what is said, and to start another one on a busy machine
    assert not Path(f"/proc/{stopped[0]}/cmdline").exists() or not Path(f"/proc/{stopped[0]}/cmdline").read_text()
    rows = [Store(place).arrow("SELECT * FROM mlp_scan ORDER BY ALL") for place in (whole, store)]
    assert rows[0].equals(rows[1])


@pytest.mark.ray
@pytest.mark.own_ray
@pytest.mark.timeout(240)
def test_a_deadlock_is_given_to_another_and_a_long_computation_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "SILENCE", 12.0)
    whole, store, notebook = tmp_path / "whole", tmp_path / "store", tmp_path / "notebook"
    notebook.mkdir()
    scan = ToyScan(5, 0.1, str(notebook), once={1: "deadlock", 2: "busy"})
    with connection("local"):
        summary = run_scan(scan, MODEL, PROMPTS, str(store), address="local", replicas=2, progress=False)
    run_scan(ToyScan(5), MODEL, PROMPTS, str(whole), progress=False)
    assert (summary.complete, summary.replicas_lost) == (True, 1)
    rows = [Store(place).arrow("SELECT * FROM mlp_scan ORDER BY ALL") for place in (whole, store)]
    assert rows[0].equals(rows[1])


# ---- what is seen of a thread ----


def wait_for_ever(ended: threading.Event) -> None:
    ended.wait()


def look_now_and_then(ended: threading.Event) -> None:
    while not ended.wait(0.3):
        pass


def compute(ended: threading.Event) -> None:
    while not ended.is_set():
        pass


def wait_for_a_compiler(ended: threading.Event) -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    ended.wait()
    child.kill()
    child.wait()


def wait_for_its_own_thread(ended: threading.Event) -> None:
    other = threading.Thread(target=compute, args=(ended,))
    other.start()
    other.join()


def read_now_and_then(ended: threading.Event) -> None:
    with open("/dev/zero", "rb", buffering=0) as slow:
        while not ended.wait(0.25):
            slow.read(1)


def count_evaluations(ended: threading.Event) -> None:
    while not ended.wait(0.05):
        batching.evaluated += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "stands"),
    [
        (wait_for_ever, True), (look_now_and_then, True), (compute, False), (wait_for_a_compiler, False),
        (wait_for_its_own_thread, False), (count_evaluations, False), (read_now_and_then, False),
    ],
)  # fmt: skip
def test_what_waits_for_ever_is_told_from_what_computes(monkeypatch, work, stands):
    monkeypatch.setattr(vital, "LOOK_SECONDS", 0.3)
    monkeypatch.setattr(vital, "SHARE", 0.02)
    seen, ended = vital.Vital(), threading.Event()

    def begin() -> None:
        seen.begin()
        work(ended)

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    try:
        found = [seen.still() for _ in range(12) if not time.sleep(0.2)]
    finally:
        ended.set()
        thread.join()
    seen.end()
    assert (max(found) > 1.0, seen.still()) == (stands, 0.0)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("shown", ["nothing", "lines", "a bar"])
def test_a_run_in_this_process_warns_of_a_shard_that_does_not_move(tmp_path, monkeypatch, caplog, shown):
    """Whatever is shown meanwhile: bars and lines are written, and take processor time, by threads of their own."""
    monkeypatch.setattr(vital, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(dispatch, "SILENCE", 2.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.3)
    monkeypatch.setenv("TERM", "xterm")
    if shown == "a bar":
        monkeypatch.setattr(progress, "Console", partial(Console, force_terminal=True))
    run_scan(ToyScan(2, 4.0), MODEL, PROMPTS, str(tmp_path), progress=shown != "nothing")
    assert sum("has not moved for 2 s" in message for message in caplog.messages) == 2


def test_a_replica_that_only_says_that_nothing_moves_is_replaced(monkeypatch):
    workers = Hanging(Clock(monkeypatch), slow=5000)
    wait, clock = workers.wait, workers.clock

    def told(timeout):
        began = next((now for slot, _, now in workers.given if slot == 1), None)
        still = 0.0 if began is None or workers.abandoned else clock.now - began
        return [Pulse(1, 0.0, still) if isinstance(e, Pulse) and e.slot else e for e in wait(timeout)]

    workers.wait = told
    outcome = Dispatcher(workers, shards(6), replicas=2, silence=60).run()
    assert (keys(outcome), workers.abandoned, outcome.replicas_lost) == (all_keys(6), [1], 1)


def test_how_long_may_be_said(tmp_path, monkeypatch):
    seen = []

    def asked(*_, **__):
        seen.append(dispatch.SILENCE)
        raise UserError("enough")

    monkeypatch.setattr("mathinterp.cli.experiment.run_chosen", asked)
    for more in ([], ["--hangs-after", "1200"], []):
        done = CliRunner().invoke(main, ["scan", "heads", "--store", str(tmp_path), *more])
        assert done.exit_code == 2, done.output
    assert seen == [300.0, 1200.0, 300.0]
