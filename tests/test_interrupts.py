"""Ctrl-C and SIGTERM at any moment: one line, exit code 130 or 143, and the same command goes on."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mathinterp.cli.interrupt import NATIVE
from mathinterp.cluster import submit as submitting
from mathinterp.store import Store

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
LINE = "mathinterp: interrupted; the same command goes on from here"


def start(*words: str) -> subprocess.Popen:
    """The program, from the moment on when it handles signals."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mathinterp", *words], cwd=Path(__file__).parents[1], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while process.poll() is None and not caught(process.pid) >> (signal.SIGTERM - 1) & 1:
        time.sleep(0.002)
    return process


def caught(pid: int) -> int:
    """The signals that a process has handlers for, as bits."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)


def interrupted(process: subprocess.Popen, number: signal.Signals) -> None:
    """Send the signal; the process ends within half a minute, in one line."""
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    ended(process, number, said)


def ended(process: subprocess.Popen, number: signal.Signals, said: str) -> None:
    """By the signal, in one line."""
    assert process.returncode == CODES[number], said
    assert "Traceback" not in said
    assert said.replace("\r", "").strip().splitlines()[-1] == LINE
    assert not any(word in said for word in ("Aborted", "Segmentation", "Fatal", "Exception ignored"))


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5, 1.0, 2.0])
def test_while_modules_are_imported(number, seconds, tmp_path):
    process = start("scan", "heads", "--limit", "2000", "--store", str(tmp_path), "--address", "nowhere")
    time.sleep(seconds)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    if "--address nowhere" in said:  # it had told by then that there is no such address, and ended or was about to
        assert process.returncode in (2, CODES[number], -number)
        return
    ended(process, number, said)


@pytest.mark.ray
@pytest.mark.parametrize("number", CODES)
def test_in_the_middle_of_a_scan_which_then_goes_on(number, tmp_path):
    words = ["scan", "heads", "--limit", "40", "--store", str(tmp_path), "--replicas", "1"]
    process = start(*words)
    while process.poll() is None and not list(tmp_path.glob("head_scan/*/shard-*.parquet")):
        time.sleep(0.05)
    interrupted(process, number)
    (run,) = Store(tmp_path).rows("SELECT shards, shards_done, status FROM runs")
    assert 0 < run["shards_done"] < run["shards"]


def test_a_second_signal_ends_it_at_once():
    code = (
        "import time; from mathinterp.cli import interrupt\n"
        "interrupt.install()\n"
        "with interrupt.unwinding():\n"
        "    try:\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('closing', flush=True)\n"
        "        time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not caught(process.pid) >> (signal.SIGTERM - 1) & 1:
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "closing\n"
    interrupted(process, signal.SIGINT)


@pytest.mark.parametrize(("number", "package"), zip([*CODES] * 4, NATIVE, strict=True))
def test_nothing_is_raised_into_the_import_of_native_code(number, package, tmp_path):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / "part.py").write_text(
        f"import os, signal\ntry:\n    os.kill(os.getpid(), {int(number)})\n    sum(range(10**7))\n"
        "finally:\n    print('raised', flush=True)\n"
    )
    code = (
        "from mathinterp.cli import interrupt\ninterrupt.install()\nwith interrupt.unwinding():\n    import {}.part\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code.format(package)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout) == (CODES[number], "")
    assert done.stderr.strip() == LINE


@pytest.mark.slow
def test_one_that_cannot_be_unwound_is_ended():
    code = (
        "from mathinterp.cli import interrupt\n"
        "interrupt.PATIENCE = 1.0\n"
        "interrupt.install()\n"
        "with interrupt.unwinding():\n"
        "    print('on', flush=True)\n"
        "    while True:\n"
        "        try:\n"
        "            sum(range(10**6))\n"
        "        except BaseException:\n"
        "            pass\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "on\n"
    interrupted(process, signal.SIGTERM)


def test_ctrl_c_of_submit_says_that_the_job_goes_on(tmp_path, monkeypatch):
    class Client:
        def submit_job(self, **options):
            jobs.append(options["submission_id"])

        def tail_job_logs(self, job):
            raise KeyboardInterrupt

    jobs: list[str] = []

    (tmp_path / "job.py").touch()
    monkeypatch.setattr(submitting, "JobSubmissionClient", lambda address: Client())
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        submitting.submit(
            "job.py", [], "http://127.0.0.1:1", output=io.StringIO(), announce=said.append, working_dir=tmp_path
        )
    [job] = jobs
    assert said[-1].startswith(f"job {job} goes on; to stop it: ray job stop {job} --address http://127.0.0.1:1")
