"""What made a row beside its inputs is recorded with it, and told when a run is resumed by something else."""

import importlib
import importlib.metadata
import json
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

import mathinterp
from mathinterp import versions
from mathinterp.cli.main import main
from mathinterp.cluster.dispatch import Outcome
from mathinterp.cluster.events import Receipt
from mathinterp.cluster.run import close_run
from mathinterp.experiments.heads import Heads
from mathinterp.store import Store
from tests.small_store import open_run, write_head

OLD = {"mathinterp": "0.1.0", "source": "aaaa", "transformers": "5.17.0", "torch": "2.11.0", "device": "cpu"}
NEW = {**OLD, "transformers": "5.24.0"}
SHARDS = ["head_scan/00000", "head_scan/00001"]


def test_versions_are_those_that_are_installed():
    found = versions.versions(["peft", "no-such-package"], "cpu")
    for name in ("transformers", "tokenizers", "peft"):
        assert found[name] == importlib.metadata.version(name)
    assert (found["torch"], found["mathinterp"], found["device"]) == (torch.__version__, mathinterp.__version__, "cpu")
    assert "no-such-package" not in found
    assert versions.versions().keys().isdisjoint({"peft", "device"})


def checkout(folder: Path) -> Path:
    """A checkout with a package of one file; returns the package."""
    package = folder / "mathinterp"
    package.mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return package


def fresh() -> None:
    """Forget what was found before."""
    versions.source_digest.cache_clear()
    versions.checkout.cache_clear()


def test_a_checkout_names_its_commit_and_whether_it_was_changed(tmp_path):
    package = checkout(tmp_path)
    commit = subprocess.check_output(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], text=True).strip()
    assert versions.checkout(package) == {"commit": commit, "dirty": "no"}
    (tmp_path / "notes.txt").write_text("not in the package")
    (package / "b.py").write_text("y = 2\n")
    fresh()
    assert versions.checkout(package) == {"commit": commit, "dirty": "yes"}
    shutil.rmtree(tmp_path / ".git")
    fresh()
    assert versions.checkout(package) == {}


def test_the_digest_is_of_the_source_files_wherever_they_lie(tmp_path):
    package = checkout(tmp_path / "one")
    copy = shutil.copytree(package, tmp_path / "other" / "mathinterp")
    (copy / "weights.safetensors").write_bytes(b"1")
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"1")
    assert versions.source_digest(copy) == versions.source_digest(package)
    for name, content in (("a.py", "x = 2\n"), ("b.py", ""), ("view.sql", "SELECT 1")):
        changed = shutil.copytree(package, tmp_path / name / "mathinterp")
        (changed / name).write_text(content)
        assert versions.source_digest(changed) != versions.source_digest(package)


def test_an_experiment_from_outside_has_its_own_source_among_the_versions(tmp_path, monkeypatch):
    """Else an edit of it would give back the rows of before, in silence."""
    assert versions.own_source(Heads) == {}
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lone_measure.py").write_text("class Lone: ...\n")
    package = tmp_path / "their_measure"
    package.mkdir()
    (package / "__init__.py").write_text("from their_measure.rows import FACTOR\nclass Theirs: ...\n")
    (package / "rows.py").write_text("FACTOR = 1\n")
    lone, theirs = importlib.import_module("lone_measure").Lone, importlib.import_module("their_measure").Theirs
    before = versions.own_source(lone), versions.own_source(theirs)
    assert [list(found) for found in before] == [["source of lone_measure"], ["source of their_measure"]]
    (tmp_path / "lone_measure.py").write_text("class Lone: ...\nFACTOR = 2\n")
    (package / "rows.py").write_text("FACTOR = 2\n")
    versions.source_digest.cache_clear()  # as in another process
    assert all(old != new for old, new in zip(before, map(versions.own_source, (lone, theirs)), strict=True))


def test_the_code_version_says_commit_or_files(monkeypatch):
    digest = versions.source_digest()
    said = {}
    for name, commit in (
        ("clean", {"commit": "0123456789abcdef", "dirty": "no"}),
        ("changed", {"commit": "0123456789abcdef", "dirty": "yes"}),
        ("installed", {}),
    ):
        monkeypatch.setattr(versions, "checkout", lambda commit=commit: commit)
        said[name] = versions.code_version().removeprefix(mathinterp.__version__)
    assert said == {
        "clean": "+git.0123456789ab",
        "changed": f"+git.0123456789ab.dirty.files.{digest}",
        "installed": f"+files.{digest}",
    }


