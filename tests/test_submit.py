"""Submitting jobs: the upload is measured first, the log streamed, the exit code returned; on a real head node."""

import fnmatch
import io
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.cluster import submit as submitting
from mathinterp.cluster.submit import checkout, measure_upload, submit
from mathinterp.cluster.uploads import SECRETS
from mathinterp.errors import UserError

SILENT = {"output": io.StringIO(), "announce": lambda line: None}
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


SECRET = [
    ".env", "a/.env.local", "prod.env", "key.pem", "a/b/server.key", "id_rsa", "id_rsa.bak", "id_ed25519",
    "aws_credentials", "a/Credentials.json", "google-credentials.py", "b/token", "hf_token",
    "HF_TOKEN.txt", "a/token.json",
    "github.token", "token.pickle", "api_tokens.yaml", "auth-token-old.txt", "tokens.txt", "my.env/bin/x",
]  # fmt: skip
NEEDED = [
    "token_types.py", "next_token.py", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "added_tokens.json", "special_tokens_map.json",
    "answer_tokens/rows.parquet", "tokens.npy", "token_ids.json", "access_token_test.py",
    "pkg/token/__init__.py", "environment.yaml", "keys.py", "monkey.txt", "tokenizers/x.json", "pem.py", "tokenise.txt",
]  # fmt: skip


def put(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def test_secrets_stay_at_home_and_are_named(project):
    before = {name for name, _ in measure_upload(project).files}
    put(project, [*SECRET, *NEEDED])
    upload = measure_upload(project)
    assert {name for name, _ in upload.files} == before | set(NEEDED)
    assert set(upload.left_out.secrets) == {*SECRET, "my.env"} - {"my.env/bin/x"}
    assert "without the secrets .env, HF_TOKEN.txt" in str(upload.left_out)
    assert str(upload.left_out).endswith(f"and {len(upload.left_out.secrets) - 5} more (rename what the job needs)")


def test_links_that_lead_out_are_left_out_and_named(project, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    put(outside, ["system/passwd", "data.bin"])
    put(project, ["kept/file.txt", "key.pem"])
    links = {
        "system": outside / "system", "jobs/data [1]*.bin": outside / "data.bin", "loop": project / "loop",
        "again": project, "jobs/up": Path("../.."), "gone": project / "nowhere", "config": project / ".env",
        "plain.txt": project / "key.pem", "folder": project / "kept",
    }  # fmt: skip
    for name, target in links.items():
        (project / name).symlink_to(target)
    os.mkfifo(project / "pipe")
    (project / "copy.txt").symlink_to(project / "kept" / "file.txt")
    upload = measure_upload(project)
    names = {name for name, _ in upload.files}
    assert names == {"jobs/job.py", "jobs/helper.py", "mathinterp_marker.py", "kept/file.txt", "copy.txt"}
    assert set(upload.left_out.links) == {*links, "pipe"}
    assert "the links and special files" in str(upload.left_out)


def test_what_is_left_out_is_told_and_never_sent(project, monkeypatch):
    put(project, ["jobs/hf_token.txt"])
    sent, told = [], []

    class Cluster(VanishingCluster):
        def submit_job(self, **job) -> str:
            sent.append(job)
            return "raysubmit_1"

    monkeypatch.setattr(submitting, "_client", lambda address: Cluster())
    submit("jobs/job.py", [], "http://c:8265", working_dir=project, output=io.StringIO(), announce=told.append)
    assert "uploaded without the secrets .env, jobs/hf_token.txt (rename what the job needs); to stop it" in told[0]
    assert {"/.env", "/jobs/hf_token.txt"} <= set(sent[0]["runtime_env"]["excludes"])


def test_rays_own_ways_of_sending_the_project_leave_secrets_out_too(tmp_path):
    """`ray job submit` and `ray up` (see cluster.yaml) go by .rayignore; rsync knows the same wildcards."""
    ignored = [line for line in (checkout() / ".rayignore").read_text().splitlines() if line and line[0] != "#"]
    assert {*SECRETS} <= {*ignored}
    assert not [line for line in ignored if line.startswith("!") or "**" in line], "rsync reads these otherwise"

    def leaves_out(name: str) -> bool:
        return any(fnmatch.fnmatchcase(part, line.rstrip("/")) for part in Path(name).parts for line in ignored)

    assert [name for name in SECRET if not leaves_out(name)] == []
    packages = ["pkg/token/__init__.py"]  # patterns cannot tell a package from a secret
    assert [name for name in NEEDED if leaves_out(name)] == packages
    tracked = subprocess.check_output(["git", "ls-files"], cwd=checkout(), text=True).splitlines()
    assert [name for name in tracked if leaves_out(name) and not name.startswith(".")] == []


def test_an_upload_too_large_names_its_largest_files_and_submits_nothing(project, monkeypatch):
    monkeypatch.setattr(submitting, "UPLOAD_LIMIT", 3 * 2**20)
    (project / "weights.bin").write_bytes(random.Random(1).randbytes(3 * 2**20))
    (project / "data.bin").write_bytes(random.Random(2).randbytes(2**20))
    with pytest.raises(
        UserError, match=r"4\.0 MiB.*less than 3\.0 MiB.*weights\.bin \(3\.0 MiB\), data\.bin \(1\.0 MiB\)"
    ):
        submit("jobs/job.py", [], "http://127.0.0.1:1", working_dir=project, **SILENT)


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
        submit("no.py", [], "http://127.0.0.1:1", working_dir=project, **SILENT)
    with pytest.raises(UserError, match="outside"):
        submit(sys.executable, [], "http://127.0.0.1:1", working_dir=project, **SILENT)
    with pytest.raises(UserError, match=r"no Ray job service answers at http://127\.0\.0\.1:1;"):
        submit("jobs/job.py", [], "127.0.0.1:1", working_dir=project, **SILENT)
    with pytest.raises(UserError, match="give the job service's address"):
        submit("jobs/job.py", [], "ray://127.0.0.1:10001", working_dir=project, **SILENT)


@pytest.mark.parametrize(
    ("job", "said"),
    [("head_scn", "Did you mean 'head_scan'?"), ("scan head", "there is no job"), ("sql", "takes --address")],
)
def test_a_job_that_no_cluster_could_run_is_refused_here(job, said):
    done = CliRunner().invoke(main, ["submit", job, "--address", "http://127.0.0.1:1"])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert said in line


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
