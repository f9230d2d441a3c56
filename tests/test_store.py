"""The store: layout, atomic writes, footers, resume, and files that cannot be trusted."""

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mathinterp.errors import UserError
from mathinterp.experiments import registry
from mathinterp.store import Store, query, run_id
from mathinterp.store.catalog import catalog
from mathinterp.store.schema import conform
from mathinterp.store.writer import encode
from tests.small_store import FINGERPRINT, drive, fill, head_rows, open_run, prompt, write_head


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    """The same behaviour on a local folder and on an object store."""
    return Store(tmp_path / "results" if request.param == "local" else f"memory://{uuid4().hex}/results")


def test_files_lie_where_the_layout_says(tmp_path):
    store = Store(tmp_path)
    run = fill(store, [prompt("a")], [{"prompt_id": "a"}], [{"layer": 0, "head": 0, "prompt_id": "a"}])
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == [
        f"answer_tokens/prompts_fingerprint={FINGERPRINT}/answer_tokens.parquet",
        f"answer_tokens/prompts_fingerprint={FINGERPRINT}/answer_tokens.parquet.sha256",
        f"baseline/run_id={run}/shard-00000.parquet",
        f"head_scan/run_id={run}/shard-00000.parquet",
        f"prompts/prompts_fingerprint={FINGERPRINT}/prompts.parquet",
        f"prompts/prompts_fingerprint={FINGERPRINT}/prompts.parquet.sha256",
        f"runs/{run}.json",
        "views.sql",
    ]


def test_rows_come_back_as_written(store):
    rows = head_rows(5)
    run = open_run(store).run_id
    receipt = store.write_shard(run, "head_scan", 0, rows, {})
    names = ", ".join(rows.column_names)
    assert store.arrow(f"SELECT {names} FROM head_scan ORDER BY prompt_id").equals(rows)
    assert (receipt["shard"], receipt["rows"]) == ("head_scan/00000", 5)
    assert receipt["bytes"] == len(store.files.read(f"head_scan/run_id={run}/shard-00000.parquet"))
    assert receipt["path"] == store.files.address(f"head_scan/run_id={run}/shard-00000.parquet")


def test_footer_holds_the_configuration_and_columns_their_encodings(tmp_path):
    store = Store(tmp_path)
    run = open_run(store).run_id
    path = store.write_shard(run, "head_scan", 0, head_rows(), {"scan": "heads", "dtype": "float32"})["path"]
    metadata = pq.read_metadata(path)
    config = json.loads(metadata.metadata[b"mathinterp"])
    assert config == {
        "scan": "heads", "dtype": "float32", "run_id": run, "shard": "head_scan/00000", "result_format": 1,
        "rows": 3,
    }  # fmt: skip
    columns = {c.path_in_schema: c for c in map(metadata.row_group(0).column, range(metadata.num_columns))}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert {name for name, c in columns.items() if "RLE_DICTIONARY" in c.encodings} == {"layer", "head"}
    assert {name for name, c in columns.items() if "BYTE_STREAM_SPLIT" in c.encodings} == {"logprob", "logit"}


def test_wrong_columns_are_refused_and_integer_widths_are_not():
    rows, schema = head_rows(), catalog().tables["head_scan"].schema
    with pytest.raises(AssertionError, match="logit"):
        conform(rows.drop_columns("logit"), "head_scan", schema)
    with pytest.raises(AssertionError, match=r"head_scan\.logprob is double"):
        conform(rows.set_column(5, "logprob", rows["logprob"].cast(pa.float64())), "head_scan", schema)
    wide = rows.set_column(0, "layer", rows["layer"].cast(pa.int64()))
    assert conform(wide, "head_scan", schema).equals(rows)
    with pytest.raises(pa.ArrowInvalid, match="not in range"):
        conform(rows.set_column(0, "layer", pa.array([70_000] * 3)), "head_scan", schema)
    with pytest.raises(AssertionError, match="no known experiment"):
        encode(rows, "unheard_of", {})


def test_every_experiment_stores_only_tables_of_the_catalog():
    seen = set()
    for experiment in registry.experiments().values():
        for name, table in experiment.tables.items():
            assert catalog().tables[name] == table, f"{experiment.__name__}: {name}"
            seen.add(name)
    assert {"baseline", "head_scan", "mlp_scan", "evaluations", "prune_scan"} <= seen


