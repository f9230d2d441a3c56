"""Submitting jobs: the upload is measured first, the log streamed, the exit code returned; on a real head node."""

import fnmatch
import io
import json
import logging
import os
import random
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from zipfile import ZipFile

import pytest
import requests
from click.testing import CliRunner
from ray.job_submission import JobDetails, JobSubmissionClient

from mathinterp.cli.main import main
from mathinterp.cluster import submit as submitting
from mathinterp.cluster.submit import _entrypoint, checkout, measure_upload, submit
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
        def submit_job(self, runtime_env, **job) -> None:
            with ZipFile(runtime_env["working_dir"]) as archive:
                sent.extend(name for name in archive.namelist() if not name.endswith("/"))

    monkeypatch.setattr(submitting, "JobSubmissionClient", lambda address: Cluster())
    submit("jobs/job.py", [], "http://c:8265", working_dir=project, output=io.StringIO(), announce=told.append)
    assert "uploaded without the secrets .env, jobs/hf_token.txt (rename what the job needs); to stop it" in told[0]
    assert sorted(sent) == ["jobs/helper.py", "jobs/job.py", "mathinterp_marker.py"]


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

    def submit_job(self, **job) -> None:
        pass

    async def tail_job_logs(self, job):
        yield "first line\n"

    def get_job_info(self, job):
        raise requests.exceptions.ConnectionError("Connection aborted.")


def test_a_cluster_that_vanishes_is_told_in_one_line(project, monkeypatch):
    monkeypatch.setattr(submitting, "JobSubmissionClient", lambda address: VanishingCluster())
    output, told = io.StringIO(), []
    code = submit(
        "jobs/job.py", [], "http://c:8265", working_dir=project, output=output, announce=told.append, name="raysubmit_1"
    )
    assert code == 1
    assert output.getvalue() == "first line\n"
    assert told[1].startswith("lost touch with the cluster at http://c:8265 (Connection aborted.); job raysubmit_1 may")
    assert "ray job logs raysubmit_1 --address http://c:8265" in told[1]


class FailingJob(VanishingCluster):
    """A job service whose job ends with exit code 3; Ray repeats the end of the log in its message."""

    def get_job_info(self, job):
        told = "Job entrypoint command failed with exit code 3, last available logs (truncated to 20,000 chars):\n..."
        return JobDetails(type="SUBMISSION", entrypoint="x", status="FAILED", message=told, driver_exit_code=3)


def test_a_job_that_fails_is_told_in_one_line_without_its_log_again(project, monkeypatch):
    monkeypatch.setattr(submitting, "JobSubmissionClient", lambda address: FailingJob())
    told = []
    job = ("jobs/job.py", [], "http://c:8265")
    assert submit(*job, working_dir=project, output=io.StringIO(), announce=told.append, name="mine") == 3
    assert told[1] == "job mine failed: Job entrypoint command failed with exit code 3"
    for name in ("dashboard_sdk", "job.sdk"):  # which tell of their uploads and sockets
        assert not logging.getLogger(f"ray.dashboard.modules.{name}").isEnabledFor(logging.INFO)


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
    [
        ("head_scn", "Did you mean 'head_scan'?"),
        ("scan head", "there is no job"),
        ("sql", "takes --address"),
        ("scan heads --limit 4", "options stand after --"),
        ("scan heads --store /shared/results", "stand after --"),
    ],
)
def test_a_job_that_no_cluster_could_run_is_refused_here(job, said):
    done = CliRunner().invoke(main, ["submit", job, "--address", "http://127.0.0.1:1"])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert said in line


