"""A scan asks the autoscaler for the nodes that its replicas need, begins with the first, and lets idle ones go."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from mathinterp.store import Store
from tests.adaptive_case import prompts
from tests.fake_autoscaler import autoscaling_ray
from tests.tiny import save_tiny

WORKERS = {"cpu": {"resources": {"CPU": 1, "object_store_memory": 10**8}, "node_config": {}, "max_workers": 2}}
ROOT = Path(__file__).parents[1]


def workers_alive() -> int:
    return sum(node["Alive"] for node in ray.nodes()) - 1


def until(true: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.ray
@pytest.mark.own_ray
def test_nodes_come_for_a_scan_and_go_after_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    folder, lines, url = save_tiny(tmp_path / "llama", "llama"), tmp_path / "prompts.jsonl", str(tmp_path / "store")
    lines.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts()))
    words = ["scan", "heads", "--model", str(folder), "--prompts", str(lines), "--store", url]
    with autoscaling_ray(WORKERS, idle_seconds=3, home=tmp_path) as address:
        assert workers_alive() == 0
        driver = subprocess.Popen(
            [sys.executable, "-m", "mathinterp.cli.main", *words, "--address", address],
            env={**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        until(lambda: workers_alive() > 0 or driver.poll() is not None)
        out, told = driver.communicate(timeout=200)
        assert driver.returncode == 0, told
        assert "on 2 cpu replica(s)" in out, "as many as the autoscaler may add nodes for"
        until(lambda: workers_alive() == 0)
    (run,) = Store(url).rows("SELECT status, shards_done FROM runs")
    assert run["status"] == "finished"
