"""Faults on a real Ray: bad rows, poison shards, and kill -9 of a replica, of the driver and of a raylet.

After each of the killings the same command must end with the rows of an undisturbed run.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pyarrow as pa
import pytest

from mathinterp.cluster.dispatch import Outcome
from mathinterp.cluster.events import Event, Failed, Finished, Lost, Ready, Receipt
from mathinterp.cluster.ray_cluster import attach, gpus_each, place
from mathinterp.cluster.ray_workers import RayWorkers
from mathinterp.cluster.replica import loading_turn
from mathinterp.cluster.run import RunSummary, close_run, open_run, prepare_work, run_scan
from mathinterp.errors import UserError
from mathinterp.experiments.base import Shard
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from tests.moody import Moody, Unloadable
from tests.ray_nodes import NODE, ray_nodes
from tests.toy_scan import ToyScan

pytestmark = [pytest.mark.ray, pytest.mark.own_ray]

MODEL = ModelSpec("random:llama-tiny")
PROMPTS = [Prompt(f"p{a}", f"{a} plus 5 is", str(a + 5), operation="add") for a in (3, 14, 62)]
LAYERS = 10
HANGING_LAYER = 4


@pytest.fixture(scope="module")
def doomed_driver(tmp_path_factory):
    """A process that runs the scan on a local Ray of its own, until it hangs in HANGING_LAYER."""
    store = tmp_path_factory.mktemp("doomed")
    code = (
        "from pathlib import Path; from tests.test_faults import *;"
        f"run(ToyScan(LAYERS, always={{HANGING_LAYER: 'hang'}}), Path({str(store)!r}), replicas=1)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1], env=environment)
    yield driver, store
    driver.kill()
    driver.wait()


@pytest.fixture(scope="module")
def cluster(doomed_driver):
    """A head node with one CPU in this process tree; tests may add nodes. (The doomed driver starts meanwhile.)"""
    with ray_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory) -> pa.Table:
    """The rows of a run in which nothing goes wrong."""
    store = tmp_path_factory.mktemp("undisturbed")
    summary = run(ToyScan(LAYERS), store)
    assert summary.complete
    assert (summary.done, summary.reused, summary.failed) == (LAYERS, 0, [])
    assert summary.evaluations == LAYERS * len(PROMPTS)
    return rows(store)


def run(scan: ToyScan, store: Path, **options) -> RunSummary:
    return run_scan(scan, MODEL, PROMPTS, str(store), **{"address": "local", "progress": False, **options})


def rows(store: Path) -> pa.Table:
    return Store(store).arrow("select * from mlp_scan order by all")


def record(store: Path) -> dict:
    (path,) = (store / "runs").glob("*.json")
    return json.loads(path.read_text())


def when(condition: Callable[[], bool], then: Callable[[], None]) -> threading.Thread:
    """Do ``then`` in the background as soon as ``condition`` holds, and not before, however slow the machine is.

    A node killed before its replica has loaded would leave the other one waiting for it for ever (``together``).
    """

    def watch() -> None:
        while not condition():
            time.sleep(0.05)
        then()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def shard_files(store: Path) -> int:
    return len(list(store.glob("mlp_scan/run_id=*/shard-*.parquet")))


def test_faults_of_shards_are_reported_and_the_rest_is_finished(undisturbed, tmp_path):
    store, notebook = tmp_path / "store", tmp_path / "notebook"
    notebook.mkdir()
    scan = ToyScan(LAYERS, notebook=str(notebook), always={1: "raise", 2: "nan", 3: "columns"}, once={4: "raise"})
    summary = run(scan, store, max_attempts=2)

    assert not summary.complete
    assert summary.done == LAYERS - 3
    failed = {failure.key: failure for failure in summary.failed}
    assert failed["mlp_scan/00001"].error == "RuntimeError: layer 1 is broken"
    assert "toy_scan.py" in failed["mlp_scan/00001"].traceback
    assert failed["mlp_scan/00002"].error.startswith(
        "ArithmeticError: shard mlp_scan/00002: logprob is nan at layer 2, prompt_id p3, position 0"
    )
    assert failed["mlp_scan/00003"].error.startswith("TypeError: shard mlp_scan/00003: the scan returned columns")
    assert {failure.attempts for failure in summary.failed} == {2}

    kept = record(store)
    assert kept["finished_at"] is None
    assert set(kept["errors"]) == set(failed)
    assert "toy_scan.py" in kept["errors"]["mlp_scan/00001"]
    assert kept["attempts"] == dict.fromkeys([f"mlp_scan/{i:05d}" for i in (1, 2, 3, 4)], 2)
    assert kept["notes"]["threads"] == 1
    assert kept["notes"]["seconds_from_loaded_model"] > kept["notes"]["prepare_seconds"] >= 0

    assert run(ToyScan(LAYERS), store).done == 3
    assert rows(store).equals(undisturbed)
    again = run(ToyScan(LAYERS), store)
    assert (again.done, again.reused, again.replicas, again.device) == (0, LAYERS, 0, None)
    assert record(store)["finished_at"] is not None
    assert record(store)["errors"] == {}


def events_of(workers: RayWorkers, count: int) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + 60
    while len(events) < count and time.monotonic() < deadline:
        events += workers.wait(timeout=1)
    return events


def test_what_ray_reports_becomes_events(cluster):
    workers = RayWorkers(Moody, False, num_cpus=0, num_gpus=0)
    workers.start(0)
    assert events_of(workers, 1) == [Ready(0, {"mood": "good"})]
    asked = [Shard(table, index) for index, table in enumerate(["fine", "user", "unpicklable", "kill", "behind"])]
    for shard in asked[:3]:
        workers.submit(0, shard)
    fine, user, unpicklable = events_of(workers, 3)  # a death takes along what was not fetched before it
    for shard in asked[3:]:
        workers.submit(0, shard)
    (lost,) = events_of(workers, 1)
    assert fine == Finished(0, asked[0], 0)
    assert isinstance(user, Failed)
    assert isinstance(user.error, UserError)
    assert str(user.error) == "the weights have NaN; use another checkpoint"
    assert "in run" in user.traceback
    assert "\x1b" not in user.traceback
    assert isinstance(unpicklable, Failed)
    assert "a lock" in unpicklable.traceback
    assert isinstance(lost, Lost)
    assert lost.reason.startswith("The actor is dead because its worker process has died")
    assert workers.wait(timeout=0.1) == []  # what waited behind the killer is forgotten with it
    workers.start(0)
    assert events_of(workers, 1) == [Ready(0, {"mood": "good"})]
    for table in ("card", "behind"):
        workers.submit(0, Shard(table, 0))
    (lost,) = events_of(workers, 1)  # whose process answers, and must end
    assert isinstance(lost, Lost)
    assert lost.reason == "its GPU gives nothing but errors"
    assert "in run" in lost.traceback
    assert "\x1b" not in lost.traceback
    assert workers.wait(timeout=0.1) == []
    workers.start(0)
    assert events_of(workers, 1) == [Ready(0, {"mood": "good"})]
    workers.close()


def test_a_replica_that_cannot_be_built_tells_why(cluster):
    workers = RayWorkers(Moody, True, num_cpus=0, num_gpus=0)
    workers.start(0)
    (lost,) = events_of(workers, 1)
    assert lost == Lost(0, "OSError: cannot begin")
    workers.close()


def test_a_replica_that_cannot_load_leaves_its_card(cluster):
    workers = RayWorkers(Unloadable, False, num_cpus=0, num_gpus=0)
    workers.start(0)
    failed: list[Failed] = []
    while not failed:  # a pulse may come first
        failed = [event for event in events_of(workers, 1) if isinstance(event, Failed)]
    assert (failed[0].shard, type(failed[0].error)) == (None, OSError)
    until = time.monotonic() + 20
    while Path(f"/proc/{failed[0].error}").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    assert workers.wait(timeout=0.1) == []  # nothing is asked of it any more
    workers.close()


def test_a_replica_whose_card_is_lost_is_replaced(undisturbed, tmp_path):
    """It would answer each shard with an error, as long as it is asked."""
    store, notebook = tmp_path / "store", tmp_path / "notebook"
    notebook.mkdir()
    summary = run(ToyScan(LAYERS, notebook=str(notebook), once={4: "card lost"}), store, replicas=1, max_attempts=1)
    assert (summary.done, summary.failed, summary.replicas_lost) == (LAYERS, [], 1)
    assert record(store)["attempts"] == {"mlp_scan/00004": 2}
    assert rows(store).equals(undisturbed)


def test_where_a_shard_breaks_every_card_is_in_the_record(tmp_path):
    """An index out of range in an experiment of one's own does, for example."""
    summary = run(ToyScan(1, always={0: "card lost"}), tmp_path, replicas=1)
    (failed,) = summary.failed
    assert (failed.attempts, failed.losses) == (0, 5)
    assert failed.error == "its replica died 5 times: its GPU gives nothing but errors"
    assert 'raise CardLost("its GPU gives nothing but errors")' in record(tmp_path)["errors"]["mlp_scan/00000"]


