"""The head scan's job script, submitted to a real head node: rows in the store, exit codes, what the log says."""

import io
import re

import pytest

from mathinterp.cluster.submit import submit
from mathinterp.store import Store
from tests.job_service import job_service

pytestmark = pytest.mark.ray

SCRIPT = "ray_jobs/head_scan.py"


@pytest.fixture(scope="module")
def address():
    with job_service() as running:
        yield running


def run_job(address: str, arguments: list[str]) -> tuple[int, str, list[str]]:
    """Exit code, the job's log, and what the submitter was told, one after the other."""
    log, told = io.StringIO(), []
    code = submit(SCRIPT, arguments, address, output=log, announce=told.append)
    return code, log.getvalue(), told


def test_the_head_scan_job_fills_the_store(address, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    url = str(tmp_path / "store")
    code, log, told = run_job(address, ["--limit", "8", "--layers", "0", "--store", url])
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


def test_a_bad_argument_fails_the_job_with_one_line(address, tmp_path):
    store = tmp_path / "store"
    code, log, told = run_job(address, ["--layers", "0", "--ablation", "half", "--store", str(store)])
    assert code == 1
    assert "exit code 2" in told[-1]
    (line,) = [line for line in log.splitlines() if line.startswith("mathinterp: ")]
    assert "half" in line
    assert "Traceback" not in log
    assert not store.exists()
