"""Submitting jobs: the upload is measured first, the log streamed, the exit code returned; on a real head node."""

import io
import random
import sys
from pathlib import Path

import pytest
import requests

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


def test_ray_job_submit_itself_uploads_nothing_hidden():
    upload = measure_upload(checkout(), excludes=())
    upload.check()
    parts = {part for name, _ in upload.files for part in Path(name).parts}
    assert not [part for part in parts if part.startswith(".") or part.endswith(".egg-info")]


class VanishingCluster:
    """A job service that takes a job and is gone."""

    def submit_job(self, **job) -> str:
        return "raysubmit_1"

    async def tail_job_logs(self, job):
        yield "first line\n"

    def get_job_info(self, job):
        raise requests.exceptions.ConnectionError("Connection aborted.")


def test_a_cluster_that_vanishes_is_told_in_one_line(project, monkeypatch):
    monkeypatch.setattr(submitting, "_client", lambda address: VanishingCluster())
    output, told = io.StringIO(), []
    code = submit("jobs/job.py", [], "http://c:8265", working_dir=project, output=output, announce=told.append)
    assert code == 1
    assert output.getvalue() == "first line\n"
    assert told[1].startswith("lost touch with the cluster at http://c:8265 (Connection aborted.); job raysubmit_1 may")
    assert "ray job logs raysubmit_1 --address http://c:8265" in told[1]


def test_mistakes_are_user_errors(project):
    with pytest.raises(UserError, match=r"job script 'no\.py' does not exist"):
        submit("no.py", [], "http://127.0.0.1:1", working_dir=project)
    with pytest.raises(UserError, match="outside"):
        submit(sys.executable, [], "http://127.0.0.1:1", working_dir=project)
    with pytest.raises(UserError, match=r"no Ray job service answers at http://127\.0\.0\.1:1;"):
        submit("jobs/job.py", [], "127.0.0.1:1", working_dir=project)
    with pytest.raises(UserError, match="give the job service's address"):
        submit("jobs/job.py", [], "ray://127.0.0.1:10001", working_dir=project)


@pytest.mark.ray
@pytest.mark.own_ray
def test_log_and_exit_code_of_a_job(job_address, project):
    for code, expected in ((0, 0), (7, 1)):
        output, told = io.StringIO(), []
        arguments = ["a b", str(code)]
        result = submit(
            "jobs/job.py", arguments, job_address, working_dir=project, output=output, announce=told.append
        )  # fmt: skip
        assert result == expected, (told, output.getvalue())
        assert f"arguments {arguments}" in output.getvalue()
        assert "where beside the script" in output.getvalue()
        assert "ray job stop" in told[0]
        assert len(told) == (1 if code == 0 else 2)
    assert "exit code 7" in told[1]