def test_kill_9_of_a_replica(undisturbed, tmp_path):
    store, notebook = tmp_path / "store", tmp_path / "notebook"
    notebook.mkdir()
    killed: list[int] = []

    def kill() -> None:
        killed.append(pids(notebook)[0])
        os.kill(killed[0], signal.SIGKILL)

    watcher = when(lambda: shard_files(store) >= 2, kill)
    summary = run(ToyScan(LAYERS, 0.4, str(notebook), together=2), store, replicas=2)
    watcher.join()
    assert killed
    assert summary.replicas_lost == 1
    assert summary.complete
    assert rows(store).equals(undisturbed)


def test_kill_9_of_the_driver_then_the_same_command(doomed_driver, undisturbed):
    driver, store = doomed_driver
    deadline = time.monotonic() + 120
    while shard_files(store) < HANGING_LAYER:
        assert driver.poll() is None, "the driver ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    summary = run(ToyScan(LAYERS), store)
    assert summary.complete
    assert (summary.reused, summary.done) == (HANGING_LAYER, LAYERS - HANGING_LAYER)
    assert rows(store).equals(undisturbed)


def test_kill_9_of_a_raylet(cluster, undisturbed, tmp_path):
    store, notebook = tmp_path / "store", tmp_path / "notebook"
    notebook.mkdir()
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    (raylet,) = node.all_processes["raylet"]
    watcher = when(lambda: shard_files(store) >= 2, raylet.process.kill)
    summary = run(ToyScan(LAYERS, 1.0, str(notebook), together=2), store, replicas=2)
    watcher.join()
    assert summary.replicas == 2
    assert summary.replicas_lost == 1
    assert summary.complete
    assert rows(store).equals(undisturbed)
    cluster.remove_node(node)