def test_run_id_depends_on_what_changes_rows_and_on_nothing_else():
    base = ("heads", {"scoring": "token", "dtype": "bfloat16"}, "weights", "prompts")
    assert run_id(*base) == run_id("heads", {"dtype": "bfloat16", "scoring": "token"}, "weights", "prompts")
    others = [
        ("mlps", *base[1:]),
        ("heads", {"scoring": "token", "dtype": "float32"}, "weights", "prompts"),
        ("heads", base[1], "other weights", "prompts"),
        ("heads", base[1], "weights", "other prompts"),
    ]
    ids = {run_id(*other) for other in others} | {run_id(*base)}
    assert len(ids) == 5
    assert all(len(name) == 12 and int(name, 16) >= 0 for name in ids)


def test_run_id_depends_on_the_result_format(monkeypatch):
    before = run_id("heads", {}, "weights", "prompts")
    monkeypatch.setattr("mathinterp.store.manifest.RESULT_FORMAT", 2)
    assert run_id("heads", {}, "weights", "prompts") != before


def test_dtype_makes_another_run_and_labels_do_not(store):
    first = open_run(store)
    assert open_run(store, dtype="bfloat16").run_id != first.run_id
    assert open_run(store, model="moved/m", prompts="other label").run_id == first.run_id
    assert first.record["parameters"] == {"scoring": "token", "dtype": "float32"}


def test_resume_asks_only_for_missing_shards(store):
    shards = [f"head_scan/{index:05d}" for index in range(3)]
    run = open_run(store, shards)
    assert run.missing_shards() == shards
    write_head(store, run.run_id, 1)
    run.note({"engine": "packed"})
    assert run.finish(errors={"head_scan/00002": "NaN in head 0.2", "head_scan/00001": "late"}) == [
        shards[0],
        shards[2],
    ]
    (row,) = store.rows("SELECT status, shards, shards_done, finished_at, errors FROM runs")
    assert row == {
        "status": "failed", "shards": 3, "shards_done": 1, "finished_at": None,
        "errors": '{"head_scan/00002":"NaN in head 0.2"}',
    }  # fmt: skip

    again = open_run(Store(store.url), shards)
    assert again.run_id == run.run_id
    assert again.missing_shards() == [shards[0], shards[2]]
    assert again.record["notes"] == {"engine": "packed"}
    assert again.record["started_at"] == run.record["started_at"]
    assert again.record["errors"] == {}
    write_head(store, run.run_id, 0)
    write_head(store, run.run_id, 2)
    assert again.finish(attempts={"head_scan/00002": 2}, hosts=["node-7"]) == []
    (row,) = store.rows(
        "SELECT status, shards_done, finished_at > started_at AS later, attempts, hosts, notes FROM runs"
    )
    assert (row["status"], row["shards_done"], row["later"]) == ("finished", 3, True)
    assert json.loads(row["attempts"]) == {"head_scan/00002": 2}
    assert json.loads(row["notes"]) == {"engine": "packed"}
    assert "node-7" in row["hosts"]
    assert len(row["hosts"]) == 2

    finished_at = again.record["finished_at"]
    third = open_run(store, shards)
    assert third.finish() == []
    assert third.record["finished_at"] == finished_at
    assert store.rows("SELECT count(*) AS n FROM head_scan") == [{"n": 9}]


def test_wall_seconds_add_up_over_sessions(tmp_path):
    for _ in range(2):
        run = open_run(Store(tmp_path))
        time.sleep(0.05)
        run.finish()
    assert 0.1 <= run.record["wall_seconds"] < 10


def test_code_versions_of_all_sessions_are_kept(tmp_path):
    for version in ("0.1.0", "0.2.0", "0.1.0"):
        open_run(Store(tmp_path), code_version=version)
    assert Store(tmp_path).rows("SELECT code_version FROM runs") == [{"code_version": "0.1.0, 0.2.0"}]


def test_another_cut_of_the_same_run_is_refused(store):
    open_run(store, ["head_scan/00000"])
    with pytest.raises(UserError, match=r"cut into other shards by version 0\.1\.0"):
        open_run(store, ["head_scan/00000", "head_scan/00001"])


