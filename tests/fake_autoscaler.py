"""A head node whose autoscaler adds and removes nodes on this machine: Ray's FakeMultiNodeProvider.

Beside ray.cluster_utils.AutoscalingCluster, which begins by stopping every Ray of the machine.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider

from mathinterp.cluster.temporary import usable_folder
from tests.job_service import free_ports

HEAD = "ray.head.default"


class LateNodes(FakeMultiNodeProvider):
    """Every node but the first comes only when there is a file of ``provider["late_until"]``, a pattern."""

    def _create_node_with_resources_and_labels(self, *words: Any) -> None:  # in a thread of its own
        pattern = self.provider_config["late_until"]
        while pattern and len(self._nodes) > 1 and not glob(pattern):  # the head node is one of them
            time.sleep(0.2)
        super()._create_node_with_resources_and_labels(*words)


def config(address: str, workers: dict[str, Any], idle_seconds: float, late_until: str) -> dict[str, Any]:
    """What `ray up` would leave on the head node."""
    return {
        "cluster_name": "fake",
        "max_workers": sum(kind["max_workers"] for kind in workers.values()),
        "idle_timeout_minutes": idle_seconds / 60,
        "upscaling_speed": 10.0,
        "provider": {  # by its module: Ray's wheel lacks the defaults of the type "fake_multinode"
            "type": "external",
            "module": "tests.fake_autoscaler.LateNodes", "late_until": late_until,
            "use_node_id_as_ip": True, "disable_node_updaters": True, "gcs_address": address,
            "disable_launch_config_check": True, "launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID,
        },
        "available_node_types": {HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}, **workers},
        "head_node_type": HEAD,
        "auth": {}, "file_mounts": {}, "cluster_synced_files": [], "file_mounts_sync_continuously": False,
        "initialization_commands": [], "setup_commands": [], "head_setup_commands": [], "worker_setup_commands": [],
        "head_start_ray_commands": [], "worker_start_ray_commands": [], "rsync_exclude": [], "rsync_filter": [],
    }  # fmt: skip


@contextmanager
def autoscaling_ray(workers: dict[str, Any], idle_seconds: float, home: Path, late_until: str = "") -> Iterator[str]:
    """The address of a head node without CPUs, to which this process is connected.

    Args:
        workers: node types, as in a launcher file.
        home: where the launcher's file is left for drivers whose HOME it is.
        late_until: see LateNodes.
    """
    folder = tempfile.mkdtemp(prefix="mi", dir=usable_folder())  # short: Ray keeps sockets below it
    gcs, dashboard, agent, grpc, metrics, runtime, client = free_ports(7)
    address = f"{ray.util.get_node_ip_address()}:{gcs}"
    written = home / "ray_bootstrap_config.yaml"
    written.write_text(json.dumps(config(address, workers, idle_seconds, late_until)))
    command = [
        *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--temp-dir={folder}"),
        *(f"--port={gcs}", f"--dashboard-port={dashboard}", "--num-cpus=0", f"--autoscaling-config={written}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={grpc}"),
        *(f"--metrics-export-port={metrics}", f"--runtime-env-agent-port={runtime}", "--include-dashboard=false"),
        *(f"--ray-client-server-port={client}", "--object-store-memory=100000000", "--disable-usage-stats"),
    ]
    environment = {
        **os.environ, "RAY_AUTH_MODE": "disabled", "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "PYTHONPATH": str(Path(__file__).parents[1]),  # of LateNodes, and of experiments that tests bring
    }  # fmt: skip
    environment.pop("RAY_ADDRESS", None)
    with open(Path(folder) / "start.log", "w") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
    try:
        _connect(address, head, Path(folder) / "start.log")
        yield address
    finally:
        ray.shutdown()
        head.terminate()
        with suppress(subprocess.TimeoutExpired):
            head.wait(timeout=30)
        _end(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _connect(address: str, head: subprocess.Popen[bytes], log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while True:
        assert head.poll() is None, log.read_text()
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            return
        except (ConnectionError, RuntimeError):
            assert time.monotonic() < deadline
            time.sleep(0.5)


def _end(folder: str) -> None:
    """Kill what is left of the Ray in this folder, nodes that the autoscaler has started among it."""
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in word for word in process.info["cmdline"] or ()):
            with suppress(psutil.Error):
                process.kill()
