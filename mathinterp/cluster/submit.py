"""Hand a job script to a running cluster: measure the upload, submit, follow the log, return the exit code.

Knows Ray's job service and what it uploads; knows nothing about scans. The script itself (ray_jobs/) is a driver that
runs on the head node: it never asks for a GPU, its replicas do.
"""

import asyncio
import logging
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from zipfile import ZipFile

from aiohttp import ClientError
from ray._private.runtime_env.packaging import create_package
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

import mathinterp
from mathinterp.cluster.temporary import require_scratch
from mathinterp.errors import UserError

UPLOAD_LIMIT = 100 * 2**20  # bytes of the zipped working directory that Ray's job service accepts
EXCLUDES = (".?*", "__pycache__", "*.egg-info")  # beside .gitignore and .rayignore; nothing hidden, so no secrets
LARGEST = 5  # files named when an upload is too large


@dataclass(frozen=True)
class Upload:
    """A working directory as Ray would upload it."""

    folder: Path
    bytes: int  # zipped
    files: tuple[tuple[str, int], ...]  # name and zipped bytes, largest first

    def check(self) -> None:
        """Raise UserError, naming the largest files, if the job service would refuse it."""
        if self.bytes < UPLOAD_LIMIT:
            return
        largest = ", ".join(f"{name} ({_mib(size)})" for name, size in self.files[:LARGEST])
        raise UserError(
            f"{self.folder} zips to {_mib(self.bytes)}, Ray takes less than {_mib(UPLOAD_LIMIT)}; the largest files are"
            f" {largest}; list what the job does not need in .rayignore"
        )


def measure_upload(folder: Path, excludes: Sequence[str] = EXCLUDES) -> Upload:
    """Zip ``folder`` by Ray's own rules (.gitignore, .rayignore, ``excludes``) and measure the result."""
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "upload.zip"
        create_package(str(folder), archive, include_gitignore=True, excludes=list(excludes), logger=_silent())
        with ZipFile(archive) as zipped:
            files = [(entry.filename, entry.compress_size) for entry in zipped.infolist() if not entry.is_dir()]
        return Upload(folder, archive.stat().st_size, tuple(sorted(files, key=lambda file: -file[1])))


def submit(
    job_script: str | os.PathLike[str],
    args: Sequence[str],
    address: str,
    *,
    working_dir: str | os.PathLike[str] | None = None,
    output: TextIO | None = None,
    announce: Callable[[str], None] | None = None,
) -> int:
    """Run ``python job_script args...`` on the head node of a cluster and follow its log to the end.

    Args:
        job_script: a file inside ``working_dir``.
        args: its command line.
        address: of the job service, for example http://127.0.0.1:8265 (`ray dashboard cluster.yaml` forwards it).
        working_dir: the folder to upload, from which the job imports; None: the checkout that holds mathinterp.
        output: where the job's log goes; None: stdout.
        announce: told the job's id, and how to find or stop it; None: printed to stderr.
    Returns:
        0 if the job succeeded, else 1, as `ray job submit` does; 1 also if the cluster no longer answers.
    Raises:
        UserError: the script or the cluster is not there, or the upload is too large; nothing has been submitted.
        KeyboardInterrupt: from the terminal; the job goes on, and it is said how to stop it.
    """
    require_scratch()
    folder = Path(working_dir).resolve() if working_dir is not None else checkout()
    script = _inside(folder, Path(job_script))
    upload = measure_upload(folder)
    upload.check()
    client = _client(address)
    job = client.submit_job(
        entrypoint=shlex.join(["python", script, *args]),
        runtime_env={"working_dir": str(folder), "excludes": list(EXCLUDES)},
        entrypoint_num_gpus=0,
    )
    announce = announce or (lambda line: print(line, file=sys.stderr, flush=True))
    announce(f"job {job}: {_mib(upload.bytes)} uploaded; to stop it: ray job stop {job} --address {address}")
    try:
        return _follow(client, job, output or sys.stdout, announce)
    except KeyboardInterrupt:
        announce(
            f"job {job} goes on; to stop it: ray job stop {job} --address {address}; to follow it again:"
            f" ray job logs {job} --address {address} --follow"
        )
        raise
    except (OSError, RuntimeError, ClientError) as error:  # OSError: Ray's ConnectionError and those of requests
        reason = str(error) or type(error).__name__
        announce(
            f"lost touch with the cluster at {address} ({reason}); job {job} may be running still:"
            f" ray job logs {job} --address {address} --follow; once submitted again, it runs what is missing"
        )
        return 1


def checkout() -> Path:
    """The folder of the project's checkout; raises UserError where mathinterp was installed without one."""
    folder = Path(mathinterp.__file__).resolve().parents[1]
    if not (folder / "pyproject.toml").is_file():
        raise UserError(
            "a job uploads the project's folder; run 'mathinterp submit' from a checkout (pip install -e .)"
        )
    return folder


def _inside(folder: Path, script: Path) -> str:
    """The script's path relative to the uploaded folder."""
    absolute = script if script.is_absolute() else folder / script
    if not absolute.is_file():
        raise UserError(f"job script '{script}' does not exist in {folder}")
    if not absolute.resolve().is_relative_to(folder):
        raise UserError(f"job script '{script}' is outside {folder}, which is what is uploaded")
    return str(absolute.resolve().relative_to(folder))


def _client(address: str) -> JobSubmissionClient:
    logging.getLogger("ray").setLevel(logging.WARNING)
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise UserError(f"--address {address}: give the job service's address, for example http://127.0.0.1:8265")
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise UserError(
            f"the cluster at {address} asks for a token: set RAY_AUTH_MODE=token and put the cluster's token into"
            " ~/.ray/auth_token (`ray get-auth-token` on the head node shows it)"
        ) from error
    except (ConnectionError, RuntimeError) as error:
        raise UserError(
            f"no Ray job service answers at {address}; is the cluster up and its port forwarded?"
        ) from error


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
    announce(f"job {job} {details.status.lower()}: {details.message}")
    return 1


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _silent() -> logging.Logger:
    logger = logging.getLogger(f"{__name__}.packaging")
    logger.setLevel(logging.CRITICAL)
    return logger
