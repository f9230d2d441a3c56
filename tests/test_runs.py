"""``runs list``, ``show``, ``compare``, ``export`` and ``check``: what a store says of its runs, without a cluster."""

import json
import math
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.cli.runs_shown import facts
from mathinterp.errors import UserError
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from mathinterp.store.comparing import _key
from mathinterp.store.run_list import RunRow
from tests.runs_case import FEW, many_files, places
from tests.small_store import FINGERPRINT, open_run, prompt, scores, write_head


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return places(tmp_path)[request.param]


def command(*words: str | Path):
    return CliRunner().invoke(main, ["runs", *map(str, words)])


def half_run(place: str, **changes: Any) -> str:
    """A run of two shards, one of them there, the other given up."""
    store = Store(place)
    run = open_run(store, ["head_scan/00000", "head_scan/00001"], dtype="float16", **changes)
    store.write_prompts(FINGERPRINT, [prompt(str(i)) for i in range(5)])
    receipt = write_head(store, run.run_id)
    written = {receipt["shard"]: {name: receipt[name] for name in ("rows", "bytes", "sha256")}}
    run.finish(
        errors={"head_scan/00001": "ArithmeticError: NaN in head 1.1\nTraceback ..."},
        attempts={"head_scan/00001": 3},
        hosts=["node-7"],
        written=written,
    )
    return run.run_id


@pytest.mark.slow
def test_the_list_is_what_the_view_and_the_files_say(place: str) -> None:
    store, run = many_files(place, FEW)
    half = half_run(place)
    open_run(Store(place), ["head_scan/00000"], scan="paths", model="other model")
    found = Store(place).runs.list()
    assert [row.started_at for row in found] == sorted((row.started_at for row in found), reverse=True)
    viewed = Store(place).rows("SELECT run_id, scan, model, prompts, dtype, shards, shards_done, status FROM runs")
    assert {row.run_id: row.status for row in found} == {row["run_id"]: row["status"] for row in viewed}
    by_id = {row.run_id: row for row in found}
    for row in viewed:
        mine = by_id[row["run_id"]]
        assert {name: getattr(mine, name) for name in row} == row
        files = store.files.find("", ".parquet")
        assert mine.bytes == sum(v.size for name, v in files.items() if f"run_id={row['run_id']}/" in name)
        counted = store.rows(
            f"""SELECT (SELECT count(*) FROM head_scan WHERE run_id = '{row["run_id"]}')
                       + (SELECT count(*) FROM baseline WHERE run_id = '{row["run_id"]}') AS n"""
        )
        assert mine.rows == counted[0]["n"]
    assert (by_id[half].status, by_id[half].shards_done, by_id[half].shards) == ("failed", 1, 2)
    assert by_id[run].last_write is None
    assert 0 <= by_id[half].last_write < 600  # type: ignore[operator]
    assert [row.run_id for row in store.runs.list(status="failed")] == [half]
    assert [row.scan for row in store.runs.list(model="OTHER")] == ["paths"]
    assert [row.scan for row in store.runs.list(scan="paths", status="finished")] == []
    with pytest.raises(UserError, match=r"it has heads, paths"):
        store.runs.list(scan="headz")
    with pytest.raises(UserError, match="Did you mean 'finished'"):
        store.runs.list(status="finnished")
    Store(place).runs.compact(run)
    (merged,) = [row for row in Store(place).runs.list() if row.run_id == run]
    assert (merged.files, merged.shards, merged.shards_done, merged.rows) == (2, 5, 5, by_id[run].rows)


def test_the_list_on_the_command_line(tmp_path: Path) -> None:
    many_files(tmp_path, FEW)
    done = command("list", "--store", tmp_path, "--json")
    assert [RunRow(**row).shards for row in json.loads(done.stdout)] == [5]
    assert "5/5" in command("list", "--store", tmp_path).stdout
    assert "Did you mean" in command("list", "--store", tmp_path, "--status", "failled").stderr


@pytest.mark.slow
def test_a_card_says_what_is_missing_and_why(place: str) -> None:
    half = half_run(place, versions={"source": "abc"})
    card = Store(place).runs.show(half)
    assert card.missing == ["head_scan/00001"]
    assert card.attempts == {"head_scan/00001": 3}
    assert card.errors["head_scan/00001"].startswith("ArithmeticError")
    assert card.hosts[-1] == "node-7" or "node-7" in card.hosts
    assert dict(facts(replace(card, notes={"model_loaded_at": 0.0})))["model loaded at"] == "1970-01-01 00:00"
    checked = command("check", "--store", place)
    assert checked.exit_code == 0
    assert f"{half}: 1 of 2 shards not computed; how to go on: mathinterp runs show {half} --store" in checked.stdout
    assert [(table.table, table.shards_done, table.shards, table.rows) for table in card.tables] == [
        ("head_scan", 1, 2, 3)
    ]
    assert card.versions == [{"source": "abc"}]
    for query in card.queries:
        assert Store(place).rows(query)
    with pytest.raises(UserError, match=f"Did you mean '{half}'"):
        Store(place).runs.show(half[:-1] + ("0" if half[-1] != "0" else "1"))


