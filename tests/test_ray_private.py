"""What this package uses of Ray's inside: where one of these fails, Ray has changed; its name says what breaks."""

import inspect
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import ray

import mathinterp
from mathinterp.cluster import ray_cluster, ray_private
from mathinterp.cluster.submit import EXCLUDES, measure_upload
from mathinterp.errors import UserError

PACKAGE = Path(mathinterp.__file__).parent
PRIVATE = re.compile(r"\bray\.(?:\w+\.)*_private\b")


def test_all_of_it_is_in_one_file() -> None:
    using = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if PRIVATE.search(file.read_text())}
    assert using == {"cluster/ray_private.py"}


def test_threads_of_a_replica_follow_from_the_cores_that_ray_counts() -> None:
    """``machine_cores``: without it runs in this process and on Ray have other threads, and so other last bits."""
    assert 1 <= ray_private.machine_cores() <= multiprocessing.cpu_count()


def test_gpus_are_counted_without_cuda_as_cuda_visible_devices_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """``local_gpus``: without it every local Ray would have no GPU, or too many."""
    from ray._private.accelerators import nvidia_gpu

    kind = nvidia_gpu.NvidiaGPUAcceleratorManager
    monkeypatch.setattr(kind, "get_current_node_num_accelerators", staticmethod(lambda: 4))
    for visible, count in ((None, 4), ("0,2", 2), ("", 0), ("0,1,2,3,4,5", 4)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert ray_private.local_gpus() == count


def test_memory_of_the_smallest_visible_card_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """``local_card_bytes``: without it weights that fit no card are found out only after they were loaded."""
    from ray._private.thirdparty import pynvml

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda number: number)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda number: type("Memory", (), {"total": 10 - number}))
    assert ray_private.local_card_bytes() == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert ray_private.local_card_bytes() == 9
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    assert ray_private.local_card_bytes() is None


def test_the_way_a_local_ray_is_told_its_own_token_and_address_is_still_there() -> None:
    """``read_authentication_again``, ``loopback_stays``: without them a local Ray takes the token of a cluster, or can
    be reached from the network. That they work, tests/test_local_session.py shows on a Ray.
    """
    from ray._private import ray_constants

    earlier = ray_constants.ENABLE_RAY_CLUSTER
    with ray_private.loopback_stays():
        assert ray_constants.ENABLE_RAY_CLUSTER is False
    assert earlier == ray_constants.ENABLE_RAY_CLUSTER
    ray_private.read_authentication_again()


def test_a_cluster_can_be_asked_whether_it_takes_our_token() -> None:
    """``refuses_token``: else a wrong token costs 20 s and as many lines. tests/test_local_session.py shows it."""
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import GcsClient

    assert callable(GcsClient)
    assert list(inspect.signature(ensure_token_if_auth_enabled).parameters)[1] == "create_token_if_missing"


def test_the_cluster_of_auto_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """``found_address``: else `auto` with a wrong token, or where a head node is gone, costs Ray's 20 s and more."""
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: "10.1.2.3:6379")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_private.found_address() == "10.1.2.3:6379"
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: None)
    assert ray_private.found_address() is None
    monkeypatch.setenv("RAY_ADDRESS", "10.4.5.6:6379")
    assert ray_private.found_address() == "10.4.5.6:6379"


def test_the_cluster_of_auto_is_asked_as_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **given: pytest.fail("Ray is asked"))
    monkeypatch.setattr(ray_cluster, "found_address", lambda: "127.0.0.1:1")
    with pytest.raises(UserError, match=r"^no Ray cluster answers at 127\.0\.0\.1:1 .*refused"):
        ray_cluster.attach("auto")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(ray_cluster, "found_address", lambda: address)
        monkeypatch.setattr(ray_cluster, "_greeted", lambda connection: b"")
        monkeypatch.setattr(ray_cluster, "refuses_token", lambda asked: asked == address)
        with pytest.raises(UserError, match=f"^the cluster at {address} asks for a token"):
            ray_cluster.attach("auto")


def test_nothing_is_written_past_python_and_a_closed_stderr_stays_closed() -> None:
    code = """
import os
from mathinterp.cluster.ray_private import _stderr_closed
with _stderr_closed():
    os.write(2, b"past Python")
os.write(2, b"after")
os.close(2)
with _stderr_closed():
    pass
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("went on\n", "after")


def test_the_way_a_local_ray_is_told_what_not_to_start_is_still_there() -> None:
    """That it is obeyed: tests/test_local_session.py looks at the processes."""
    from ray._private import node, parameter

    params, server = parameter.RayParams, node.Node.start_api_server
    with ray_private.few_processes():
        told = parameter.RayParams()
        assert (told.include_log_monitor, told.no_monitor) == (False, True)
        assert told.dashboard_agent_listen_port == 0  # one that is free
        assert node.Node.start_api_server is not server
    assert (parameter.RayParams, node.Node.start_api_server) == (params, server)


def test_kuberay_is_asked_by_name_and_namespace() -> None:
    """``kuberay_config``: without it no replicas are planned on nodes that KubeRay may add."""
    from ray.autoscaler._private.kuberay.autoscaling_config import AutoscalingConfigProducer

    assert list(inspect.signature(AutoscalingConfigProducer.__init__).parameters)[1:3] == [
        "ray_cluster_name", "ray_cluster_namespace",
    ]  # fmt: skip


def test_an_upload_holds_what_rays_own_packing_would_send(tmp_path: Path) -> None:
    """cluster/uploads.py: where they differ, ``submit`` sends what `ray job submit` would not, or leaves files out."""
    from ray._private.runtime_env.packaging import create_package

    ignored = {
        ".gitignore": "*.log\n!kept.log\nbuild/\n/top\ndata/*\n# comment\n\n",
        ".rayignore": "weights*\n**/deep/*.bin\n",
        "a/.gitignore": "*.txt\n!b.txt\nbuild\n",
        "a/c/.rayignore": "/only\nspaced name\n",
        "venv/.gitignore": "*\n",
    }
    files = [
        "x.log", "kept.log", "a/kept.log", "build/x", "a/build/x", "b/build", "top", "a/top", "data/x", "a/data/x",
        "weights.bin",
        "a/weights/y", "deep/x.bin", "a/b/deep/x.bin", "a/b/deep/x.py", "a/a.txt", "a/b.txt", "b.txt", "a/c/only",
        "a/only",
        "a/c/d/only", "a/c/spaced name", "venv/lib/x.py", "pkg.egg-info/PKG", "__pycache__/x", "a/__pycache__/x",
        ".hidden/x",
        "a/.hidden", "äöü/ß.py", "[1]/x*.py",
    ]  # fmt: skip
    for name, text in {**ignored, **dict.fromkeys(files, "x")}.items():
        (tmp_path / "job" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "job" / name).write_text(text)
    (tmp_path / "job" / "empty").mkdir()
    theirs, ours = tmp_path / "theirs.zip", tmp_path / "ours.zip"
    create_package(str(tmp_path / "job"), theirs, include_gitignore=True, excludes=list(EXCLUDES))
    measure_upload(tmp_path / "job", archive=ours)
    with ZipFile(theirs) as expected, ZipFile(ours) as found:
        assert sorted(found.namelist()) == sorted(expected.namelist())
        assert "empty/" in found.namelist()
        assert {"kept.log", "a/b.txt", "a/c/d/only"} & {*found.namelist()}
    assert os.path.getsize(ours) == os.path.getsize(theirs), "packed as Ray packs, so that its limit is ours"
