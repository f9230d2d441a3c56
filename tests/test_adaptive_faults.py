"""Kill -9 of a replica, and of a node, in an adaptive scan on Ray: rows and decisions of an undisturbed run."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pyarrow as pa
import pytest
from ray.cluster_utils import Cluster

import mathinterp as mi
from mathinterp.cluster.run import RunSummary, run_scan
from mathinterp.experiments.base import Shard, Subject
from mathinterp.experiments.heads import Heads
from mathinterp.models.catalog import ModelSpec
from mathinterp.store import Store
from tests.adaptive_case import prompts
from tests.ray_nodes import NODE, ray_nodes
from tests.tiny import save_tiny

pytestmark = [pytest.mark.ray, pytest.mark.own_ray, pytest.mark.timeout(240)]

KEY = ["layer", "head", "prompt_id", "position"]


@dataclass(frozen=True)
class SlowHeads(Heads):
    """A head scan whose shards take their time; how long, and where replicas write their pids, changes no row."""

    seconds: float = 0.0
    notebook: str = ""

    name: ClassVar[str] = "slow_heads"

    def prepare(self, subject: Subject) -> Any:
        """Leave the pid."""
        if self.notebook:
            Path(self.notebook, f"pid-{os.getpid()}").touch()
        return super().prepare(subject)

    def run(self, state: Any, shard: Shard) -> pa.Table:
        """Wait until both replicas are there, and then some time."""
        while self.notebook and len(list(Path(self.notebook).glob("pid-*"))) < 2:
            time.sleep(0.05)
        time.sleep(self.seconds)
        return super().run(state, shard)

    def files(self, nodes: Any) -> Any:
        """Four heads a file, so that there is something to kill."""
        return [list(nodes[start : start + 4]) for start in range(0, len(nodes), 4)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec(str(save_tiny(tmp_path_factory.mktemp("model") / "llama", "llama")))


@pytest.fixture(scope="module")
def undisturbed(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run in this process, in which nothing goes wrong."""
    store = tmp_path_factory.mktemp("undisturbed")
    assert run(model, store).complete
    return store


def run(model: ModelSpec, store: Path, notebook: str = "", **options: Any) -> RunSummary:
    scan = SlowHeads(decide=20, seconds=0.5 if notebook else 0.0, notebook=notebook)
    return run_scan(scan, model, mi.prompts(list(prompts())), str(store), progress=False, **options)


def when_under_way(store: Path, then: Callable[[], None]) -> threading.Thread:
    """Do ``then`` in the background once the second block's first file is there: past the first look."""

    def watch() -> None:
        while len(list(store.glob("head_scan/run_id=*/shard-*.parquet"))) < 4:
            time.sleep(0.05)
        then()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def assert_as_undisturbed(store: Path, undisturbed: Path) -> None:
    """Decisions are the same, and so are the rows they rest on; beside them are rows of nodes that began early."""
    mine, theirs = ({name: table(place, name) for name in ("decisions", "baseline", "head_scan")}
                    for place in (store, undisturbed))  # fmt: skip
    own = ["prompts_run"]  # with what began early
    pd.testing.assert_frame_equal(mine["decisions"].drop(columns=own), theirs["decisions"].drop(columns=own))
    assert (mine["decisions"]["prompts_run"] >= theirs["decisions"]["prompts_run"]).all()
    assert not mine["head_scan"].duplicated(KEY).any()
    for name, key in (("head_scan", KEY), ("baseline", KEY[2:])):
        rows = theirs[name][key].merge(mine[name], on=key, how="left")
        pd.testing.assert_frame_equal(rows, theirs[name][rows.columns], rtol=0, atol=1e-5, check_exact=False)
    assert mine["decisions"]["prompts_run"].sum() == len(
        mine["head_scan"][["layer", "head", "prompt_id"]].drop_duplicates()
    )


def table(store: Path, name: str) -> pd.DataFrame:
    frame = Store(store).dataframe(f"SELECT * EXCLUDE (run_id) FROM {name}")
    return frame.sort_values([key for key in KEY if key in frame]).reset_index(drop=True)


def test_kill_9_of_a_replica(cluster: Cluster, model: ModelSpec, undisturbed: Path, tmp_path: Path) -> None:
    store, notebook = tmp_path / "store", tmp_path / "notebook"
    notebook.mkdir()
    killed: list[int] = []

    def kill() -> None:
        killed.append(int(next(notebook.glob("pid-*")).name.removeprefix("pid-")))
        os.kill(killed[0], signal.SIGKILL)

    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    watcher = when_under_way(store, kill)
    summary = run(model, store, str(notebook), address="local", replicas=2)
    watcher.join()
    cluster.remove_node(node)
    assert killed
    assert (summary.complete, summary.replicas_lost) == (True, 1)
    assert_as_undisturbed(store, undisturbed)
    assert run(model, store, address="local").done == 0


def test_kill_9_of_a_node(cluster: Cluster, model: ModelSpec, undisturbed: Path, tmp_path: Path) -> None:
    store, notebook = tmp_path / "store", tmp_path / "notebook"
    notebook.mkdir()
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    (raylet,) = node.all_processes["raylet"]
    watcher = when_under_way(store, raylet.process.kill)
    summary = run(model, store, str(notebook), address="local", replicas=2)
    watcher.join()
    cluster.remove_node(node)
    assert (summary.replicas, summary.complete, summary.replicas_lost) == (2, True, 1)
    assert_as_undisturbed(store, undisturbed)