def test_truncated_shard_is_named_left_out_and_overwritten(store, caplog):
    run = open_run(store, ["head_scan/00000", "head_scan/00001"])
    write_head(store, run.run_id, 0)
    write_head(store, run.run_id, 1)
    name = f"head_scan/run_id={run.run_id}/shard-00001.parquet"
    whole = store.files.read(name)
    store.files.write(name, whole[: len(whole) // 2])

    with caplog.at_level(logging.WARNING):
        assert store.finished_shards(run.run_id) == {"head_scan/00000"}
    assert any("shard-00001.parquet: truncated" in message for message in caplog.messages)
    assert len(store.problems) == 1
    assert store.rows("SELECT count(*) AS n FROM head_scan") == [{"n": 3}]
    assert store.rows("SELECT shards_done, status FROM runs") == [{"shards_done": 1, "status": "unfinished"}]

    write_head(store, run.run_id, 1)
    assert run.missing_shards() == []
    assert store.rows("SELECT count(*) AS n FROM head_scan") == [{"n": 6}]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"not parquet at all\n"])
def test_garbage_is_named_and_left_out(tmp_path, content):
    store = Store(tmp_path)
    run = open_run(store).run_id
    write_head(store, run, 0)
    (tmp_path / f"head_scan/run_id={run}/shard-00001.parquet").write_bytes(content)
    assert store.rows("SELECT count(*) AS n FROM head_scan") == [{"n": 3}]
    assert [problem for problem in store.problems if "shard-00001.parquet" in problem] == store.problems != []


def test_foreign_files_are_named_and_left_out(tmp_path):
    store = Store(tmp_path)
    run, other = open_run(store), open_run(store, dtype="bfloat16")
    path = Path(write_head(store, run.run_id, 0)["path"])
    folder = path.parent
    (tmp_path / f"head_scan/run_id={other.run_id}").mkdir()
    foreign = {
        tmp_path / f"head_scan/run_id={other.run_id}/shard-00000.parquet": path.read_bytes(),
        folder / "shard-00007.parquet": path.read_bytes(),
        folder / "copy of shard.parquet": path.read_bytes(),
        tmp_path / "head_scan/stray.parquet": path.read_bytes(),
    }
    for target, content in foreign.items():
        target.write_bytes(content)
    pq.write_table(head_rows(), folder / "shard-00008.parquet")
    pq.write_table(
        pa.table({"x": [1]}).replace_schema_metadata(pq.read_schema(path).metadata), folder / "shard-00009.parquet"
    )

    assert store.rows("SELECT count(*) AS n FROM head_scan") == [{"n": 3}]
    assert store.finished_shards(run.run_id) == {"head_scan/00000"}
    assert store.finished_shards(other.run_id) == set()
    named = "\n".join(store.problems)
    for target in [*foreign, folder / "shard-00008.parquet", folder / "shard-00009.parquet"]:
        assert f"{target}: " in named
    assert len(store.problems) == 6
    assert f"its footer says run_id '{run.run_id}', its place says '{other.run_id}'" in named


def test_columns_of_another_table_are_foreign(tmp_path):
    store = Store(tmp_path)
    run = open_run(store).run_id
    path = Path(write_head(store, run, 0)["path"])
    rows = pq.read_table(path)
    pq.write_table(rows.drop_columns("logit"), path)
    assert store.finished_shards(run) == set()
    assert "its columns are not those of head_scan" in store.problems[0]


def test_rows_without_a_run_record_are_named_and_left_out(tmp_path):
    store = Store(tmp_path)
    run = open_run(store).run_id
    write_head(store, run, 0)
    (tmp_path / f"runs/{run}.json").unlink()
    assert store.rows("SELECT count(*) AS n FROM head_scan") == [{"n": 0}]
    assert f"its run has no readable runs/{run}.json" in store.problems[0]


def test_broken_run_record_is_named_and_written_anew_by_the_same_run(store):
    run = open_run(store, ["head_scan/00000"])
    other = open_run(store, dtype="bfloat16")
    write_head(store, run.run_id, 0)
    store.files.write(f"runs/{run.run_id}.json", b'{"run_id": ')
    assert store.rows("SELECT run_id FROM runs") == [{"run_id": other.run_id}]
    assert f"runs/{run.run_id}.json: not a run's record" in store.problems[0]
    assert open_run(store, ["head_scan/00000"]).missing_shards() == []
    assert len(Store(store.url).rows("SELECT * FROM runs")) == 2


