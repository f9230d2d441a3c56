"""Faults of a store that ``runs check`` names, and what is printed beside them: typed, it mends."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.store import Store
from mathinterp.store.files import StoreFiles
from mathinterp.store.manifest import file_of
from mathinterp.store.writer import FOOTER_KEY
from tests.runs_case import FEW, killed_at, many_files
from tests.small_store import FINGERPRINT, fill
from tests.stability_case import HEADS, made_prompts

PROMPTS = f"prompts/prompts_fingerprint={FINGERPRINT}/prompts.parquet"


def command(*words: str | Path):
    return CliRunner().invoke(main, [*map(str, words)])


def mends(place: Path, *more: str) -> dict[str, str]:
    """File -> what to type, of all that ``runs check`` prints."""
    lines = [line for line in command("runs", "check", "--store", place, *more).stdout.splitlines() if "Mend: " in line]
    return {line.split(": ")[1].partition(" (")[0]: line.split("Mend: ")[1] for line in lines}


def typed(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "mathinterp":
        done = command(*words[1:], *(["--yes"] if words[1:3] == ["runs", "delete"] else []))
        assert done.exit_code == 0, done.output
    else:
        subprocess.run(line, shell=True, check=True)


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_what_is_of_no_run_is_removed(tmp_path: Path) -> None:
    """Copies and notes beside records, folders of no run, prompts of runs that are gone."""
    place = tmp_path / "a b's"
    _, run = many_files(place, FEW)
    _, gone = many_files(place, ["baseline/00000"], prompts_fingerprint="feedbeef00000001")
    (place / "runs" / f"{gone}.json").write_text("{")
    typed(f"mathinterp runs delete {gone} --store {shlex.quote(str(place))}")  # whose prompts nobody knows
    shutil.copy(place / "runs" / f"{run}.json", place / "runs" / f"{run} (copy).json")
    (place / "runs" / "notes.json").write_text("{}")
    (place / "head_scan" / "run_id=mine").mkdir()
    shutil.copy(place / file_of(run, "head_scan/00000"), place / "head_scan" / "run_id=mine" / "shard-00000.parquet")
    damage(place / PROMPTS.replace(FINGERPRINT, "feedbeef00000001"))
    assert mends(place, "--runs", run) == {}, "of other runs"
    for line in mends(place).values():
        typed(line)
    assert mends(place) == {}
    assert Store(place).rows("SELECT count(*) AS n FROM head_scan") == [{"n": 14}]


def test_damaged_prompts_are_named_for_each_run_that_has_them(tmp_path: Path) -> None:
    runs = [many_files(tmp_path, FEW, model_fingerprint=each)[1] for each in ("1", "2")]
    damage(tmp_path / PROMPTS)
    for run in runs:
        done = command("runs", "check", "--store", tmp_path, "--runs", run)
        assert done.exit_code == 1
        assert f"Mend: the command that made run {run}, again" in done.stdout


def test_the_fault_of_another_run_is_not_that_of_the_one_that_was_asked_for(tmp_path: Path) -> None:
    _, run = many_files(tmp_path, FEW)
    (tmp_path / "runs" / "0123456789ab.json").write_text("{")
    assert command("runs", "check", "--store", tmp_path).exit_code == 1
    assert command("runs", "check", "--store", tmp_path, "--runs", run).exit_code == 0


def test_a_merge_of_a_run_whose_record_is_gone_ends_with_its_files(tmp_path: Path) -> None:
    store, run = many_files(tmp_path, FEW)
    with killed_at(2):
        store.runs.compact(run)
    (tmp_path / "runs" / f"{run}.json").unlink()
    for line in dict.fromkeys(mends(tmp_path).values()):
        typed(line)
    assert not list(tmp_path.rglob(f"run_id={run}"))


def test_temporary_files_of_prompts_are_named(tmp_path: Path) -> None:
    _, run = many_files(tmp_path, FEW)
    left = (tmp_path / PROMPTS).with_name(f".prompts.parquet.{os.uname().nodename}.{'0' * 32}.tmp")
    left.write_bytes(b"half")
    assert [*mends(tmp_path)] == [*mends(tmp_path, "--runs", run)] == [str(left.relative_to(tmp_path))]
    typed(mends(tmp_path)[str(left.relative_to(tmp_path))])
    assert mends(tmp_path) == {}


def test_a_folder_that_cannot_be_listed_is_to_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_files(tmp_path, FEW)
    own = StoreFiles._list

    def refused(self: StoreFiles, folder: str, found: dict) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if folder.startswith("head_scan/"):
                patch.setattr(
                    os, "scandir", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
                )
            own(self, folder, found)

    monkeypatch.setattr(StoreFiles, "_list", refused)
    (line,) = {each for name, each in mends(tmp_path).items() if name.count("/") == 1}
    assert line.startswith(f"give this user the right to read {tmp_path}/head_scan/run_id=")


def test_shards_of_experiments_that_are_not_installed_are_checked_by_their_bytes(tmp_path: Path) -> None:
    store, run = many_files(tmp_path, FEW)
    name = tmp_path / "runs" / f"{run}.json"
    record = json.loads(name.read_text())
    (file := tmp_path / file_of(run, "mine/00000")).parent.mkdir(parents=True)
    footer = {FOOTER_KEY: json.dumps({"run_id": run, "shard": "mine/00000", "rows": 1}).encode()}
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(footer), file)
    content = file.read_bytes()
    entry = {"rows": 1, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    record |= {"shards": [*record["shards"], "mine/00000"], "files": {**record["files"], "mine/00000": entry}}
    name.write_text(json.dumps(record))
    store.write_views()
    checked = Store(tmp_path).runs.check()
    assert checked.faults == []
    assert [(each.shards, each.intact, each.missing) for each in checked.runs] == [(6, 6, [])]
    other = many_files(tmp_path, FEW, model_fingerprint="other")[1]
    found = Store(tmp_path).runs.compare(run, other)
    assert (found.incomplete, found.same_rows, found.skipped) == ((None, None), None, ["mine"])
    damage(file)
    assert [(each.file, each.kind) for each in Store(tmp_path).runs.check().faults] == [
        (str(file.relative_to(tmp_path)), "damaged")
    ]
    file.unlink()
    assert [each.kind for each in Store(tmp_path).runs.check().faults] == ["missing"]


def test_runs_that_are_deleted_together_show_that_their_prompts_go(tmp_path: Path) -> None:
    runs = [many_files(tmp_path, FEW, model_fingerprint=each)[1] for each in ("1", "2")]
    planned = command("runs", "delete", *runs, "--store", tmp_path, "--yes").stdout.splitlines()
    assert f"stay: run {runs[1]} has the same prompts" in planned[2]
    assert "go too (4 files)" in planned[3]
    assert sum(int(line.split()[3]) for line in planned[2:4]) == int(planned[4].split()[1])


@pytest.mark.slow
def test_a_computation_of_the_latest_ranking_is_mended_by_a_command_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ranking is the latest changes with each scan."""
    store, prompts = Store(tmp_path), made_prompts()
    scored = [{"prompt_id": each.prompt.prompt_id, "position": i} for each in prompts for i in range(len(each.scored))]
    heads = [{**row, "layer": layer, "head": head} for layer, head in HEADS for row in scored]
    runs = []
    for number in range(2):
        runs.append(fill(store, prompts, scored, heads, model_fingerprint=f"w{number}"))
        if number == 0:
            monkeypatch.setattr("sys.argv", ["mathinterp", "stability", "--draws", "20", "--store", str(tmp_path)])
            assert command("stability", "--draws", "20", "--store", tmp_path).exit_code == 0
            monkeypatch.setattr("sys.argv", ["pytest"])
    damaged = next(tmp_path.glob("stability_nodes/*/*.parquet"))
    damage(damaged)
    line = mends(tmp_path)[str(damaged.relative_to(tmp_path))]
    assert line.startswith(f"mathinterp stability --draws 20 --run {runs[0]} --store ")
    typed(line)
    assert command("check", "--store", tmp_path).exit_code == 0
