"""A scan asks the autoscaler for the nodes that its replicas need, begins with the first, and lets idle ones go."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from mathinterp.cluster import ray_cluster
from mathinterp.cluster.events import Finished, Observer
from mathinterp.cluster.places import OnRay
from mathinterp.cluster.run import run_scan
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from tests.adaptive_case import prompts
from tests.fake_autoscaler import autoscaling_ray
from tests.tiny import save_tiny
from tests.toy_scan import ToyScan

WORKERS = {"cpu": {"resources": {"CPU": 1, "object_store_memory": 10**8}, "node_config": {}, "max_workers": 2}}
ROOT = Path(__file__).parents[1]


def workers_alive() -> int:
    return sum(node["Alive"] for node in ray.nodes()) - 1


def until(true: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


class Seen(Observer):
    """Who computed which shard, and how many nodes there were when the driver heard of it, which leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.told: list[tuple[str, int, int]] = []

    def finished(self, event: Finished) -> None:
        self.told.append((event.shard.key, event.receipt.pid, workers_alive()))
        self.file.touch()


@pytest.mark.ray
@pytest.mark.own_ray
def test_nodes_come_for_a_scan_and_go_after_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    seen = Seen(tmp_path / "a shard is done")
    with autoscaling_ray(WORKERS, idle_seconds=3, home=tmp_path, late_until=str(seen.file)) as address:
        assert workers_alive() == 0
        work_starts_with_the_first_and_late_ones_join(seen, tmp_path, monkeypatch)
        until(lambda: workers_alive() == 0)
        a_command_has_as_many_as_may_come(tmp_path, address)
        until(lambda: workers_alive() == 0)


def work_starts_with_the_first_and_late_ones_join(seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node is held back until a shard is done; from the third shard on, both replicas must have loaded."""
    notebook = tmp_path / "notebook"
    notebook.mkdir()
    monkeypatch.setattr(OnRay, "observers", lambda *_: [seen])
    monkeypatch.setattr(ray_cluster, "BOOTSTRAP_FILE", tmp_path / "ray_bootstrap_config.yaml")
    scan = ToyScan(8, notebook=str(notebook), together=2, alone=2)
    sentence = Prompt("p", "3 plus 5 is", "8", operation="add")
    late = threading.Timer(150, seen.file.touch)  # so that a scan that waits for all nodes ends, too
    late.start()
    model, url = ModelSpec("random:llama-tiny"), str(tmp_path / "late")
    summary = run_scan(scan, model, [sentence], url, address="auto", progress=False)
    late.cancel()
    assert (summary.complete, summary.replicas, summary.replicas_lost) == (True, 2, 0)
    assert len(seen.told) == 8
    _, first, alive = seen.told[0]
    assert alive == 1, "a shard was computed while there was one node of two"
    by_late_one = [key for key, pid, _ in seen.told if pid != first]
    assert 0 < len(by_late_one) < 7


def a_command_has_as_many_as_may_come(tmp_path: Path, address: str) -> None:
    folder, lines, url = save_tiny(tmp_path / "llama", "llama"), tmp_path / "prompts.jsonl", str(tmp_path / "store")
    lines.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts()))
    words = ["scan", "heads", "--model", str(folder), "--prompts", str(lines), "--store", url]
    driver = subprocess.Popen(
        [sys.executable, "-m", "mathinterp", *words, "--address", address],
        env={**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: workers_alive() > 0 or driver.poll() is not None)
    out, told = driver.communicate(timeout=200)
    assert driver.returncode == 0, told
    assert "on 2 cpu replica(s)" in out, "as many as the autoscaler may add nodes for"
    (run,) = Store(url).rows("SELECT status, shards_done FROM runs")
    assert run["status"] == "finished"
