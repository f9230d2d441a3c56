"""Faults on a real Ray: bad rows, poison shards, and kill -9 of a replica, of the driver and of a raylet.

After each of the killings the same command must end with the rows of an undisturbed run.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster

from mathinterp.cluster.ray_cluster import attach, gpus_each, place
from mathinterp.cluster.run import RunSummary, run_scan
from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from tests.toy_scan import ToyScan

MODEL = ModelSpec("random:llama-tiny")
PROMPTS = [Prompt(f"p{a}", f"{a} plus 5 is", str(a + 5), operation="add") for a in (3, 14, 62)]
LAYERS = 10


@pytest.fixture(scope="module")
def cluster():
    """A head node with one CPU in this process tree; tests may add nodes."""
    earlier = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    head = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    # A dead raylet is noticed by its missing answers, by default after some 15 s, and its workers go on till then.
    noticing = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 4,
    }
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": noticing})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    os.environ.pop("RAY_AUTH_MODE")
    os.environ.update({} if earlier is None else {"RAY_AUTH_MODE": earlier})


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
    return run_scan(scan, MODEL, PROMPTS, str(store), progress=False, **options)


def rows(store: Path) -> pa.Table:
    return Store(store).arrow("select * from mlp_scan order by all")


def record(store: Path) -> dict:
    (path,) = (store / "runs").glob("*.json")
    return json.loads(path.read_text())


def when(condition: Callable[[], bool], then: Callable[[], None], timeout: float = 60) -> threading.Thread:
    """Do ``then`` in the background as soon as ``condition`` holds."""

    def watch() -> None:
        deadline = time.monotonic() + timeout
        while not condition() and time.monotonic() < deadline:
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
    scan = ToyScan(
        LAYERS, notebook=str(notebook), always={1: "raise", 2: "nan", 3: "columns"}, once={4: "raise", 5: "kill"}
    )
    summary = run(scan, store, max_attempts=2)

    assert not summary.complete
    assert summary.done == LAYERS - 3
    assert summary.replicas_lost == 1
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
    assert kept["attempts"] == dict.fromkeys([f"mlp_scan/{i:05d}" for i in (1, 2, 3, 4, 5)], 2)
    assert kept["notes"] == {"threads": 1}

    assert run(ToyScan(LAYERS), store).done == 3
    assert rows(store).equals(undisturbed)
    again = run(ToyScan(LAYERS), store)
    assert (again.done, again.reused, again.replicas, again.device) == (0, LAYERS, 0, None)
    assert record(store)["finished_at"] is not None
    assert record(store)["errors"] == {}


def test_a_user_error_in_a_replica_ends_the_run_with_its_line(cluster, tmp_path):
    with pytest.raises(UserError, match="layer 0 has NaN weights; use another checkpoint"):
        run(ToyScan(3, always={0: "user"}), tmp_path)
    assert record(tmp_path)["finished_at"] is None


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


def test_kill_9_of_the_driver_then_the_same_command(undisturbed, tmp_path):
    command = [
        sys.executable,
        "-c",
        f"from tests.test_faults import *; from pathlib import Path;run(ToyScan(LAYERS, 0.5), Path({str(tmp_path)!r}))",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    driver = subprocess.Popen(command, cwd=Path(__file__).parents[1], env=environment, start_new_session=True)
    deadline = time.monotonic() + 120
    while shard_files(tmp_path) < 3:
        assert driver.poll() is None, "the driver ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    driver.kill()
    driver.wait()
    left = shard_files(tmp_path)
    assert left < LAYERS
    summary = run(ToyScan(LAYERS), tmp_path)
    assert summary.complete
    assert summary.reused >= left
    assert summary.reused + summary.done == LAYERS
    assert rows(tmp_path).equals(undisturbed)


def test_kill_9_of_a_raylet(cluster, undisturbed, tmp_path):
    store, notebook = tmp_path / "store", tmp_path / "notebook"
    notebook.mkdir()
    node = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    (raylet,) = node.all_processes["raylet"]
    watcher = when(lambda: shard_files(store) >= 2, raylet.process.kill)
    summary = run(ToyScan(LAYERS, 1.5, str(notebook), together=2), store, replicas=2)
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
    with pytest.raises(UserError, match="--replicas 0"):
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
