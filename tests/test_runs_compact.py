"""``runs compact``: the same rows in fewer files, also where it is killed at any step, meets readers or another."""

import json
import logging
import threading
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.errors import Unfinished, UserError
from mathinterp.store import Store
from mathinterp.store import compacting as module
from mathinterp.store.compacting import compact
from mathinterp.store.files import StoreFiles
from mathinterp.store.survey import COMPACTING
from mathinterp.store.writer import config_of
from tests.runs_case import FEW, PARAMETERS, SHARDS, killed_at, many_files, places, rows_of, steps_of
from tests.small_store import open_run


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return places(tmp_path)[request.param]


def again(place: str, shards: list[str] = SHARDS):
    """The run opened by the command that made it."""
    return open_run(Store(place), shards, parameters=PARAMETERS)


def parquet_files(place: str, table: str = "head_scan") -> list[str]:
    return [name.rpartition("/")[2] for name in Store(place).files.find(table, ".parquet")]


@pytest.mark.slow
def test_rows_their_order_checksums_and_provenance_stay(place: str) -> None:
    store, run = many_files(place)
    before, baseline = rows_of(store, run), rows_of(store, run, "baseline")
    own = {shard: store.read_shard(run, shard) for shard in SHARDS}
    done = store.runs.compact(run)
    assert (done.files_before, done.files_after) == (13, 2)
    assert parquet_files(place) == ["shard-00012.parquet"]
    assert parquet_files(place, "baseline") == ["shard-00000.parquet"]
    seen = Store(place)
    assert rows_of(seen, run) == before
    assert rows_of(seen, run, "baseline") == baseline
    assert seen.rows("SELECT shards, shards_done, status FROM runs") == [
        {"shards": 2, "shards_done": 2, "status": "finished"}
    ]
    for shard, rows in own.items():  # each of the experiment's own shards can still be read by its key
        found = seen.read_shard(run, shard)
        assert found.equals(rows), shard
        assert config_of(found) == config_of(rows), shard
    (checked,) = seen.check()
    assert (checked.intact, checked.unproved, checked.missing, seen.problems) == (2, 0, [], [])
    assert seen.runs.compact(run).files_after == 2  # nothing more to do


def test_the_command_that_made_it_still_finds_it_finished(place: str) -> None:
    store, run = many_files(place)
    finished_at = store.runs.record(run)["finished_at"]
    store.runs.compact(run)
    opened = again(place)
    assert opened.missing_shards() == []
    assert opened.done_shards() == set(SHARDS)
    assert opened.finish() == []
    record = Store(place).runs.record(run)
    assert record["finished_at"] == finished_at
    assert record["cut"] == SHARDS
    assert Store(place).runs.compact(run).files_after == 2
    with pytest.raises(UserError, match="cut into other shards"):
        open_run(Store(place), SHARDS[:-1], parameters=PARAMETERS)


@pytest.mark.slow
def test_a_merged_file_that_is_lost_is_computed_anew_shard_by_shard(tmp_path: Path) -> None:
    store, run = many_files(tmp_path)
    before = rows_of(store, run)
    own = {shard: store.read_shard(run, shard) for shard in SHARDS}
    store.runs.compact(run)
    path = next(Path(store.url).glob("head_scan/*/shard-00012.parquet"))
    whole = bytearray(path.read_bytes())
    whole[100] ^= 1
    path.write_bytes(whole)
    opened = again(str(tmp_path))
    assert opened.missing_shards() == SHARDS[1:]
    assert opened.record["shards"] == SHARDS
    for shard in SHARDS[1:]:
        table, index = shard.split("/")
        config = {"scan": "heads", "versions": {"source": index}}
        Store(tmp_path).write_shard(run, table, int(index), own[shard].replace_schema_metadata(), config)
    assert opened.finish() == []
    assert rows_of(Store(tmp_path), run) == before
    found = Store(tmp_path).runs.check()
    assert [fault.mend for fault in found.faults] == ["compact"]  # the damaged file is left: merging again replaces it
    assert Store(tmp_path).runs.compact(run).files_after == 2
    assert Store(tmp_path).runs.check().faults == []
    assert rows_of(Store(tmp_path), run) == before


