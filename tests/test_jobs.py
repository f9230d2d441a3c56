"""The job scripts, submitted to a real head node: rows in the store, exit codes, what the log says."""

import io
import json
import re
import runpy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from ray.job_submission import JobSubmissionClient

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.cluster.submit import JOBS, submit
from mathinterp.store import Store

COMMANDS = {name: words.split() for name, words in JOBS.items()}
ROOT = Path(__file__).parents[1]


def run_job(address: str, name: str, arguments: list[str]) -> tuple[int, str, list[str]]:
    """Exit code, the job's log, and what the submitter was told, one after the other."""
    log, told = io.StringIO(), []
    code = submit(f"ray_jobs/{name}.py", arguments, address, output=log, announce=told.append)
    return code, log.getvalue(), told


@pytest.mark.parametrize("name", COMMANDS)
def test_every_job_is_its_command_on_the_cluster_it_runs_on(name, monkeypatch):
    given: list[list[str]] = []
    assert {file.stem for file in (ROOT / "ray_jobs").glob("*.py")} == set(JOBS)
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--json"])
    monkeypatch.setattr(main, "main", given.append)
    runpy.run_path(str(ROOT / "ray_jobs" / f"{name}.py"), run_name="__main__")
    monkeypatch.undo()
    assert given == [[*COMMANDS[name], "--address", "auto", "--json"]]
    shown = CliRunner().invoke(main, [*given[0], "--help"])
    assert shown.exit_code == 0
    assert f"{' '.join(COMMANDS[name])} [OPTIONS]" in shown.output