def test_a_resume_by_other_versions_is_told_in_one_line_and_stored(tmp_path, caplog):
    store = Store(tmp_path)
    run = open_run(store, SHARDS, versions=OLD).run_id
    assert open_run(store, SHARDS, versions=NEW).record["versions"] == [NEW]  # nothing was made yet: not told
    assert open_run(store, SHARDS, versions=OLD).record["versions"] == [OLD]
    assert caplog.messages == []
    write_head(store, run, 0)
    changed = {**OLD, "torch": "2.13.0", "device": "cuda", "source": "bbbb"}
    resumed = open_run(store, SHARDS, versions=changed)
    assert resumed.run_id == run, "versions are no part of the run id"
    assert caplog.messages == [
        f"run {run}: shards made by mathinterp's source files aaaa and bbbb, torch 2.11.0 and 2.13.0, device cpu and "
        "cuda would mix; another `store` keeps them apart"
    ]
    assert resumed.record["versions"] == [OLD, changed]
    (stored,) = store.rows("SELECT versions FROM runs")
    assert json.loads(stored["versions"]) == [OLD, changed]


def test_a_finished_run_of_other_versions_is_told_too(tmp_path, caplog):
    store = Store(tmp_path)
    run = open_run(store, SHARDS, versions=OLD)
    for index in range(2):
        write_head(store, run.run_id, index)
    run.finish()
    open_run(store, SHARDS, versions=NEW)
    assert caplog.messages == [
        f"run {run.run_id}: made by other versions (transformers 5.17.0 and 5.24.0); another `store` computes it anew"
    ]


def test_the_same_versions_and_other_commits_of_the_same_files_are_not_told(tmp_path, caplog):
    store = Store(tmp_path)
    run = open_run(store, SHARDS, versions={**OLD, "commit": "1", "dirty": "yes"}).run_id
    write_head(store, run, 0)
    for here in ({**OLD, "commit": "2", "dirty": "no"}, OLD, {**OLD, "peft": "0.21"}):
        open_run(store, SHARDS, versions=here)
    assert caplog.messages == []


def test_a_run_from_before_versions_were_recorded_is_resumed(tmp_path):
    store = Store(tmp_path)
    run = open_run(store, SHARDS)
    record = {name: value for name, value in run.record.items() if name != "versions"}
    store.files.write(f"runs/{run.run_id}.json", json.dumps(record).encode())
    assert store.rows("SELECT versions FROM runs") == [{"versions": None}]
    assert open_run(store, SHARDS, versions=NEW).record["versions"] == [NEW]


def test_replicas_with_other_packages_than_the_driver_are_told(tmp_path, caplog):
    store = Store(tmp_path)
    run = open_run(store, SHARDS, versions=OLD)
    made = {SHARDS[0]: {**OLD, "gpu": "NVIDIA H200"}, SHARDS[1]: {**NEW, "gpu": "NVIDIA H200"}}
    for index in range(2):
        write_head(store, run.run_id, index)
    receipts = [Receipt(key, 3, 0.1, "node", 1, 1, 1, versions=found) for key, found in made.items()]
    close_run(run, Outcome(receipts=receipts))
    assert caplog.messages == [f"run {run.run_id}: its shards were made by transformers 5.17.0 and 5.24.0"]
    assert run.record["versions"] == list(made.values())


@pytest.mark.ray
def test_a_scan_stores_its_versions_in_the_record_and_in_each_file(tmp_path):
    store = tmp_path / "store"
    asked = ["scan", "heads", "--heads", "0.0", "--limit", "4", "--store", str(store), "--replicas", "1"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    here = versions.versions([], "cpu")
    record = json.loads(next((store / "runs").glob("*.json")).read_text())
    assert record["versions"] == [here]
    assert record["code_version"] == versions.code_version()
    files = list(store.glob("*/run_id=*/*.parquet"))
    assert len(files) >= 2
    for file in files:
        footer = json.loads(pq.read_metadata(file).metadata[b"mathinterp"])
        assert (footer["versions"], footer["code_version"]) == (here, versions.code_version())
    record["versions"] = [{**here, "tokenizers": "0.1"}]
    next((store / "runs").glob("*.json")).write_text(json.dumps(record))
    again = CliRunner().invoke(main, asked)
    assert again.stderr.count("warning: run") == 1
    assert f"made by other versions (tokenizers 0.1 and {here['tokenizers']}); another --store" in again.stderr
