"""The same rows, bit for bit, on any number of replicas and by resuming; a replica that computes others is told.

On a real Ray. A model of the size of the bundled one: threads would share its matrix products.
"""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from mathinterp.cluster.agreement import DEVIATION, PROBE
from mathinterp.cluster.events import Observer
from mathinterp.cluster.progress import QuietProgress
from mathinterp.cluster.run import run_scan
from mathinterp.engine.cells import Cells
from mathinterp.experiments.base import Experiment
from mathinterp.experiments.heads import Heads
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts import load_prompts
from mathinterp.store import Store
from tests.toy_scan import ToyScan

pytestmark = pytest.mark.ray

PROMPTS = load_prompts("two_digit", limit=16)


def stored(scan: Experiment, store: Path, table: str, replicas: int) -> pa.Table:
    """All rows of ``scan`` on the bundled model."""
    summary = run_scan(scan, ModelSpec("bundled"), PROMPTS, str(store), replicas=replicas, progress=False)
    assert summary.complete
    return Store(store).arrow(f"SELECT * FROM {table} ORDER BY ALL")


def notes(store: Path) -> dict:
    (path,) = (store / "runs").glob("*.json")
    return json.loads(path.read_text())["notes"]


def test_one_two_and_four_replicas_give_the_same_bits(tmp_path: Path) -> None:
    scan = Heads(layers=(0, 1, 4, 5, 6, 7))
    tables, probes = [], []
    for replicas in (1, 2, 4):
        tables.append(stored(scan, tmp_path / str(replicas), "head_scan", replicas))
        kept = notes(tmp_path / str(replicas))
        assert DEVIATION not in kept
        probes.append(kept[PROBE])
    assert tables[0].num_rows > 48 * 16
    assert tables[1].equals(tables[0])
    assert tables[2].equals(tables[0])
    assert probes[0] == probes[1] == probes[2]
    assert probes[0]["device"].endswith(", 1 thread")


def test_the_last_shards_of_a_resumed_run_have_the_same_bits(tmp_path: Path) -> None:
    """Few shards are left, and so few replicas: they must not take the cores that are free for more threads."""
    scan = Heads(layers=(2, 3, 6, 7))
    whole = stored(scan, tmp_path, "head_scan", 2)
    (victim,) = tmp_path.glob("head_scan/run_id=*/shard-00001.parquet")
    victim.unlink()
    assert stored(scan, tmp_path, "head_scan", 2).equals(whole)
    assert DEVIATION not in notes(tmp_path)


def test_a_replica_that_computes_other_cells_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(QuietProgress, "trouble", lambda self, message: told.append(message))
    assert issubclass(QuietProgress, Observer)
    notebook = tmp_path / "notebook"
    notebook.mkdir()
    scan = ToyScan(6, 0.2, str(notebook), together=2, astray=2**-10)
    store = tmp_path / "store"
    assert stored(scan, store, "mlp_scan", 2).num_rows
    (line,) = told
    assert line.startswith("rows of this run depend on the replica: what ")
    assert "computed first differ by up to 0.000977 nats" in line
    kept = notes(store)
    assert kept[DEVIATION]["largest"] == 2**-10
    assert len(kept[DEVIATION]["replicas"]) == 1
    assert Cells.from_json(kept[PROBE]).digest == kept[PROBE]["digest"]
