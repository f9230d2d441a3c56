"""Stores that grow: a command opens what it needs and has not seen, and never believes its memory over the files."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import mathinterp as mi
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mlps import Mlps
from mathinterp.experiments.results import Results
from mathinterp.prompts.prompt import plain
from mathinterp.store import Store, survey
from tests.adaptive_case import model, prompts
from tests.small_store import FINGERPRINT, open_run, prompt, scores, write_head

SHARDS = 6


@pytest.fixture
def grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two finished runs of six heads and a baseline; what was inspected is kept from five files on."""
    monkeypatch.setattr(survey, "WORTH_KEEPING", 5)
    for dtype in ("float32", "bfloat16"):
        store = Store(tmp_path)
        run = open_run(store, ["baseline/00000", *(f"head_scan/{i:05d}" for i in range(SHARDS))], dtype=dtype)
        store.write_prompts(FINGERPRINT, [prompt(str(i)) for i in range(3)])
        baseline = scores("baseline", [{"prompt_id": str(i)} for i in range(3)])
        store.write_shard(run.run_id, "baseline", 0, baseline, {})
        for index in range(SHARDS):
            write_head(store, run.run_id, index)
        assert run.finish() == []
    Store(tmp_path).rows("SELECT * FROM runs")
    return str(tmp_path)


