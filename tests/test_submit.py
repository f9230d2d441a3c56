"""Submitting jobs: the upload is measured first, the log streamed, the exit code returned; on a real head node."""

import io
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient

from mathinterp.cluster import submit as submitting
from mathinterp.cluster.submit import checkout, measure_upload, submit
from mathinterp.errors import UserError

SCRIPT = """
import os, sys
import helper, mathinterp_marker
print("arguments", sys.argv[1:])
print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))
print("where", helper.WHERE)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def project(tmp_path) -> Path:
    """A small working directory: a script, a module beside it, and things that must not be uploaded."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.py").write_text(SCRIPT)
    (tmp_path / "jobs" / "helper.py").write_text("WHERE = 'beside the script'\n")
    (tmp_path / "mathinterp_marker.py").write_text("")
    (tmp_path / ".gitignore").write_text("results/\n")
    for hidden in ("results/rows.bin", ".git/objects.bin", ".env", "pkg/__pycache__/x.pyc"):
        (tmp_path / hidden).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / hidden).write_bytes(random.Random(0).randbytes(2**20))
    return tmp_path


def test_the_upload_is_what_ignore_files_leave(project):
    upload = measure_upload(project)
    assert {name for name, _ in upload.files} == {"jobs/job.py", "jobs/helper.py", "mathinterp_marker.py"}
    assert upload.bytes < 2000
    upload.check()


def test_an_upload_too_large_names_its_largest_files_and_submits_nothing(project, monkeypatch):
    monkeypatch.setattr(submitting, "UPLOAD_LIMIT", 3 * 2**20)
    (project / "weights.bin").write_bytes(random.Random(1).randbytes(3 * 2**20))
    (project / "data.bin").write_bytes(random.Random(2).randbytes(2**20))
    with pytest.raises(
        UserError, match=r"4\.0 MiB.*less than 3\.0 MiB.*weights\.bin \(3\.0 MiB\), data\.bin \(1\.0 MiB\)"
    ):
        submit("jobs/job.py", [], "http://127.0.0.1:1", working_dir=project)


def test_the_projects_own_upload_is_small_enough():
    upload = measure_upload(checkout())
    upload.check()
    names = {name for name, _ in upload.files}
    assert "mathinterp/cluster/run.py" in names
    assert not any(name.startswith(".") for name in names)


def test_mistakes_are_user_errors(project):
    with pytest.raises(UserError, match=r"job script 'no\.py' does not exist"):
        submit("no.py", [], "http://127.0.0.1:1", working_dir=project)
    with pytest.raises(UserError, match="outside"):
        submit(sys.executable, [], "http://127.0.0.1:1", working_dir=project)
    with pytest.raises(UserError, match=r"no Ray job service answers at http://127\.0\.0\.1:1;"):
        submit("jobs/job.py", [], "127.0.0.1:1", working_dir=project)
    with pytest.raises(UserError, match="give the job service's address"):
        submit("jobs/job.py", [], "ray://127.0.0.1:10001", working_dir=project)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for opened in sockets:
        opened.bind(("127.0.0.1", 0))
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


@pytest.fixture(scope="module")
def job_service():
    """`ray start --head` with ports and folders of its own; stopped by ending its process group, nobody else's."""
    folder = tempfile.mkdtemp(prefix="mi")  # short: Ray keeps sockets below it
    gcs, dashboard, agent, grpc, metrics, runtime, client = free_ports(7)
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--temp-dir={folder}"),
        *(f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--num-cpus=1"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={grpc}"),
        *(f"--metrics-export-port={metrics}", f"--runtime-env-agent-port={runtime}"),
        *(f"--ray-client-server-port={client}", "--object-store-memory=100000000", "--disable-usage-stats"),
    ]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    with open(Path(folder) / "start.log", "w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{dashboard}", head
    finally:
        head.terminate()
        head.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def test_log_and_exit_code_of_a_job(job_service, project, monkeypatch):
    address, head = job_service
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    wait_for(address, head)
    for code, expected in ((0, 0), (7, 1)):
        output, told = io.StringIO(), []
        arguments = ["a b", str(code)]
        result = submit(
            "jobs/job.py", arguments, address, working_dir=project, output=output, announce=told.append
        )  # fmt: skip
        assert result == expected, (told, output.getvalue())
        assert f"arguments {arguments}" in output.getvalue()
        assert "where beside the script" in output.getvalue()
        assert "ray job stop" in told[0]
        assert len(told) == (1 if code == 0 else 2)
    assert "exit code 7" in told[1]


def wait_for(address: str, head: subprocess.Popen, seconds: float = 90) -> None:
    """Until the job service answers."""
    deadline = time.monotonic() + seconds
    while True:
        assert head.poll() is None, "ray start ended"
        try:
            JobSubmissionClient(address).list_jobs()
            return
        except (ConnectionError, RuntimeError):
            assert time.monotonic() < deadline
            time.sleep(0.5)