@pytest.mark.slow
def test_problem_files_are_inspected_once_per_version(tmp_path, monkeypatch):
    store = Store(tmp_path)
    run = open_run(store, [f"head_scan/{index:05d}" for index in range(3)]).run_id
    for index in range(3):
        write_head(store, run, index)
    store = Store(tmp_path)
    opened: list[str] = []
    open_file = store.files.open
    monkeypatch.setattr(store.files, "open", lambda name: opened.append(name) or open_file(name))
    store.finished_shards(run)
    store.connect()
    assert len([name for name in opened if name.endswith(".parquet")]) == 3
    write_head(store, run, 1, count=4)
    store.connect()
    assert len([name for name in opened if name.endswith(".parquet")]) == 4


def test_prompts_written_in_parts_are_those_written_at_once(tmp_path, monkeypatch):
    prompts = [prompt(str(number), carry=["memorize"] * (1 + number % 3)) for number in range(8)]
    whole, parts = Store(tmp_path / "whole"), Store(tmp_path / "parts")
    whole.write_prompts(FINGERPRINT, prompts)
    monkeypatch.setattr("mathinterp.store.store.PROMPTS_AT_ONCE", 3)
    parts.write_prompts(FINGERPRINT, prompts)
    for table, rows in (("prompts", 8), ("answer_tokens", 15)):
        [name] = parts.files.find(table, ".parquet")
        assert pq.ParquetFile(parts.files.open(name)).num_row_groups == 3
        found = [pq.read_table(store.files.open(name)) for store in (whole, parts)]
        assert found[0].num_rows == rows
        assert found[0].equals(found[1], check_metadata=True)


