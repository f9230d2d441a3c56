"""Records and caches that are JSON but not what a run wrote: named and left out by every reader, never a traceback."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.store import Store
from mathinterp.store.files import StoreFailed
from mathinterp.store.manifest import read_record
from tests.runs_case import FEW, many_files
from tests.small_store import fill, open_run, prompt

DEEP = json.loads("[" * 600 + "]" * 600)
ODD: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("no finished_at", lambda record: record.pop("finished_at")),
    ("a time of nowhere", lambda record: record.update(started_at="2026-01-01T00:00:00")),
    ("a date", lambda record: record.update(finished_at="2026-01-01")),
    ("errors that are no text", lambda record: record.update(errors={"head_scan/00001": 5})),
    ("attempts that are no count", lambda record: record.update(attempts={"head_scan/00001": []})),
    ("versions that name nothing", lambda record: record.update(versions=[["torch"]])),
    ("a version that is a list", lambda record: record.update(versions=[{"torch": []}])),
    ("a command that is no text", lambda record: record.update(command=["rm"])),
    ("seconds that are true", lambda record: record.update(wall_seconds=True)),
    ("seconds before nothing", lambda record: record.update(wall_seconds=-1)),
    ("a note in another form", lambda record: record["notes"].update(model_loaded_at="now")),
    ("a note of nodes that are none", lambda record: record["notes"].update(memory_ran_out=[[]])),
    ("a note of half a character", lambda record: record["notes"].update(x="\ud800")),
    ("notes nested too deep", lambda record: record["notes"].update(x=DEEP)),
    ("fewer rows than none", lambda record: record["files"]["head_scan/00001"].update(rows=-1)),
    ("more bytes than there are", lambda record: record["files"]["head_scan/00001"].update(bytes=10**400)),
    ("a shard above the store", lambda record: record["shards"].append("../00000")),
    ("a shard in other digits", lambda record: record["shards"].append("head_scan/٠٠٠٠٠")),
]  # fmt: skip


def command(*words: object) -> tuple[int, str]:
    """Exit code and what was told; a traceback fails the test."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
    return done.exit_code, done.output


@pytest.mark.parametrize(("change"), [change for _, change in ODD], ids=[name for name, _ in ODD])
def test_a_record_that_no_run_wrote_is_named_and_left_out(tmp_path: Path, change: Callable[[dict[str, Any]], Any]):
    store, run = many_files(tmp_path / "store", FEW)
    fill(store, [prompt("1")], [{"prompt_id": "1"}], model_fingerprint="other")
    path = tmp_path / "store" / "runs" / f"{run}.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"not the record|nested|surrogates|another|Exceeds"):
        read_record(Store(store.url).files, run)
    for words in (["list"], ["show", run], ["check"], ["compact", run]):
        _, told = command("runs", *words, "--store", store.url)
        assert run in told
    rows = Store(store.url).rows("SELECT count(DISTINCT run_id) AS n FROM baseline")
    assert rows == [{"n": 1}]
    resumed = open_run(Store(store.url), FEW)  # its own command writes it anew
    assert resumed.run_id == run
    assert resumed.missing_shards() == []
    path.write_text(json.dumps(record))
    assert command("runs", "delete", run, "--yes", "--force", "--store", store.url)[0] == 0
    assert not path.exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_a_record_that_is_no_file_is_named_by_every_reader(tmp_path: Path, kind: str) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    path = tmp_path / "store" / "runs" / f"{run}.json"
    path.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "loop": lambda place: os.symlink(place.name, place)}[kind](path)
    for words in (["list"], ["show", run], ["compare", run, run], ["check"], ["compact", run]):
        code, told = command("runs", *words, "--store", store.url)
        assert code == (0 if words == ["list"] else 2 if run in words else 1) or kind == "folder", told
    assert Store(store.url).record(run) is None


def test_a_store_that_became_a_file_ends_a_run_in_one_line(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    run = open_run(store, FEW)
    os.rename(tmp_path / "store", tmp_path / "away")
    (tmp_path / "store").write_text("x")
    for close in (lambda: run.note({"a": 1}), run.finish):
        with pytest.raises(StoreFailed, match="cannot be written"):
            close()


def test_numbers_beyond_what_json_can_say_again_are_refused(tmp_path: Path) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    path = tmp_path / "store" / "runs" / f"{run}.json"
    path.write_text(path.read_text().replace('"notes": {', '"notes": {"x": 1e999,'))
    with pytest.raises(ValueError, match="inf is not a finite number"):
        read_record(store.files, run)


def test_a_run_of_a_clock_that_was_ahead_is_listed(tmp_path: Path) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    path = tmp_path / "store" / "runs" / f"{run}.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "started_at": "2222-01-01T00:00:00Z", "errors": {"head_scan/00001": ""}}))
    for words in (["list"], ["show", run]):
        code, told = command("runs", *words, "--store", store.url)
        assert code == 0
        assert "-" not in told.split("2222-01-01 00:00")[1].split("\n")[0].split("  ")[1]


@pytest.mark.parametrize("place", [2, 3])
@pytest.mark.parametrize("value", [5, [], {}, "5", True, 1.5])
def test_what_a_cache_says_in_another_form_is_looked_up_in_the_files(tmp_path: Path, place: int, value: Any) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    store.look()
    store._surveyor.keep()
    cache = tmp_path / "store" / "inspected.json"
    kept = json.loads(cache.read_text())
    for each in kept["head_scan"]["files"].values():
        each[place] = value
    cache.write_text(json.dumps(kept))
    code, told = command("runs", "show", run, "--store", store.url)
    assert code == 0
    assert "finished" in told or (place, value) == (2, "5")  # a fault that it says is believed, and named


def test_a_merge_removes_nothing_outside_the_store(tmp_path: Path) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    store.runs.compact(run)
    outside = tmp_path / f"run_id={run}" / "shard-00001.parquet"
    outside.parent.mkdir()
    outside.write_bytes(b"mine")
    path = tmp_path / "store" / "runs" / f"{run}.json"
    record = json.loads(path.read_text())
    [(key, held)] = [(key, held) for key, held in record["compacted"].items() if len(held) > 1][:1]
    first = next(iter(held))
    record["compacted"][key] = {"../00001" if shard == first else shard: rows for shard, rows in held.items()}
    record["cut"] = ["../00001" if shard == first else shard for shard in record["cut"]]
    path.write_text(json.dumps(record))
    code, _ = command("runs", "compact", run, "--store", store.url)
    assert outside.read_bytes() == b"mine"
    assert code == 2
    assert os.listdir(tmp_path / f"run_id={run}") == ["shard-00001.parquet"]
