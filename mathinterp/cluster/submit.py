"""Hand a job to a running cluster: measure the upload, submit, follow the log, return the exit code.

Knows Ray's job service and what it uploads; knows nothing about scans. The job itself, a command or a script, is a
driver that runs on the head node: it never asks for a GPU, its replicas do.
"""

import asyncio
import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4
from zipfile import ZIP_DEFLATED, ZipFile

from aiohttp import ClientError
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

import mathinterp
from mathinterp.cluster.given_files import GivenFiles, require_lasting
from mathinterp.cluster.ray_cluster import asks_for_token
from mathinterp.cluster.temporary import require_scratch
from mathinterp.cluster.uploads import LeftOut, listed, uploaded
from mathinterp.errors import UserError, first_line_of
from mathinterp.gates import shortened

UPLOAD_LIMIT = 100 * 2**20  # bytes of the zipped working directory that Ray's job service accepts
EXCLUDES = (".?*", "__pycache__", "*.egg-info")  # beside .gitignore and .rayignore, secrets and links
LARGEST = 5  # files named when an upload is too large
PACKAGE = Path(mathinterp.__file__).resolve().parent
JOBS = {  # short names of commands; ray_jobs/ has a script for each
    "head_scan": "scan heads",
    "path_scan": "scan paths",
    "neuron_scan": "scan neurons",
    "concept_scan": "scan concepts",
    "pipeline": "pipeline",
    "precise_sft": "tune precise",
    "lora_sweep": "tune sweep",
    "evaluate": "evaluate",
}


@dataclass(frozen=True)
class Upload:
    """A working directory as Ray would upload it."""

    folder: Path
    bytes: int  # packed
    files: tuple[tuple[str, int], ...]  # name and zipped bytes, largest first
    left_out: LeftOut

    def check(self) -> None:
        """Raise UserError, naming the largest files, if the job service would refuse it."""
        if self.bytes < UPLOAD_LIMIT:
            return
        largest = ", ".join(f"{name} ({_mib(size)})" for name, size in self.files[:LARGEST])
        raise UserError(
            f"{self.folder} zips to {_mib(self.bytes)}, Ray takes less than {_mib(UPLOAD_LIMIT)}; the largest files are"
            f" {largest}; list what the job does not need in .rayignore"
        )


def measure_upload(folder: Path, excludes: Sequence[str] = EXCLUDES, archive: Path | None = None) -> Upload:
    """Zip ``folder`` as Ray does by .gitignore, .rayignore and ``excludes``, without secrets and links that lead out of
    it, and measure the result; raises UserError, before anything is packed, for what is too large.

    Args:
        archive: where the zip file is left; None: nowhere.
    """
    found, without = uploaded(folder, excludes)
    files = tuple(sorted(found.items(), key=lambda file: -file[1]))
    Upload(folder, sum(found.values()), files, without).check()  # before it is packed
    with tempfile.TemporaryDirectory() as scratch:
        packed = archive or Path(scratch) / "upload.zip"
        try:
            with ZipFile(packed, "w", strict_timestamps=False) as zipped:
                for name in found:
                    zipped.write(folder / name, name)
        except OSError as error:
            raise UserError(f"'{error.filename}' cannot be packed for the upload: {error.strerror or error}") from error
        return _measured(folder, packed, without)


def _measured(folder: Path, archive: Path, without: LeftOut) -> Upload:
    with ZipFile(archive) as zipped:
        files = [(entry.filename, entry.compress_size) for entry in zipped.infolist() if not entry.is_dir()]
    return Upload(folder, archive.stat().st_size, tuple(sorted(files, key=lambda file: -file[1])), without)


@dataclass(frozen=True)
class Job:
    """What is sent: packed, measured and checked."""

    entrypoint: str
    runtime_env: dict[str, Any]
    told: str  # how much is uploaded, with and without what
    absent: str = ""  # which files of its command line are not here


