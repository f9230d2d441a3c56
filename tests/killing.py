"""Kill -9 of a command's driver in the middle of its run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

from mathinterp.cluster.ray_cluster import connection

FINISHED = 2  # shards that the driver has heard of when it dies; its replica holds two more at most
DOOMED = """
import os, signal, sys
from mathinterp.cli.main import main
from mathinterp.cluster.progress import ScanProgress

table, count, heard, finished = sys.argv[1], int(sys.argv[2]), [], ScanProgress.finished

def die_after(progress, event):
    finished(progress, event)
    heard.append(event.shard.table)
    if heard.count(table) == count:
        os.kill(os.getpid(), signal.SIGKILL)

ScanProgress.finished = die_after
main(sys.argv[3:])
"""


@contextmanager
def joinable_ray() -> Iterator[dict[str, str]]:
    """A Ray of this machine, and the environment of drivers that join it as a submitted job does."""
    with connection(None):
        address = ray.get_runtime_context().gcs_address
        yield {**os.environ, "RAY_ADDRESS": address, "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "OMP_NUM_THREADS": "1"}


def kill_midway(environment: Mapping[str, str], table: str, words: Sequence[str], store: Path) -> int:
    """Run the command until its driver has heard of FINISHED shards of ``table``; returns how many files there are.

    The files are counted when the driver's replicas are gone: until Ray ends them they go on with what they hold.
    """
    command = [sys.executable, "-c", DOOMED, table, str(FINISHED), *words]
    killed = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    wait_for_end_of_replicas()
    return len(list(store.glob(f"{table}/run_id=*/shard-*.parquet")))


def wait_for_end_of_replicas(seconds: float = 60) -> None:
    """Until the Ray of this process has no replica of a driver that is a process of its own."""
    deadline = time.monotonic() + seconds
    while replicas := [one.name() for one in psutil.Process().children(recursive=True) if is_replica(one)]:
        assert time.monotonic() < deadline, replicas
        time.sleep(0.05)


def is_replica(process: psutil.Process) -> bool:
    """Whether it holds a ``Replica``, as Ray names processes after the class of their actor."""
    try:
        return process.name().startswith("ray::Replica") and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