def test_prompts_are_written_once_and_repaired(store):
    prompts = [prompt("a", carry=("change-one", "memorize")), prompt("b", operation=None, operand_b=None)]
    store.write_prompts(FINGERPRINT, prompts)
    written = store.files.find("prompts", ".parquet")
    store.write_prompts(FINGERPRINT, prompts)
    assert store.files.find("prompts", ".parquet") == written
    store.files.write(next(iter(written)), b"PAR1")
    store.write_prompts(FINGERPRINT, prompts)
    assert store.rows("SELECT prompt_id, operation, operand_b FROM prompts ORDER BY 1") == [
        {"prompt_id": "a", "operation": "add", "operand_b": "12"},
        {"prompt_id": "b", "operation": None, "operand_b": None},
    ]
    tokens = store.rows("SELECT * EXCLUDE prompts_fingerprint FROM answer_tokens ORDER BY prompt_id, position")
    assert tokens[:2] == [
        {"prompt_id": "a", "position": 0, "token_id": 40, "token": "0", "kind": "digit", "carry_class": "change-one"},
        {"prompt_id": "a", "position": 1, "token_id": 41, "token": "1", "kind": "digit", "carry_class": "memorize"},
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_kill_in_the_middle_of_a_write_leaves_no_half_file(tmp_path, step):
    store = Store(tmp_path)
    run = open_run(store).run_id
    write_head(store, run, 0)
    before = Path(store.files.address(f"head_scan/run_id={run}/shard-00000.parquet")).read_bytes()
    code = f"""
import os, signal
from mathinterp.store import Store
from tests.small_store import write_head
store = Store({str(tmp_path)!r})
os.{step} = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
write_head(store, {run!r}, {{index}}, count=50_000)
"""
    for index in (0, 1):
        killed = subprocess.run([sys.executable, "-c", code.format(index=index)], cwd=Path(__file__).parents[1])
        assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / f"head_scan/run_id={run}"
    assert [path.name for path in folder.glob("*.parquet")] == ["shard-00000.parquet"]
    assert (folder / "shard-00000.parquet").read_bytes() == before
    assert store.finished_shards(run) == {"head_scan/00000"}
    assert store.problems == []

    assert len(list(folder.glob(".*.tmp"))) == 2
    open_run(store)
    assert list(folder.glob(".*.tmp")) == []


def test_resuming_deletes_temporary_files_that_no_living_writer_owns(tmp_path, monkeypatch):
    store = Store(tmp_path)
    run = open_run(store).run_id
    folder = tmp_path / f"head_scan/run_id={run}"
    folder.mkdir(parents=True)
    elsewhere, old = folder / f".a.node-7.{'0' * 32}.tmp", folder / f".a.node-7.{'1' * 32}.tmp"
    for path in (elsewhere, old):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    seen = []

    def look(*_: object) -> None:  # while one is written, another driver resumes the run
        monkeypatch.undo()
        open_run(Store(tmp_path))
        seen.extend(path.name for path in folder.glob(".*.tmp"))
        raise OSError(5, "stopped")

    monkeypatch.setattr("os.replace", look)
    with pytest.raises(OSError, match="stopped"):
        write_head(store, run)
    assert len(seen) == 2
    assert elsewhere.name in seen  # may belong to a living process of another machine
    assert [name for name in seen if name.startswith(".shard-00000.parquet.")] != []


def test_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    store = Store(tmp_path)
    run = open_run(store).run_id
    write_head(store, run, 0)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_head(store, run, 0, count=9)
    assert [path.name for path in (tmp_path / f"head_scan/run_id={run}").iterdir()] == ["shard-00000.parquet"]
    assert store.rows("SELECT count(*) AS n FROM head_scan") == [{"n": 3}]


@pytest.mark.slow
def test_two_drivers_of_one_run_corrupt_nothing(tmp_path):
    shards = [f"head_scan/{index:05d}" for index in range(3)]
    run = open_run(Store(tmp_path), shards).run_id
    for index in range(3):
        write_head(Store(tmp_path), run, index, count=2000)
    context = multiprocessing.get_context("spawn")
    drivers = [context.Process(target=drive, args=(str(tmp_path), shards, 2.0)) for _ in range(2)]
    for driver in drivers:
        driver.start()
    reader, looks = Store(tmp_path), 0
    while any(driver.is_alive() for driver in drivers):
        assert reader.finished_shards(run) == set(shards)
        assert json.loads((tmp_path / f"runs/{run}.json").read_text())["run_id"] == run
        looks += 1
    assert [driver.exitcode for driver in drivers] == [0, 0]
    assert looks > 3
    assert reader.problems == []
    (row,) = reader.rows("SELECT count(*) AS n, count(DISTINCT (head, prompt_id)) AS distinct_rows FROM head_scan")
    assert row == {"n": 6000, "distinct_rows": 6000}
    assert list(tmp_path.rglob("*.tmp")) == []
    assert (tmp_path / "views.sql").read_text() == reader.views_sql()


def test_store_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file; give a folder"):
        Store(tmp_path / "file")


def test_store_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"is not writable .*choose another `store`"):
        open_run(Store(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="is not writable"):
        open_run(Store("/proc/mathinterp"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_refused_for_writing_and_can_be_read(tmp_path):
    run = fill(Store(tmp_path), [prompt("a")], [{"prompt_id": "a"}])
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="is not writable"):
            open_run(Store(tmp_path))
        assert Store(tmp_path).rows("SELECT run_id FROM runs") == [{"run_id": run}]
    finally:
        tmp_path.chmod(0o700)


def test_unusable_urls_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"characters \* \? \[ \]"):
        Store(tmp_path / "results [old]")
    with pytest.raises(UserError, match="Protocol not known"):
        Store("nonsense://bucket/x")


def test_user_and_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Store("~/r").url == Store("r").url == Store(f"file://{tmp_path}/r").url == str(tmp_path.resolve() / "r")


def test_probe_leaves_nothing_behind(tmp_path):
    Store(tmp_path).check_writable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_query_makes_the_views_it_needs_and_no_others(tmp_path):
    needed = query.views_of("SELECT * FROM Head_Effects")
    assert {"head_effects", "head_scan", "baseline", "run_records"} <= set(needed)
    assert not {"path_effects", "neuron_scan"} & set(needed)
    everything = query.views_of("SHOW ALL TABLES")
    assert set(everything) == set(catalog().views)
    store = Store(tmp_path)
    for name in everything[::9]:  # each with what it reads alone
        assert store.rows(f"SELECT * FROM {name}") == []
    assert {row["name"] for row in store.rows("SHOW TABLES")} == set(everything)
    few = store.connect("head_effects")
    assert few.sql("SELECT count(*) FROM duckdb_views() WHERE NOT internal").fetchall() == [(len(needed),)]


def test_a_misspelt_view_gets_its_likely_name(tmp_path):
    with pytest.raises(UserError, match=r"head_efects does not exist.*Did you mean head_effects"):
        Store(tmp_path).rows("SELECT * FROM head_efects")
    with pytest.raises(UserError, match="without a query lists the views"):
        Store(tmp_path).rows("SELECT * FROM xyzzy")