def pack(
    job: str, args: Sequence[str], folder: Path, scratch: Path, no_send: bool = False, options: Sequence[str] = ()
) -> Job:
    """Pack the folder, the package, and the files that the command line names; raises UserError as ``submit`` does."""
    if not is_script(job):
        require_lasting(args)
    entrypoint, archive = _entrypoint(folder, job, options), scratch / "working_dir.zip"
    upload = measure_upload(folder, archive=archive)
    given = GivenFiles(folder, [name for name, _ in upload.files], _files_of)
    if not no_send:
        args = given.arguments(args)
        given.module(job)
    with ZipFile(archive, "a", ZIP_DEFLATED, strict_timestamps=False) as zipped:
        for name, path in given.files.items():
            zipped.write(path, name)
    uploads = [_measured(folder, archive, upload.left_out)]
    runtime_env: dict[str, Any] = {"working_dir": str(archive)}
    if not (folder / PACKAGE.name).is_dir():
        runtime_env |= {"py_modules": [str(PACKAGE)], "excludes": list(EXCLUDES)}
        uploads.append(measure_upload(PACKAGE))
    for each in uploads:
        each.check()
    absent = f"{listed(given.absent)}: no file here, taken as the nodes' own" if given.absent else ""
    told = f"{_mib(sum(upload.bytes for upload in uploads))} uploaded"
    told += f" with {listed(given.named)}" if given.named else ""
    told += f" ({listed(given.nodes_own)}: a path of the cluster's nodes, not sent)" if given.nodes_own else ""
    return Job(shlex.join(["python", *entrypoint, *args]), runtime_env, f"{told}{upload.left_out}", absent)


def _files_of(folder: Path) -> list[str]:
    return [name for name, _ in measure_upload(folder).files]


def submit(
    job: str | os.PathLike[str],
    args: Sequence[str],
    address: str,
    *,
    output: TextIO,
    announce: Callable[[str], None],
    working_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    no_send: bool = False,
    options: Sequence[str] = (),
) -> int:
    """Run ``job args...`` on the head node of a cluster and follow its log to the end.

    The package travels with the job, from the checkout or from where it is installed, and so do files that options of
    ``args`` name (given_files.py) and the module of a ``module:Class`` from the current folder.

    Args:
        job: a script (.py) inside ``working_dir``, a name of JOBS, or the words of a command, as in "scan mlps".
        args: its command line.
        address: of the job service, for example http://127.0.0.1:8265 (`ray dashboard cluster.yaml` forwards it).
        output: where the job's log goes.
        announce: told the job's id, and how to find or stop it.
        working_dir: the folder to upload, which is the job's current folder; None: the checkout that holds mathinterp,
            an empty folder where there is none.
        name: the job's id in the cluster; None: made of the job's words.
        no_send: files that ``args`` name are not sent: they are paths of the cluster's nodes.
        options: of mathinterp itself, before a command: how much it says, and how.
    Returns:
        the job's exit code; 1 if it was stopped or the cluster no longer answers.
    Raises:
        UserError: the script or the cluster is not there, the upload is too large, or the cluster refuses the job;
            nothing has been submitted.
        KeyboardInterrupt: from the terminal; the job goes on, and it is said how to stop it.
    """
    require_scratch()
    for module in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(module).setLevel(logging.WARNING)  # the last two set their own
    number, address = _job_id(os.fspath(job), name), _checked(address)
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as scratch:
        folder = Path(working_dir or checkout() or empty).resolve()
        packed = pack(os.fspath(job), args, folder, Path(scratch), no_send, options)
        if packed.absent:
            announce(packed.absent)
        with _refusals(address):
            client = JobSubmissionClient(address)
            client.submit_job(
                entrypoint=packed.entrypoint, runtime_env=packed.runtime_env, entrypoint_num_gpus=0,
                submission_id=number, metadata={"name": name or os.fspath(job), "mathinterp": mathinterp.__version__},
            )  # fmt: skip
    announce(f"job {number}: {packed.told}; to stop it: ray job stop {number} --address {address}")
    try:
        return _follow(client, number, output, announce)
    except KeyboardInterrupt:
        announce(
            f"job {number} goes on; to stop it: ray job stop {number} --address {address}; to follow it again:"
            f" ray job logs {number} --address {address} --follow"
        )
        raise
    except (OSError, RuntimeError, ClientError) as error:  # OSError: Ray's ConnectionError and those of requests
        reason = str(error) or type(error).__name__
        announce(
            f"lost touch with the cluster at {address} ({reason}); job {number} may be running still:"
            f" ray job logs {number} --address {address} --follow; once submitted again, it runs what is missing"
        )
        return 1