def test_the_command_that_goes_on_is_in_the_record(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["/opt/bin/mathinterp", "scan", "heads", "--prompts", "my file.jsonl"])
    half = half_run(str(tmp_path))
    shown = command("show", half, "--store", tmp_path).stdout
    assert "To go on: mathinterp scan heads --prompts 'my file.jsonl'" in shown
    assert "ArithmeticError: NaN in head 1.1" in shown
    monkeypatch.setattr("sys.argv", ["ipykernel_launcher.py"])
    assert Store(tmp_path).runs.show(half_run(str(tmp_path), model_fingerprint="2")).command is None


def compared(place: str, left: list[dict[str, Any]], right: list[dict[str, Any]], **changes: Any):
    """Two runs with these rows of head_scan, and what is found to differ."""
    ids = []
    for dtype, rows in (("float32", left), ("float64", right)):
        store = Store(place)
        run = open_run(store, ["head_scan/00000"], dtype=dtype, **changes)
        store.write_prompts(FINGERPRINT, [prompt(str(i)) for i in range(3)])
        store.write_shard(run.run_id, "head_scan", 0, scores("head_scan", rows), {})
        run.finish()
        ids.append(run.run_id)
    return Store(place).runs.compare(*ids)


def row(head: int, **more: Any) -> dict[str, Any]:
    return {"layer": 0, "head": head, "prompt_id": "a", **more}


def test_rows_are_compared_by_key_exactly_and_nan_equals_nan(place: str) -> None:
    nan, inf = math.nan, math.inf
    left = [
        row(0, logprob=nan),
        row(1, logprob=inf),
        row(2, logprob=1.0),
        row(3, logprob=nan),
        row(4, correct=False),
        row(8),
    ]
    right = [
        row(9),
        row(4, predicted_id=8),
        row(3, logprob=1.0),
        row(2, logprob=1.5),
        row(1, logprob=inf),
        row(0, logprob=nan),
    ]
    found = compared(place, left, right)
    (table,) = found.tables
    assert table.key == ["layer", "head", "prompt_id", "position"]
    assert (table.rows, table.in_both, table.only_in) == ((6, 6), 5, (1, 1))
    columns = {each.column: each for each in table.columns}
    assert {name: (each.equal, each.largest, each.flips, each.not_finite) for name, each in columns.items()} == {
        "correct": (4, None, 1, None),
        "logprob": (3, 0.5, None, 1),
        "logit": (5, 0.0, None, 0),
        "predicted_id": (4, None, None, None),
    }
    assert set(found.facts) == {"dtype"}
    assert found.parameters == {"dtype": ("float32", "float64")}
    assert not found.same_rows


def test_the_comparison_is_that_of_plain_pandas(tmp_path: Path) -> None:
    """The slow twin: both tables in pandas, joined there."""
    import numpy as np

    random, ids = np.random.default_rng(0), [str(i) for i in range(20)]
    sides = []
    for _ in range(2):
        chosen = random.permutation(20)[:15]
        sides.append([
            row(int(head), prompt_id=ids[i], logprob=float(random.integers(4)), correct=bool(random.integers(2)))
            for head in range(4) for i in chosen
        ])  # fmt: skip
    (table,) = compared(str(tmp_path), *sides).tables
    a, b = (scores("head_scan", side).to_pandas() for side in sides)
    joined = a.merge(b, on=["layer", "head", "prompt_id", "position"], how="outer", indicator=True)
    both = joined[joined._merge == "both"]
    assert table.in_both == len(both) > 0
    assert table.only_in == ((joined._merge == "left_only").sum(), (joined._merge == "right_only").sum())
    columns = {each.column: each for each in table.columns}
    assert columns["logprob"].equal == (both.logprob_x == both.logprob_y).sum()
    assert columns["logprob"].largest == (both.logprob_x - both.logprob_y).abs().max()
    assert columns["correct"].flips == (both.correct_x != both.correct_y).sum()