class Service(BaseHTTPRequestHandler):
    """A job service that takes everything but the job."""

    refusal: ClassVar[tuple[int, str]]

    def _answer(self, status: int, text: str) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        version = {"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": "s"}
        self._answer(200, json.dumps(version))

    def do_PUT(self) -> None:
        self._answer(200, "")

    def do_POST(self) -> None:
        self._answer(*self.refusal)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((500, "No available agent to submit job, please try again later."), "runs no job agent on its head node"),
        ((500, "Traceback\n  x\nException: Failed to get head node agent within 30 s."), "runs no job agent"),
        ((401, "Unauthorized"), "asks for a token: set RAY_AUTH_MODE=token"),
        ((403, "Forbidden"), "asks for a token: set RAY_AUTH_MODE=token"),
        ((400, "Traceback\n  x\nValueError: no such thing"), "refuses the job: ValueError: no such thing"),
    ],
)
def test_why_a_cluster_takes_no_job_is_told_in_one_line(project, monkeypatch, refusal, said):
    monkeypatch.setattr(Service, "refusal", refusal, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        words = ["submit", "jobs/job.py", "--address", address, "--working-dir", str(project)]
        done = CliRunner().invoke(main, words)
        server.shutdown()
    assert done.exit_code == 2, (done.output, done.exception)
    (line,) = done.stderr.splitlines()
    assert f"the cluster at {address} {said}" in line


class NoService(Service):
    """An HTTP server that knows nothing of jobs."""

    def do_GET(self) -> None:
        self._answer(200, "<html>")


@pytest.mark.slow
def test_why_nothing_answers_is_told(project):
    with ThreadingHTTPServer(("127.0.0.1", 0), NoService) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for address, why in (
            ("http://127.0.0.1:1", "Connection refused"),
            ("http://[::1", "is not a valid host or port"),
            ("http://nowhere.invalid", "Name or service not known|Temporary failure in name resolution"),
            ("http://127.0.0.1:99999", "Port could not be cast|out of range|99999"),
            (f"http://127.0.0.1:{server.server_port}", "Expecting value"),
        ):
            said = re.escape(f"no Ray job service answers at {address}; is the cluster up and its port forwarded? (")
            with pytest.raises(UserError, match=rf"^{said}.*({why}).*\)$"):
                submit("jobs/job.py", [], address, working_dir=project, **SILENT)
        server.shutdown()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--store", "rel"], "`store` rel: would be in the job's own folder.*give a full path or a URL"),
        (["--limit", "3", "--store=./a/b"], "`store` ./a/b: .*give a full path or a URL"),
        (["--out", "r.html"], "`out` r.html: .*give a full path"),
    ],
)
def test_results_that_would_go_with_the_job_are_refused_before_anything_is_packed(project, monkeypatch, words, said):
    monkeypatch.setattr("mathinterp.cluster.submit.measure_upload", lambda *_, **__: pytest.fail("it was packed"))
    with pytest.raises(UserError, match=said):
        submit("scan heads", words, "http://127.0.0.1:1", working_dir=project, **SILENT)


@pytest.mark.parametrize("store", ["/a/b", "~/b", "s3://b/c"])
def test_results_that_stay_are_no_reason_to_refuse_a_job(project, store):
    with pytest.raises(UserError, match="no Ray job service answers"):
        submit("scan heads", ["--store", store], "http://127.0.0.1:1", working_dir=project, **SILENT)


def test_a_job_says_as_much_as_its_command_does(monkeypatch):
    given = []
    monkeypatch.setattr("mathinterp.cluster.submit.submit", lambda *_, **more: given.append(more["options"]) or 0)
    words = ["submit", "head_scan", "--address", "http://c:1"]
    json_lines = ["--log-format", "json"]
    for more, told in (([], []), (["-q"], ["--quiet"]), (["-v", *json_lines], ["--verbose", *json_lines])):
        assert CliRunner().invoke(main, [*more, *words]).exit_code == 0
        assert given.pop() == told
    entry = ["python", "-m", "mathinterp", "--quiet", "scan", "heads", "--address", "auto"]
    assert ["python", *_entrypoint(Path(), "head_scan", ["--quiet"])] == entry


def test_a_name_that_could_be_no_id_is_refused(project):
    for name in ("", "../x", "a b", "-x", "x" * 101):
        with pytest.raises(UserError, match="`name`"):
            submit("jobs/job.py", [], "http://127.0.0.1:1", working_dir=project, name=name, **SILENT)


@pytest.mark.ray
@pytest.mark.own_ray
def test_log_and_exit_code_of_a_job(job_address, project):
    for code in (0, 2, 7):
        output, told = io.StringIO(), []
        arguments = ["a b", str(code)]
        result = submit(
            "jobs/job.py", arguments, job_address, working_dir=project, output=output, announce=told.append,
            name=f"named-{code}",
        )  # fmt: skip
        assert result == code, (told, output.getvalue())
        assert f"arguments {arguments}" in output.getvalue()
        assert "where beside the script" in output.getvalue()
        assert "ray job stop" in told[0]
        assert len(told) == (1 if code == 0 else 2)
    assert "exit code 7" in told[1]
    assert told[0].startswith("job named-7: ")
    details = JobSubmissionClient(job_address).get_job_info("named-7")
    assert details.metadata["name"] == "named-7"
    with pytest.raises(UserError, match="has a job of that `name` already; give another"):
        submit("jobs/job.py", [], job_address, working_dir=project, name="named-7", **SILENT)