@pytest.mark.ray
@pytest.mark.own_ray
def test_the_head_scan_job_fills_the_store(job_address, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    url = str(tmp_path / "store")
    code, log, told = run_job(job_address, "head_scan", ["--limit", "8", "--layers", "0", "--store", url])
    assert code == 0, (told, log)
    store = Store(url)
    (run,) = store.rows("SELECT * FROM runs")
    assert (run["scan"], run["status"], run["shards_done"]) == ("heads", "finished", run["shards"])
    (counts,) = store.rows(
        "SELECT count(*) AS rows, count(DISTINCT prompt_id) AS prompts, min(layer) AS first, max(layer) AS last,"
        " count(DISTINCT head) AS heads FROM head_scan"
    )
    (baseline,) = store.rows("SELECT count(*) AS rows FROM baseline")
    assert (counts["prompts"], counts["first"], counts["last"]) == (8, 0, 0)
    assert counts["rows"] == counts["heads"] * baseline["rows"] > 0
    told_rows = re.search(rf"Run {run['run_id']}: ([\d,]+) rows in .* on 1 cpu replica", log)
    assert told_rows, log
    assert int(told_rows[1].replace(",", "")) == counts["rows"] + baseline["rows"]


NORMS = """
from dataclasses import dataclass
from typing import ClassVar

from mathinterp.experiments.heads import Heads


@dataclass(frozen=True)
class Sent(Heads):
    \"\"\"Heads under another name, from the folder of the one who submits.\"\"\"

    name: ClassVar[str] = "sent"
"""


@pytest.mark.ray
@pytest.mark.own_ray
def test_prompts_and_experiment_of_the_current_folder_go_with_the_job(job_address, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    mine, url = tmp_path / "mine", str(tmp_path / "store")
    (mine / "data").mkdir(parents=True)
    (mine / "sent.py").write_text(NORMS)
    lines = [{"text": f"{n} plus 5 is", "answer": str(n + 5), "operation": "add"} for n in range(20, 24)]
    (mine / "data" / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(mine)
    log, told = io.StringIO(), []
    words = ["--prompts", "data/words.jsonl", "--layers", "0", "--store", url]
    code = submit("scan sent:Sent", words, job_address, output=log, announce=told.append)
    assert code == 0, (told, log.getvalue())
    assert "uploaded with data/words.jsonl, sent.py" in told[0]
    assert told[0].startswith("job scan-sent-Sent-")
    store = Store(url)
    assert [row["scan"] for row in store.rows("SELECT scan FROM runs")] == ["sent"]
    assert [row["text"] for row in store.rows("SELECT text FROM prompts ORDER BY text")] == [x["text"] for x in lines]
    (run,) = store.runs.list()
    assert store.runs.show(run.run_id).command == f"mathinterp scan sent {' '.join(words)}"


@pytest.mark.ray
@pytest.mark.own_ray
def test_a_bad_argument_fails_the_job_with_one_line(job_address, tmp_path):
    store = tmp_path / "store"
    code, log, told = run_job(job_address, "head_scan", ["--layers", "0", "--ablation", "half", "--store", str(store)])
    assert code == 2
    assert "exit code 2" in told[-1]
    (line,) = [line for line in log.splitlines() if line.startswith("mathinterp: ")]
    assert "half" in line
    assert "Traceback" not in log
    assert not store.exists()


@pytest.mark.ray
@pytest.mark.own_ray
def test_a_stopped_job_leaves_no_process_and_the_same_command_goes_on(job_address, tmp_path, monkeypatch):
    """`ray job stop` in the middle of a scan, of 5 shards."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    url, limit, told = str(tmp_path / "store"), 100, []
    words = ["--limit", str(limit), "--store", url]
    log = io.StringIO()
    job = partial(submit, "scan heads", words, job_address, output=log, announce=told.append, name="to-be-stopped")
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(job)
        until(lambda: running.done() or shard_files(url))
        assert not running.done(), (told, log.getvalue())
        driver, replicas = processes_of_the_job(url)
        assert JobSubmissionClient(job_address).stop_job("to-be-stopped")
        assert running.result(60) == 1
    assert "job to-be-stopped stopped" in told[-1]
    assert "the same command goes on" in log.getvalue()
    assert psutil.wait_procs([*driver, *replicas], timeout=30)[1] == []
    (run,) = Store(url).rows("SELECT status, shards, shards_done FROM runs")
    assert run["status"] != "finished"
    there = shard_files(url)
    assert 0 < len(there) < run["shards"] == 5
    code, log, told = run_job(job_address, "head_scan", words)
    assert code == 0, (told, log)
    assert there.items() <= shard_files(url).items(), "nothing is computed twice"
    undisturbed = str(tmp_path / "undisturbed")
    mi.run(mi.experiments.Heads(), mi.load("bundled"), mi.prompts("two_digit", limit=limit), store=undisturbed)
    for table in ("head_scan", "baseline"):
        found, wanted = (Store(place).arrow(f"SELECT * FROM {table} ORDER BY ALL") for place in (url, undisturbed))
        assert found.equals(wanted)


def until(true: Callable[[], Any], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def shard_files(url: str) -> dict[str, int]:
    """The files of shards that a run has, and when each was written."""
    return {str(file): file.stat().st_mtime_ns for file in Path(url).glob("*/run_id=*/shard-*.parquet")}


def processes_of_the_job(url: str) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Those of the driver whose store this is, and the replicas on its Ray."""
    shown = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    drivers = [process for process, words in shown if url in " ".join(words)]
    assert drivers
    ray = f"--gcs-address={drivers[-1].environ()['RAY_ADDRESS']}"
    (raylet,) = [process for process, words in shown if ray in words and words[0].endswith("/raylet")]
    replicas = [child for child in raylet.children() if "Replica" in " ".join(child.cmdline())]
    assert replicas
    return drivers, replicas


@pytest.mark.ray
@pytest.mark.own_ray
def test_the_fine_tuning_job_trains(job_address, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data, out, url = tmp_path / "data.jsonl", tmp_path / "tuned", str(tmp_path / "store")
    lines = [{"text": f"{n} plus 5 is", "answer": str(n + 5), "operation": "add"} for n in range(20, 28)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--heads", "0.6", "--data", str(data), "--out", str(out), "--store", url, "--json"]
    words += ["--steps", "2", "--batch", "4", "--log-every", "1"]
    code, log, told = run_job(job_address, "precise_sft", words)
    assert code == 0, (told, log)
    (run,) = Store(url).rows("SELECT * FROM runs")
    assert (run["scan"], run["status"]) == ("tune_precise", "finished")
    assert [row["step"] for row in Store(url).rows("SELECT step FROM tuning_runs ORDER BY step")] == [1, 2]
    assert (out / "adapter_model.safetensors").is_file()
    assert '"trained_now": true' in log


@pytest.mark.ray
@pytest.mark.own_ray
def test_results_in_the_folder_that_ray_deletes_are_refused(job_address, tmp_path):
    code, log, told = run_job(job_address, "lora_sweep", ["--store", str(tmp_path / "store"), "--out", "swept"])
    assert code == 2
    assert "exit code 2" in told[-1]
    (line,) = [line for line in log.splitlines() if line.startswith("mathinterp: ")]
    assert "--out 'swept' is in the folder that Ray unpacked for this job and deletes after it" in line