def opened_by(url: str, sql: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the result files that a process which only asks this opens itself (DuckDB's reading aside)."""
    store, names = Store(url), []
    open_file = store.files.open
    monkeypatch.setattr(store.files, "open", lambda name: names.append(name) or open_file(name))
    store.rows(sql)
    return [name for name in names if name.endswith(".parquet")]


@pytest.mark.slow
def test_no_footer_is_read_twice_and_none_that_a_query_does_not_need(grown, monkeypatch) -> None:
    assert opened_by(grown, "SELECT * FROM runs", monkeypatch) == []
    os.remove(Path(grown, "inspected.json"))
    few = opened_by(grown, "SELECT count(*) FROM baseline", monkeypatch)
    assert {name.split("/")[0] for name in few} == {"baseline"}
    assert len(opened_by(grown, "SELECT count(*) FROM head_scan", monkeypatch)) == 2 * SHARDS
    assert opened_by(grown, "SELECT count(*) FROM head_scan", monkeypatch) == []


@pytest.mark.parametrize(
    "kept", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"head_scan": 7}', b'{"head_scan": {"files": []}}']
)
def test_what_was_kept_may_be_broken(grown, kept) -> None:
    Path(grown, "inspected.json").write_bytes(kept)
    seen = Store(grown)
    assert seen.rows("SELECT count(*) AS n FROM head_scan") == [{"n": 2 * SHARDS * 3}]
    assert seen.problems == []


@pytest.mark.slow
def test_what_was_kept_is_not_believed_of_a_file_that_changed(grown) -> None:
    path = sorted(Path(grown, "head_scan").glob("*/shard-00003.parquet"))[0]
    times = path.stat()
    size = times.st_size
    path.write_bytes(b"PAR1" + bytes(size - 8) + b"PAR1")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as large and as old as before
    seen = Store(grown)
    assert seen.rows("SELECT count(*) AS n FROM head_scan") == [{"n": (2 * SHARDS - 1) * 3}]
    assert str(path) in seen.problems[0]
    path.unlink()
    seen = Store(grown)
    assert seen.rows("SELECT count(*) AS n FROM head_scan") == [{"n": (2 * SHARDS - 1) * 3}]
    assert sorted(row["shards_done"] for row in seen.rows("SELECT shards_done FROM runs")) == [SHARDS, SHARDS + 1]


@pytest.mark.slow
def test_within_held_all_queries_share_a_look_at_the_files(grown, monkeypatch) -> None:
    store, looks = Store(grown), []
    find = store.files.find
    monkeypatch.setattr(store.files, "find", lambda *arguments: looks.append(arguments[0]) or find(*arguments))
    with store.held():
        for _ in range(2):
            held = [
                store.rows("SELECT * FROM head_effects ORDER BY ALL"),
                store.rows("SELECT * FROM runs ORDER BY ALL"),
            ]
    assert len([folder for folder in looks if folder == "head_scan"]) == 1
    assert held == [
        store.rows("SELECT * FROM head_effects ORDER BY ALL"),
        store.rows("SELECT * FROM runs ORDER BY ALL"),
    ]


@pytest.mark.slow
def test_a_run_of_experiments_that_are_not_installed_counts_its_shards(grown) -> None:
    path = next(Path(grown, "head_scan").glob("*/shard-00000.parquet"))
    run = open_run(Store(grown), ["another_scan/00000"], scan="another", dtype="int8").run_id
    place = Path(grown, "another_scan", f"run_id={run}", "shard-00000.parquet")
    place.parent.mkdir(parents=True)
    pq.write_table(pq.read_table(path), place)
    assert Store(grown).rows("SELECT status FROM runs WHERE scan = 'another'") == [{"status": "finished"}]


def test_the_quick_way_to_plain_fields_is_that_of_dataclasses() -> None:
    items = [prompt("a", carry=("change-one", None, "mixed")), prompt("b", operation=None, operand_b=None)]
    for item in items:
        assert json.dumps(plain(item), sort_keys=True) == json.dumps(asdict(item), sort_keys=True)


@pytest.mark.slow
def test_of_one_run_in_held_its_own_rows_alone_are_read_and_all_others_when_asked_for(grown: str) -> None:
    store = Store(grown)
    first, second = (row["run_id"] for row in store.rows("SELECT run_id FROM runs ORDER BY run_id"))
    own, every = "SELECT * FROM head_effects WHERE run_id = $run ORDER BY ALL", "SELECT DISTINCT run_id FROM head_scan"
    expected = store.rows(own, {"run": first})
    assert expected
    others = store.rows(own, {"run": second})
    assert others
    assert others != expected
    with store.held(first):
        assert store.rows(own, {"run": first}) == expected
        assert store.rows(own, {"run": second}) == others
        assert {row["run_id"] for row in store.rows(every)} == {first, second}
        assert store.rows("SELECT DISTINCT status FROM runs WHERE run_id = $run", {"run": second}) == [
            {"status": "finished"}
        ]
        for record in Path(grown, "runs").iterdir():
            record.unlink()
        assert store.rows(own, {"run": first}) == expected, "records are read once"


def test_a_table_of_which_the_held_run_has_no_file_is_empty(tmp_path: Path) -> None:
    """Another run of the store has some: the view read the empty list of this one's files, and failed."""
    store = Store(tmp_path)
    other = open_run(store, ["baseline/00000", "head_scan/00000"])
    store.write_prompts(FINGERPRINT, [prompt("0")])
    store.write_shard(other.run_id, "baseline", 0, scores("baseline", [{"prompt_id": "0"}]), {})
    write_head(store, other.run_id, 0)
    assert other.finish() == []
    run = open_run(store, ["baseline/00000"], dtype="bfloat16")
    store.write_shard(run.run_id, "baseline", 0, scores("baseline", [{"prompt_id": "0"}]), {})
    assert run.finish() == []
    with store.held(run.run_id):
        assert store.rows("SELECT * FROM head_scan WHERE run_id = $run", {"run": run.run_id}) == []


def test_a_query_of_one_runs_logit_differences_reads_its_files_alone(grown: str) -> None:
    run = Store(grown).rows("SELECT run_id FROM runs")[0]["run_id"]
    (plan,) = Store(grown).rows(f"EXPLAIN ANALYZE SELECT * FROM head_scan_logit_differences WHERE run_id = '{run}'")
    assert "12/12" not in plan["explain_value"]
    assert f"{SHARDS}/{2 * SHARDS}" in plan["explain_value"]


@pytest.mark.slow
@pytest.mark.parametrize("scan", [Heads(), Mlps()], ids=["heads", "mlps"])
def test_summaries_that_read_their_own_rows_alone_say_the_same_with_all_rows(scan: Any, tmp_path: Path) -> None:
    assert scan.reads_own_rows
    run, _ = (mi.run(scan, model(), list(prompts()[:n]), store=str(tmp_path), progress=False) for n in (24, 12))
    results, said = Results(Store(tmp_path), run.id), []
    for own in (None, run.id):
        with results.store.held(own):
            summary = scan.summarize(results, None)
            said.append((str(summary), summary.data, summary.queries))
    assert said[0] == said[1]
