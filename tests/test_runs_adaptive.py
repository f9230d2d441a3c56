"""Adaptive runs whose files were merged: still finished, still taken over, mended where merged files are lost."""

from dataclasses import replace
from pathlib import Path

import pytest

import mathinterp as mi
from mathinterp.experiments.heads import Heads
from mathinterp.face import Run
from mathinterp.store import Store
from tests.adaptive_case import model, prompts

SCAN = Heads(decide=20)
TABLES = ("head_scan", "baseline", "decisions")


def scan(store: Path, asked: Heads = SCAN) -> Run:
    return mi.run(asked, model(), list(prompts()), store=str(store), progress=False)


def all_rows(store: Path, run: str) -> dict[str, list]:
    return {table: Store(store).rows(f"SELECT * FROM {table} WHERE run_id = '{run}' ORDER BY ALL") for table in TABLES}


@pytest.mark.slow
def test_an_adaptive_run_stays_finished_is_taken_over_and_is_mended(tmp_path: Path) -> None:
    first = scan(tmp_path)
    before, shards = all_rows(tmp_path, first.id), first.ended.shards
    taken = scan(tmp_path / "plain", SCAN)
    plain = scan(tmp_path / "plain", replace(SCAN.whole(), reuse=taken.id))
    assert Store(tmp_path).runs.compact(first.id).files_after < shards
    assert all_rows(tmp_path, first.id) == before
    again = scan(tmp_path)
    assert (again.ended.done, again.complete) == (0, True)
    found = scan(tmp_path, replace(SCAN.whole(), reuse=first.id))
    assert found.id == plain.id
    assert all_rows(tmp_path, found.id) == all_rows(tmp_path / "plain", plain.id)
    record = Store(tmp_path).runs.record(first.id)
    for key in record["compacted"]:
        table, index = key.split("/")
        Path(tmp_path, table, f"run_id={first.id}", f"shard-{index}.parquet").unlink()
        mended = scan(tmp_path)
        assert mended.complete
        assert mended.ended.done > 0
        assert all_rows(tmp_path, first.id) == before
    assert Store(tmp_path).runs.check().faults == []
    assert Store(tmp_path).runs.compact(first.id).files_after < shards
    assert all_rows(tmp_path, first.id) == before