def test_placement(cluster):
    assert gpus_each(None) == 0
    assert place(None, 0, 5, 10**6).replicas == 1
    assert place(8, 0, 5, 10**6).replicas == 5
    with pytest.raises(UserError, match="`replicas` 0"):
        place(0, 0, 5, 10**6)
    with pytest.raises(UserError, match="no node has that many GPUs, the most is 0"):
        gpus_each(0.5)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 .*refused"),
        ("nonsense", "give host:port of the head node"),
        ("ray://somewhere:10001", "from elsewhere use 'mathinterp submit'"),
    ],
)
def test_a_cluster_that_is_not_there(address, message):
    with pytest.raises(UserError, match=message):
        attach(address)


def test_another_server_at_the_address_is_told_at_once():
    """As the dashboard at 8265 is, which `submit` is given; Ray would try for minutes."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        address = f"127.0.0.1:{server.server_port}"
        with pytest.raises(UserError, match=f"^no Ray cluster answers at {address} but another server; give .* 6379"):
            attach(address)
        thread.join()


def test_files_that_only_another_machine_sees_are_a_user_error(tmp_path):
    work = prepare_work(ToyScan(2), MODEL, PROMPTS, on_gpu=False, store=Store(tmp_path))
    opened = open_run(Store(tmp_path), work)
    elsewhere = Receipt("mlp_scan/00001", 5, 1.0, "node-7", 1, 100, 0)
    with pytest.raises(UserError, match=r"1 shard written on node-7 but .* give `store` a folder that all nodes"):
        close_run(opened, Outcome(receipts=[elsewhere]))
    assert "node-7" in record(tmp_path)["hosts"]


def test_only_so_many_replicas_of_a_machine_load_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    inside, most = [], []

    def load() -> None:
        with loading_turn(2):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=load) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 5
    assert max(most) == 2