@pytest.mark.slow
def test_merged_files_stay_below_a_size_and_tables_that_would_not_halve_stay(place: str) -> None:
    store, run = many_files(place)
    before = rows_of(store, run)
    size = sum(version.size for version in store.files.find("head_scan", ".parquet").values()) / 12
    compact(store, run, target_bytes=int(size * 1.5))
    assert len(parquet_files(place)) == 12
    compact(store, run, target_bytes=int(size * 4.5))
    assert parquet_files(place) == ["shard-00012.parquet", "shard-00013.parquet", "shard-00014.parquet"]
    assert rows_of(Store(place), run) == before
    compact(Store(place), run)  # merged files are merged again
    assert parquet_files(place) == ["shard-00015.parquet"]
    assert rows_of(Store(place), run) == before
    last = Store(place).read_shard(run, "head_scan/00011")
    assert config_of(last)["versions"] == {"source": "00011"}
    assert config_of(last)["shard"] == "head_scan/00011"
    assert set(last.column("head").to_pylist()) == {11}


@pytest.mark.slow
def test_killed_at_any_step_it_can_be_read_and_the_same_command_ends_it(tmp_path: Path, caplog) -> None:
    for kind in ("disk", "memory"):
        place = places(tmp_path / "count")[kind]
        store, run = many_files(place, FEW)
        before = rows_of(store, run)
        steps = steps_of(lambda: store.runs.compact(run))  # noqa: B023
        assert sum(step.startswith("remove ") for step in steps) == 5  # four files and the marker
        for step in range(len(steps)):
            place = places(tmp_path / str(step))[kind]
            _, run = many_files(place, FEW)
            with killed_at(step) as done:
                Store(place).runs.compact(run)
            assert done == steps[:step]
            caplog.clear()
            seen = Store(place)
            assert rows_of(seen, run) == before, steps[:step]
            assert seen.rows("SELECT status FROM runs") == [{"status": "finished"}]
            assert seen.problems == []
            interrupted = any(COMPACTING in each for each in steps[:step])
            ended = any(COMPACTING in each and each.startswith("remove") for each in steps[:step])
            mends = {fault.mend for fault in Store(place).runs.check().faults} - {"views"}  # these are written last
            assert mends == ({"compact"} if interrupted and not ended else set()), step
            assert again(place, FEW).missing_shards() == []  # a resume in this state takes the run as it is
            Store(place).runs.compact(run)
            assert rows_of(Store(place), run) == before
            assert parquet_files(place) == ["shard-00004.parquet"]
            assert Store(place).runs.check().faults == []


@pytest.mark.slow
def test_a_client_with_open_views_gets_an_error_and_never_a_row_twice(tmp_path: Path) -> None:
    _store, run = many_files(tmp_path, FEW)
    client = duckdb.connect()
    client.execute(Path(tmp_path, "views.sql").read_text())
    asked = f"SELECT head, prompt_id FROM head_scan WHERE run_id = '{run}' ORDER BY ALL"
    before, errors = client.execute(asked).fetchall(), []
    count = len(steps_of(lambda: many_files(tmp_path / "other", FEW)[0].runs.compact(run)))
    for step in range(count):
        with killed_at(step):
            Store(tmp_path).runs.compact(run)
        try:
            assert client.execute(asked).fetchall() == before, step
        except duckdb.Error as error:
            errors.append(str(error))
    assert errors
    Store(tmp_path).runs.compact(run)
    assert client.execute(asked).fetchall() == before  # the same patterns find the merged files
    fresh = duckdb.connect()
    fresh.execute(Path(tmp_path, "views.sql").read_text())
    assert fresh.execute(asked).fetchall() == before


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["listed", "queried"])
def test_whoever_reads_while_files_are_merged_sees_all_rows_once(place, moment, monkeypatch, caplog) -> None:
    store, run = many_files(place)
    before, reader, merged = rows_of(store, run), Store(place), []

    def merge_once(name: str) -> None:
        if not merged and name.startswith("head_scan"):
            merged.append(name)
            Store(place).runs.compact(run)

    if moment == "listed":  # after the records were listed, before or while result files are
        find = reader.files.find
        monkeypatch.setattr(reader.files, "find", lambda folder, suffix: merge_once(folder) or find(folder, suffix))
    else:  # after all was listed, before DuckDB opens a file
        survey = reader._surveyor.survey
        monkeypatch.setattr(reader._surveyor, "survey", lambda *asked: (survey(*asked), merge_once("head_scan"))[0])
    with caplog.at_level(logging.WARNING):
        assert rows_of(reader, run) == before
    assert merged
    assert caplog.messages == []