@pytest.mark.slow
def test_the_same_rows_are_the_same_also_merged_and_of_another_cut(tmp_path: Path) -> None:
    _, run = many_files(tmp_path, FEW)
    _, other = many_files(tmp_path, FEW, model_fingerprint="other")
    Store(tmp_path).runs.compact(run)
    done = command("compare", run, other, "--store", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["same_rows"] is True
    assert found["facts"] == {"model_fingerprint": ["weights-1", "other"]}
    assert found["noise_floors"][0]["max_logprob_deviation"] == 0.0
    assert found["shards"] == ["5 of 5", "5 of 5"]
    assert "All rows are the same." in command("compare", run, other, "--store", tmp_path).stdout


def test_ids_of_other_prompts_are_told(place: str) -> None:
    """Sets that were drawn with other seeds have the same ids."""
    store, run = many_files(place, FEW)
    opened = open_run(store, FEW, prompts_fingerprint="feedbeef00000001", prompts="seed 1")
    other = opened.run_id
    drawn = [prompt(str(i)) for i in range(5)]
    drawn[1:3] = [replace(each, prompt=replace(each.prompt, text="another")) for each in drawn[1:3]]
    store.write_prompts("feedbeef00000001", drawn)
    for shard in FEW:
        table, index = shard.split("/")
        store.write_shard(other, table, int(index), store.read_shard(run, shard).replace_schema_metadata(), {})
    opened.finish()
    found = Store(place).runs.compare(run, other)
    assert (found.differing, found.other_prompts, found.same_rows) == ([], 2, False)
    done = command("compare", run, other, "--store", place)
    assert "prompt ids that are other prompts in the two runs: 2 (" in done.stdout.splitlines()[-1]
    assert "All rows are the same" not in done.stdout


def test_repeated_keys_are_paired_and_told(tmp_path: Path) -> None:
    (table,) = compared(str(tmp_path), [row(0), row(0)], [row(0), row(0), row(0)]).tables
    assert table.repeated
    assert (table.in_both, table.only_in) == (2, (0, 1))


@pytest.mark.slow
def test_no_measured_column_is_a_key() -> None:
    """Of each table: columns that repeat runs must agree on, told by their names here."""
    measured = {"correct", "logprob", "logit", "predicted_id", "estimate", "effect", "decision", "accuracy", "loss"}
    connection = duckdb.connect()
    for name, stored in catalog().tables.items():
        if stored.partition == "run_id":
            connection.register("one", pa.Table.from_pylist([dict.fromkeys(stored.schema.names)], stored.schema))
            key, unique = _key(connection, stored.schema, ["one", "one"])
            assert unique
            assert not measured & set(key), name


@pytest.mark.slow
def test_files_are_exported_whole_with_what_they_are(place: str, tmp_path: Path) -> None:
    store, run = many_files(place, FEW)
    many_files(place, FEW, dtype="bfloat16")
    out = tmp_path / "rows.parquet"
    done = store.runs.export(run, out)
    assert [(each.view, Path(each.path).name) for each in done] == [
        ("baseline", "rows.baseline.parquet"), ("head_scan", "rows.head_scan.parquet")]  # fmt: skip
    file = tmp_path / "rows.head_scan.parquet"
    expected = store.arrow(f"SELECT * FROM head_scan WHERE run_id = '{run}'")
    assert pq.read_table(file).replace_schema_metadata().equals(expected.replace_schema_metadata())
    about = json.loads(pq.read_metadata(file).metadata[b"mathinterp"])
    assert (about["run"]["run_id"], about["run"]["model_fingerprint"], about["status"]) == (
        run,
        "weights-1",
        "finished",
    )
    with pytest.raises(UserError, match=r"is there already.*`force`"):
        store.runs.export(run, out)
    store.runs.export(run, tmp_path / "prompts.csv", view="prompts")
    beside = json.loads((tmp_path / "prompts.csv.json").read_text())
    assert (beside["view"], beside["rows"], beside["run"]["run_id"]) == ("prompts", 5, run)
    assert len(pd.read_csv(tmp_path / "prompts.csv")) == 5
    with pytest.raises(UserError, match="Did you mean 'head_effects'"):
        store.runs.export(run, tmp_path / "x.csv", view="head_efects")
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.slow
def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    out, about = tmp_path / "rows.csv", tmp_path / "rows.csv.json"
    for each in (out, about):
        each.write_text("kept")
    refused = command("export", run, "--out", out, "--view", "baseline", "--store", store.url)
    assert refused.exit_code == 2
    assert f"--out '{out}' is there already" in refused.stderr
    assert "--force" in refused.stderr
    monkeypatch.setattr("mathinterp.store.export._as", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    failed = command("export", run, "--out", out, "--view", "baseline", "--store", store.url, "--force")
    assert failed.exit_code == 2
    assert "No space left" in failed.stderr
    assert out.read_text() == about.read_text() == "kept"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rows.csv", "rows.csv.json", "store"]
    monkeypatch.undo()
    assert command("export", run, "--out", out, "--view", "baseline", "--store", store.url, "--force").exit_code == 0


@pytest.mark.slow
def test_an_export_whose_files_have_no_place_is_refused_in_one_line(tmp_path: Path) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    (tmp_path / "x.csv.json").mkdir()
    (tmp_path / "y.baseline.csv").mkdir()
    shown, long = ["--view", "runs"], "a" * 248 + ".csv"
    for name, more in (("x.csv", shown), ("y.csv", []), (long, []), (long, shown)):
        for force in ([], ["--force"]):
            done = command("export", run, "--out", tmp_path / name, "--store", store.url, *more, *force)
            assert done.exit_code == 2, done.exception
            assert "--out" in done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["store", "x.csv.json", "y.baseline.csv"]


@pytest.mark.slow
def test_check_names_each_fault_with_what_mends_it(tmp_path: Path) -> None:
    store, run = many_files(tmp_path)
    folder = Path(store.url, "head_scan", f"run_id={run}")

    def shard(index: int) -> Path:
        return folder / f"shard-{index:05d}.parquet"

    shard(1).unlink()
    shard(2).write_bytes(shard(2).read_bytes()[:-20])
    shutil.copy(shard(3), folder / "shard-00003 (copy).parquet")
    shutil.copy(shard(4), folder / "shard-00077.parquet")
    (folder / "notes.parquet").write_bytes(b"mine")
    (folder / f".shard-00001.parquet.{os.uname().nodename}.{'0' * 32}.tmp").write_bytes(b"half")
    orphan = Path(store.url, "head_scan", "run_id=0123456789ab")
    orphan.mkdir()
    shutil.copy(shard(5), orphan / "shard-00000.parquet")
    Path(store.url, "runs", "abcdefabcdef.json").write_text("{")
    found = {fault.file.rpartition("/")[2]: fault for fault in mi.open_store(store.url).runs.check().faults}
    assert {name: (fault.kind, fault.mend) for name, fault in found.items()} == {
        "shard-00001.parquet": ("missing", "rerun"),
        "shard-00002.parquet": ("truncated", "rerun"),
        "shard-00003 (copy).parquet": ("duplicate", "remove"),
        "shard-00077.parquet": ("duplicate", "remove"),
        "notes.parquet": ("foreign", "remove"),
        f".shard-00001.parquet.{os.uname().nodename}.{'0' * 32}.tmp": ("stale", "remove"),
        "shard-00000.parquet": ("foreign", "delete"),
        "abcdefabcdef.json": ("damaged", "rerun"),
        "views.sql": ("stale", "views"),
    }
    for name in ("check", "runs check"):
        done = CliRunner().invoke(main, [*name.split(), "--store", store.url])
        assert done.exit_code == 1
        assert "Mend: mathinterp runs delete 0123456789ab --store" in done.stdout
        assert f"Mend: rm -- '{folder}/shard-00003 (copy).parquet'" in done.stdout
    Path(store.url, "runs", "0123456789ab.json").write_text("{")  # its own command reads what it can and goes on
    mends = {fault.file: fault.mend for fault in Store(store.url).runs.check().faults if fault.run == "0123456789ab"}
    assert set(mends.values()) == {"rerun"}
    assert len(mends) == 2
    Path(store.url, "runs", "0123456789ab.json").unlink()
    shutil.rmtree(orphan)
    for name, fault in found.items():
        if fault.mend == "remove" and fault.kind != "stale":
            (folder / name).unlink()
    Path(store.url, "runs", "abcdefabcdef.json").unlink()
    assert [fault.kind for fault in Store(store.url).runs.check([run]).faults] == ["stale", "missing", "truncated"]


def test_a_stale_file_alone_is_no_damage(tmp_path: Path) -> None:
    store, _ = many_files(tmp_path, FEW)
    Path(store.url, "runs", f".x.json.{os.uname().nodename}.{'0' * 32}.tmp").write_bytes(b"half")
    done = CliRunner().invoke(main, ["check", "--store", store.url])
    assert done.exit_code == 0
    assert "stale: runs/.x.json" in done.stdout


@pytest.mark.slow
def test_views_for_other_clients_that_are_not_of_now_are_named(tmp_path: Path) -> None:
    """A DuckDB client that reads them sees other files than this package does: of the store that was copied, here."""
    store, run = many_files(tmp_path / "first", FEW)
    assert store.runs.check().faults == []
    copy = shutil.copytree(store.url, tmp_path / "a copy")
    done = CliRunner().invoke(main, ["check", "--store", str(copy)])
    assert done.exit_code == 0
    assert "stale: views.sql (absent, or not of the files" in done.stdout
    mending = shlex.split(done.stdout.rpartition("Mend: ")[2])
    assert mending[:3] == ["mathinterp", "sql", "--store"]
    assert Path(mending[3]).resolve() == copy.resolve()  # shorter from here
    assert Store(copy).runs.check([run]).faults == []  # they are no run's
    assert CliRunner().invoke(main, mending[1:]).exit_code == 0
    assert Store(copy).runs.check().faults == []
    Path(copy, "views.sql").unlink()
    assert [fault.file for fault in Store(copy).runs.check().faults] == ["views.sql"]
