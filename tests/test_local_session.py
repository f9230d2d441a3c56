"""A local Ray is private: ports on loopback alone, a token of its own, and nothing of it outlives its driver."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mathinterp.cluster.local_session import LOOK_SECONDS

pytestmark = pytest.mark.ray

DRIVER = """
import json, os, sys, psutil, ray
from mathinterp.cluster.ray_cluster import connection

class Replica:
    def here(self):
        return os.getpid(), os.environ["RAY_AUTH_MODE"], os.environ.get("RAY_AUTH_TOKEN", "")

with connection("local"):
    replica = ray.remote(Replica).options(num_cpus=0).remote()
    pid, mode, token = ray.get(replica.here.remote(), timeout=60)
    below = {process.pid for process in [psutil.Process(), *psutil.Process().children(recursive=True)]}
    ports = [c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in below]
    address = ray.get_runtime_context().gcs_address
    print(json.dumps([pid, mode, token, address, ports]), flush=True)
    sys.stdin.readline()
print(json.dumps(sorted(name for name in os.environ if name.startswith("RAY_AUTH"))), flush=True)
"""
CLIENT = """
import sys, ray
from mathinterp.cluster.ray_cluster import attach
attach(sys.argv[1])
print(ray.get(ray.remote(num_cpus=0)(lambda: "ran").remote(), timeout=30))
"""


def environment(home: Path, **auth: str) -> dict[str, str]:
    """This one's, with a home of its own and nothing said of Ray but ``auth``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**own, "HOME": str(home), "OMP_NUM_THREADS": "1", **auth}


@contextmanager
def driver(home: Path, **auth: str) -> Iterator[tuple[subprocess.Popen, list[Any]]]:
    """A process with a local Ray, and what it says about it; it goes on as long as its standard input is open."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], env=environment(home, **auth), text=True, cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)


def test_strangers_are_refused(tmp_path):
    with driver(tmp_path, RAY_AUTH_MODE="token") as (process, (_, mode, token, address, ports)):
        assert (mode, len(token)) == ("token", 64)
        assert len(ports) > 5
        assert {host.removeprefix("::ffff:") for host, _ in ports} == {"127.0.0.1"}
        assert 52365 not in {port for _, port in ports}  # of the head node of a cluster, which takes no jobs without it
        for host in other_addresses():
            for _, port in ports:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((host, port), timeout=5)
        said = clients(tmp_path, address, {
            "none": {"RAY_AUTH_MODE": "disabled"},
            "wrong": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "y" * 64},
            "missing": {"RAY_AUTH_MODE": "token"},
            "right": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
        })  # fmt: skip
        assert said["right"][:2] == (0, "ran\n")
        for kind in ("none", "wrong", "missing"):
            assert said[kind][:2] == (1, "")
            assert f"UserError: the cluster at {address} asks for a token: set RAY_AUTH_MODE=token" in said[kind][2]
            assert "gcs_client.cc" not in said[kind][2]  # where Ray tries for 20 s
        commands = [" ".join(one.cmdline()) for one in psutil.Process(process.pid).children(recursive=True)]
        assert not any(token in command for command in commands)
        process.stdin.close()
        assert json.loads(process.stdout.readline()) == ["RAY_AUTH_MODE"]
        assert process.wait(30) == 0
    assert not (tmp_path / ".ray").exists()


def clients(home: Path, address: str, kinds: dict[str, dict[str, str]]) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors of drivers that would run a task at ``address``, side by side."""
    quick = {"RAY_gcs_rpc_server_connect_timeout_s": "5"}
    started = {
        kind: subprocess.Popen(
            [sys.executable, "-c", CLIENT, address], env=environment(home, **auth, **quick), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1],
        )
        for kind, auth in kinds.items()
    }  # fmt: skip
    said = {kind: one.communicate(timeout=120) for kind, one in started.items()}
    return {kind: (one.returncode, *said[kind]) for kind, one in started.items()}


def other_addresses() -> list[str]:
    """IPv4 addresses of this machine beside loopback."""
    found = [
        each.address for all_of in psutil.net_if_addrs().values() for each in all_of if each.family == socket.AF_INET
    ]
    return [address for address in found if not address.startswith("127.")]


def test_nothing_outlives_a_killed_driver_even_a_stopped_replica(tmp_path):
    with driver(tmp_path, RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="x" * 64) as (process, (replica, mode, token, *_)):
        assert mode == "token"  # what is said of clusters is not for a Ray of our own
        assert token.count("x") == 0
        below = psutil.Process(process.pid).children(recursive=True)
        assert {"ray::DashboardAgent", "raylet"} <= {one.name() for one in below}
        assert "ray::IDLE" not in {one.name() for one in below}
        started = " ".join(word for one in below for word in one.cmdline())
        assert "raylet" in started
        assert not [useless for useless in ("/log_monitor.py", "/monitor.py", "/dashboard.py") if useless in started]
        time.sleep(LOOK_SECONDS + 1)  # what is younger ends with Ray's own means
        os.kill(replica, signal.SIGSTOP)
        process.kill()
        deadline = time.monotonic() + 20
        while (left := [one.name() for one in below if runs(one)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == []


def runs(process: psutil.Process) -> bool:
    """Whether it is there and not merely waits to be asked how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