def test_records_read_after_files_were_listed_are_looked_at_again(place: str, monkeypatch) -> None:
    store, run = many_files(place)
    before, reader = rows_of(store, run), Store(place)
    read, merged = reader._surveyor._read_records, []

    def merge_first(listed):
        if not merged:
            merged.append(Store(place).runs.compact(run))
        return read(listed)

    monkeypatch.setattr(reader._surveyor, "_read_records", merge_first)
    assert rows_of(reader, run) == before
    assert reader.rows("SELECT status FROM runs") == [{"status": "finished"}]


def test_a_resume_that_reads_while_files_are_merged_keeps_the_merged_ones(place: str, monkeypatch) -> None:
    store, run = many_files(place)
    before, merged = rows_of(store, run), []
    opened = StoreFiles.open

    def merge_at_third(self: StoreFiles, name: str):
        if name.endswith("shard-00003.parquet") and not merged and threading.current_thread().name != "merging":
            merged.append(name)
            worker = threading.Thread(target=lambda: Store(place).runs.compact(run), name="merging")
            worker.start()
            worker.join()
        return opened(self, name)

    monkeypatch.setattr(StoreFiles, "open", merge_at_third)
    resumed = again(place)
    assert merged
    assert resumed.missing_shards() == []
    assert resumed.finish() == []
    assert rows_of(Store(place), run) == before
    assert parquet_files(place) == ["shard-00012.parquet"]


def test_a_driver_that_knew_the_run_before_keeps_how_it_is_cut_now(place: str) -> None:
    store, run = many_files(place)
    before, driver = rows_of(store, run), again(place)
    Store(place).runs.compact(run)
    driver.note({"late": True})
    assert driver.finish() == []
    record = Store(place).runs.record(run)
    assert record["notes"]["late"] is True
    assert record["shards"] == ["baseline/00000", "head_scan/00012"]
    assert rows_of(Store(place), run) == before


def test_a_driver_that_looks_at_files_while_they_are_merged_keeps_how_the_run_is_cut_now(place: str) -> None:
    """It listed the small files again, which were gone: all rows were left out, and the run had to be computed anew."""
    store, run = many_files(place)
    before, driver = rows_of(store, run), again(place)
    look, merged = driver._store.file_entries, []

    def meanwhile(record):
        found = look(record)
        if not merged:
            merged.append(Store(place).runs.compact(run))
        return found

    driver._store.file_entries = meanwhile
    assert driver.finish() == []
    assert Store(place).runs.record(run)["shards"] == ["baseline/00000", "head_scan/00012"]
    assert rows_of(Store(place), run) == before


@pytest.mark.slow
def test_two_at_once_merge_once(place: str, monkeypatch) -> None:
    store, run = many_files(place)
    before, inner = rows_of(store, run), []
    merge = module._merge

    def meanwhile(*arguments):
        if not inner:
            inner.append(True)
            Store(place).runs.compact(run)
        return merge(*arguments)

    monkeypatch.setattr(module, "_merge", meanwhile)
    with pytest.raises(Unfinished, match="another command"):
        store.runs.compact(run)
    assert rows_of(Store(place), run) == before
    Store(place).runs.compact(run)
    assert parquet_files(place) == ["shard-00012.parquet"]
    assert Store(place).runs.check().faults == []


def test_an_unfinished_run_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = open_run(store, SHARDS).run_id
    with pytest.raises(UserError, match=r"not finished \(0 of 13 shards"):
        store.runs.compact(run)
    store, run = many_files(tmp_path / "damaged")
    path = sorted(Path(store.url).glob("head_scan/*/shard-00005.parquet"))[0]
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="computes it anew"):
        Store(store.url).runs.compact(run)
    assert len(parquet_files(store.url)) == 13  # and the marker, as a merge that was not ended
    assert [fault.kind for fault in Store(store.url).runs.check().faults] == ["interrupted", "damaged", "stale"]


def test_the_footer_says_of_what_a_merged_file_was_made(tmp_path: Path) -> None:
    store, run = many_files(tmp_path)
    sums = {shard: entry["sha256"] for shard, entry in store.runs.record(run)["files"].items()}
    done = CliRunner().invoke(main, ["runs", "compact", run, "--store", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "13 files" in done.stdout
    footer = json.loads(pq.read_metadata(next(tmp_path.glob("head_scan/*/*.parquet"))).metadata[b"mathinterp"])
    assert footer["scan"] == "heads"
    assert [each["shard"] for each in footer["merged"]] == SHARDS[1:]
    assert [each["sha256"] for each in footer["merged"]] == [sums[shard] for shard in SHARDS[1:]]
    assert [each["versions"]["source"] for each in footer["merged"]] == [shard.split("/")[1] for shard in SHARDS[1:]]