def _job_id(job: str, name: str | None) -> str:
    """The id by which the cluster knows the job; raises UserError for a name that could be none."""
    if name is None:
        words = re.sub(r"[^A-Za-z0-9]+", "-", job.removesuffix(".py")).strip("-")
        return f"{words[-40:]}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:6]}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise UserError(
            f"`name` {shortened(name)}: give at most 100 letters, digits, and . _ - (the first two to begin)"
        )
    return name


def checkout() -> Path | None:
    """The folder of the project's checkout; None where mathinterp is installed without one."""
    folder = PACKAGE.parent
    return folder if (folder / "pyproject.toml").is_file() else None


def is_script(job: str) -> bool:
    """Whether a job is a file rather than a command."""
    return job.endswith(".py") or os.sep in job


def _entrypoint(folder: Path, job: str, options: Sequence[str]) -> list[str]:
    """Arguments of Python: the script's path relative to the uploaded folder, or the command."""
    if not is_script(job):
        return ["-m", "mathinterp", *options, *JOBS.get(job, job).split(), "--address", "auto"]
    absolute = folder / job
    if not absolute.is_file():
        raise UserError(f"job script '{job}' does not exist in {folder}; `working_dir` names the folder to upload")
    if not absolute.resolve().is_relative_to(folder):
        raise UserError(f"job script '{job}' is outside {folder}, which is what is uploaded")
    return [str(absolute.resolve().relative_to(folder))]


def _checked(address: str) -> str:
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise UserError(f"`address` {address}: give the job service's address, for example http://127.0.0.1:8265")
    return address


@contextmanager
def _refusals(address: str) -> Iterator[None]:
    """Why a cluster takes no job, as a UserError of one line."""
    try:
        yield
    except AuthenticationError as error:
        raise asks_for_token(address) from error
    except (OSError, RuntimeError) as error:  # OSError: ConnectionError, and those of requests
        said = str(error)
        if "already exists" in said:
            raise UserError(f"the cluster at {address} has a job of that `name` already; give another") from error
        if "No available agent" in said or "head node agent" in said:
            raise UserError(
                f"the cluster at {address} runs no job agent on its head node, so it takes no jobs; try again if it"
                " has just started, else dashboard_agent.log there says why (Ray must be installed as ray[default])"
            ) from error
        if "Request failed" in said:
            last = [line for line in said.strip().splitlines() if line.strip()][-1]
            raise UserError(f"the cluster at {address} refuses the job: {last.strip()}") from error
        raise UserError(
            f"no Ray job service answers at {address}; is the cluster up and its port forwarded?"
            f" ({_first_cause(error)})"
        ) from error


def _first_cause(error: BaseException) -> str:
    """The system's word where there is one, in one line: Ray's own errors say no more than that nothing answered."""
    each: BaseException | None = error
    while each is not None and not (isinstance(each, OSError) and each.strerror):
        each = each.__cause__ or each.__context__
    return shortened(first_line_of(error), 200) if each is None else str(each.strerror)


def _follow(client: JobSubmissionClient, job: str, output: TextIO, announce: Callable[[str], None]) -> int:
    """Copy the job's log until it ends."""

    async def copy() -> None:
        async for lines in client.tail_job_logs(job):
            output.write(lines)
            output.flush()

    asyncio.run(copy())
    while not (details := client.get_job_info(job)).status.is_terminal():
        time.sleep(0.5)
    if details.status == "SUCCEEDED":
        return 0
    said = (details.message or "").partition(", last available logs")[0]  # these were copied already
    announce(f"job {job} {details.status.lower()}: {said}")
    code = details.driver_exit_code if details.status == "FAILED" else None
    if not code:
        return 1
    return code if code > 0 else 128 - code  # ended by a signal: as a shell tells it


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
