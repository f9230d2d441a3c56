"""A Ray head node with a job service, on ports and in folders of its own; knows nothing about what is submitted."""

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient

from mathinterp.cluster.temporary import usable_folder


@contextmanager
def job_service() -> Iterator[str]:
    """Address of a job service that answers; its head node is stopped at the end, and nobody else's."""
    folder = tempfile.mkdtemp(prefix="mi", dir=usable_folder())  # short: Ray keeps sockets below it
    programs = Path(sys.executable).parent
    gcs, dashboard, agent, grpc, metrics, runtime, client = free_ports(7)
    command = [
        *(str(programs / "ray"), "start", "--head", "--block", f"--temp-dir={folder}"),
        *(f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--num-cpus=1"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={grpc}"),
        *(f"--metrics-export-port={metrics}", f"--runtime-env-agent-port={runtime}"),
        *(f"--ray-client-server-port={client}", "--object-store-memory=100000000", "--disable-usage-stats"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")  # else the head waits 30 s for what jobs left behind
        # A job's entry point is `python`: without this, some other one where the environment is not activated.
        patch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        with open(Path(folder) / "start.log", "w") as log:
            head = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{dashboard}"
            wait_for(address, agent, head)
            yield address
        finally:
            head.terminate()
            head.wait(timeout=60)
            shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, below those that the system gives to connections: so they are free until used."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_768)  # Ray's workers take 10,002 to 19,999
        with socket.socket() as opened, suppress(OSError):
            opened.bind(("127.0.0.1", port))
            found += [port] * (port not in found)
    return found


def wait_for(address: str, agent: int, head: subprocess.Popen, seconds: float = 120) -> None:
    """Until the job service answers, and the agent that starts its jobs."""
    deadline = time.monotonic() + seconds
    while True:
        assert head.poll() is None, "ray start ended"
        try:
            JobSubmissionClient(address).list_jobs()
            with urllib.request.urlopen(f"http://127.0.0.1:{agent}/api/local_raylet_healthz", timeout=5):
                return
        except (OSError, RuntimeError):
            assert time.monotonic() < deadline
            time.sleep(0.5)
