"""The package as others get it: a wheel, installed where no checkout is in reach, holds all it needs to run."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import mathinterp as mi
from mathinterp.store import Store
from tests.installed import install
from tests.job_service import job_service

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "my_experiment"
SCAN = """
import sys
import torch
import mathinterp as mi

torch.set_num_threads(1)
heads, prompts = mi.experiments.Heads(layers="0"), mi.prompts("two_digit", limit=4)
run = mi.run(heads, mi.load("bundled"), prompts, store=sys.argv[1])
print(mi.__file__, run.id)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the installed package."""
    folder = tmp_path_factory.mktemp("site") / "wheel"
    install(ROOT, folder, ["mathinterp", "pyproject.toml", "README.md", "LICENSE"])
    return folder


def python(wheel: Path, *words: object) -> str:
    """What Python prints, run beside the wheel: -S leaves out what makes this checkout importable."""
    environment = {**os.environ, "PYTHONPATH": f"{wheel}{os.pathsep}{sysconfig.get_paths()['purelib']}"}
    command = [sys.executable, "-S", *map(str, words)]
    done = subprocess.run(command, env=environment, cwd=wheel.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_of(package: Path) -> set[str]:
    """Names of all files but those that Python makes."""
    files = {file.relative_to(package).as_posix() for file in package.rglob("*") if file.is_file()}
    return {name for name in files if "__pycache__" not in name}


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(wheel):
    found = files_of(wheel / "mathinterp")
    assert found == files_of(ROOT / "mathinterp")
    endings = (".sql", ".json", ".jsonl", ".yaml", ".html", ".safetensors", "/py.typed")
    assert all(any(f"/{name}".endswith(ending) for name in found) for ending in endings)


@pytest.mark.slow
def test_commands_run_from_the_wheel(wheel):
    program = wheel / "bin" / "mathinterp"
    assert "mathinterp scan heads" in python(wheel, program, "--help")
    assert "bundled" in python(wheel, program, "models")


@pytest.mark.bundled
def test_a_scan_from_the_wheel_has_the_rows_of_the_checkout_and_a_report(wheel, tmp_path):
    where, run_id = python(wheel, "-c", SCAN, tmp_path / "wheel").split()
    assert Path(where).is_relative_to(wheel)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        heads, prompts = mi.experiments.Heads(layers="0"), mi.prompts("two_digit", limit=4)
        here = mi.run(heads, mi.load("bundled"), prompts, store=tmp_path / "here")
    finally:
        torch.set_num_threads(threads)
    assert run_id == here.id
    stores = [Store(tmp_path / "wheel"), Store(tmp_path / "here")]
    for table in ("head_scan", "baseline", "head_effects"):
        ours, theirs = (store.rows(f"SELECT * FROM {table} ORDER BY ALL") for store in stores)
        assert ours == theirs
        assert ours
    python(wheel, wheel / "bin" / "mathinterp", "report", "--store", tmp_path / "wheel", "--out", tmp_path / "report")
    assert run_id in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


@pytest.mark.ray
@pytest.mark.own_ray
def test_the_wheel_submits_jobs_that_bring_it_along(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)  # of the cluster
    store, program = tmp_path / "store", wheel / "bin" / "mathinterp"
    options = ["--limit", 4, "--store", store]
    with job_service() as address:
        python(wheel, program, "submit", "head_scan", "--address", address, "--", *options, "--layers", "0")
        own = ["scan residual_norms:ResidualNorms", "--working-dir", EXAMPLE]
        said = python(wheel, program, "submit", *own, "--address", address, "--", *options)
    assert "It grows" in said
    runs = Store(store).rows("SELECT scan, status, code_version FROM runs ORDER BY scan")
    assert [(run["scan"], run["status"]) for run in runs] == [("heads", "finished"), ("residual_norms", "finished")]
    made_by = python(wheel, "-c", "from mathinterp.versions import code_version; print(code_version())").strip()
    assert "+files." in made_by  # a checkout would name its commit
    assert {run["code_version"] for run in runs} == {made_by}
    (counts,) = Store(store).rows(
        "SELECT (SELECT count(*) FROM head_scan) AS rows, (SELECT count(*) FROM baseline) AS tokens"
    )
    assert counts["rows"] == 8 * counts["tokens"] > 0
