"""Connecting to Ray, and what the cluster has to give.

Knows addresses, authentication, node sizes and how a replica is placed; knows nothing about scans. Nothing here
initialises CUDA: GPUs are counted from what Ray's nodes report.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.exceptions import AuthenticationError

import mathinterp
from mathinterp.cluster.local_session import LOOPBACK, ended_with_driver, own_token, signals_kept
from mathinterp.cluster.places import Placement, threads_for
from mathinterp.cluster.ray_private import (
    few_processes,
    found_address,
    kuberay_config,
    local_gpus,
    loopback_stays,
    refuses_token,
)
from mathinterp.cluster.temporary import ray_folder, require_scratch
from mathinterp.errors import UserError, first_line_of
from mathinterp.gates import shortened, whole
from mathinterp.text import one_line

logger = logging.getLogger(__name__)

PROCESS_BYTES = 2**30  # memory of a replica beside its weights, about: Python, torch, the clean pass of a small model
LOCAL_OBJECT_STORE = 256 * 2**20  # bytes beside carried weights: for prompts; a container's /dev/shm may be small
SETTINGS = b"\x04"  # type of the frame that a server of HTTP/2 sends first, in byte 3
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + b"\0\0\0\0\0"  # with settings of none
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the driver of a submitted job
KUBERAY = ("RAY_CLUSTER_NAME", "RAY_CLUSTER_NAMESPACE")  # set by KubeRay in its pods
BOOTSTRAP_FILE = Path("~/ray_bootstrap_config.yaml")  # written by `ray up` on the head node


def existing_cluster(address: str | None) -> str | None:
    """The cluster to join: ``address``, else that of RAY_ADDRESS (set in a submitted job); None: start a local Ray."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


@contextmanager
def connection(address: str | None, carried_bytes: int = 0) -> Iterator[None]:
    """Be connected to Ray inside the block.

    Args:
        address: ``host:port`` or "auto" of a running cluster; None: the cluster of RAY_ADDRESS if that is set, else a
            local Ray that lives as long as the block and answers this process and its workers alone. A cluster is
            joined as the environment says (RAY_AUTH_MODE). A connection that is already there is used and left open.
        carried_bytes: of weights that will travel through the object store of a local Ray.
    Raises:
        UserError: no cluster answers at ``address``, or there is no folder that a local Ray could use.
    """
    if ray.is_initialized():
        yield
        return
    cluster = existing_cluster(address)
    require_scratch()
    with ExitStack() as stack:
        if cluster is None:
            stack.enter_context(ray_folder())
            stack.enter_context(own_token())
            stack.enter_context(ended_with_driver())
        stack.callback(ray.shutdown)
        with signals_kept():
            if cluster is None:
                _start_local(carried_bytes)
            else:
                attach(cluster)
        yield


def _start_local(carried_bytes: int) -> None:
    """A quiet Ray of this machine alone, which nothing on the network can reach."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with loopback_stays(), few_processes():
        ray.init(
            address="local",
            num_gpus=local_gpus(),
            include_dashboard=False,
            object_store_memory=LOCAL_OBJECT_STORE + carried_bytes,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _node_ip_address=LOOPBACK,
            _system_config={"prestart_worker_first_driver": False},
        )


def _require_listener(address: str) -> None:
    """Ray itself would try for minutes to reach a head node that is not there."""
    host, _, port = address.rpartition(":")
    try:
        port_number = whole(port if host else "", 1, 65535)
    except ValueError:
        raise UserError(
            f"`address` {shortened(address)}: give host:port of the head node, for example 10.0.0.1:6379, or 'auto'"
        ) from None
    try:
        with socket.create_connection((host, port_number), timeout=10) as connection:
            answer = _greeted(connection)
    except (OSError, UnicodeError) as error:  # the second: a host that is no name
        raise UserError(
            f"no Ray cluster answers at {address} ({error}); is the head node up, is the port its 6379?"
        ) from error
    if answer and answer[3:4] != SETTINGS and "RAY_USE_TLS" not in os.environ:
        raise UserError(f"no Ray cluster answers at {address} but another server; give the head node's port 6379")
    if refuses_token(address):
        raise asks_for_token(address)


def _greeted(connection: socket.socket) -> bytes:
    """The first bytes that a server answers to the greeting of HTTP/2, which is gRPC's; none if it does not answer."""
    try:
        connection.sendall(GREETING)
        return connection.recv(9)
    except OSError:
        return b""


def asks_for_token(address: str) -> UserError:
    """What to do where a cluster refuses whoever has not its token."""
    return UserError(
        f"the cluster at {address} asks for a token: set RAY_AUTH_MODE=token and put the cluster's token into"
        " ~/.ray/auth_token (`ray get-auth-token` on the head node shows it)"
    )


def attach(address: str) -> None:
    """Join a running cluster, bringing this package unless the driver is a job whose upload holds it already.

    Raises:
        UserError: not an address that a driver can join, or nothing answers there.
    """
    if address.startswith(("ray://", "http://", "https://")):
        raise UserError(
            f"`address` {address}: give host:port of the head node (6379), run on a node of the cluster;"
            " from elsewhere use 'mathinterp submit'"
        )
    if head := found_address() if address == "auto" else address:
        _require_listener(head)
    package = {"py_modules": [str(Path(mathinterp.__file__).parent)], "excludes": ["**/__pycache__"]}
    try:
        with loopback_stays() if address.startswith(f"{LOOPBACK}:") else nullcontext():
            ray.init(
                address=address,
                runtime_env=None if JOB_VARIABLE in os.environ else package,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
    except AuthenticationError as error:  # the mode says token, and there is none here
        raise asks_for_token(address) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        if AuthenticationError.__name__ in str(error.__cause__ or error.__context__):
            raise asks_for_token(address) from error
        raise UserError(f"no Ray cluster could be joined at '{address}': {first_line_of(error)}") from error


def gpus_each(asked: float | None) -> float:
    """GPUs of one replica: as asked, else 1 if there are any; on the connected cluster, or on this machine.

    Raises:
        UserError: no node has as many.
    """
    largest = largest_node("GPU") if ray.is_initialized() else local_gpus()
    if asked is None:
        return 1 if largest else 0
    if asked < 0:
        raise UserError(f"`gpus_per_replica` {asked:g}: give 0 for CPU, a fraction of a GPU, or a whole number")
    if asked > 1 and asked != int(asked):
        raise UserError(
            f"`gpus_per_replica` {asked:g}: layers lie on whole GPUs; give a whole number, or a fraction of one"
        )
    if asked > largest:
        raise UserError(f"`gpus_per_replica` {asked:g}: no node has that many GPUs, the most is {largest:g}")
    return asked


def place(replicas: int | None, gpus: float, shards: int, model_bytes: int) -> Placement:
    """Decide how many replicas there are and what each reserves; Ray must be connected.

    Default: as many as there are GPUs for (or as the autoscaler may add). On CPU as many as cores have threads for
    (one a core, for a small model, whose small matrices more threads speed up little), while copies of the model leave
    half of the memory free. Never more than shards.

    Args:
        replicas: as asked, or None.
        gpus: of one replica, from gpus_each.
        shards: how many there are to run.
        model_bytes: of the weights of all models that a replica holds.
    """
    if replicas is not None and replicas < 1:
        raise UserError(f"`replicas` {replicas}: at least one replica is needed")
    cpus = cluster_total("CPU")
    threads = 1 if gpus else threads_for(model_bytes, int(largest_node("CPU")))
    if gpus:
        most = room_for(gpus)
    else:
        most = int(min(cpus / threads, cluster_total("memory") / 2 / (model_bytes + PROCESS_BYTES)))
    count = max(1, min(most if replicas is None else replicas, shards))
    return Placement(
        replicas=count,
        gpus=gpus,
        cpus=1 if count <= cpus else 0,  # more replicas than cores share them rather than wait for each other
        threads=threads,
    )


def room_for(gpus: float) -> int:
    """How many replicas have room, of so many GPUs, or with a CPU core each; with nodes that the autoscaler may add."""
    if not gpus:
        return int(cluster_total("CPU"))
    return int(cluster_total("GPU") / gpus) if gpus <= 1 else replicas_of_several(int(gpus))


def replicas_of_several(gpus: int) -> int:
    """How many replicas of so many GPUs the nodes hold, each on one node; or may hold, with the autoscaler's."""
    now = sum(int(node["Resources"].get("GPU", 0)) // gpus for node in ray.nodes() if node["Alive"])
    return max(now, sum(int(resources.get("GPU", 0)) // gpus * count for resources, count in node_groups()))


def largest_node(resource_name: str) -> float:
    """The most of a resource that any node has, or any that the autoscaler may add."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes += [resources for resources, _ in node_groups()]
    return max((float(node.get(resource_name, 0)) for node in nodes), default=0.0)


def cluster_total(resource_name: str) -> float:
    """How much of a resource the cluster has, or may grow to within its autoscaler's limits, whichever is more."""
    now: float = ray.cluster_resources().get(resource_name, 0.0)
    return max(now, sum(float(resources.get(resource_name, 0)) * count for resources, count in node_groups()))


def node_groups() -> list[tuple[dict[str, Any], int]]:
    """(resources, most nodes) of each node type that the autoscaler of this cluster may add; empty without one.

    Read from the file that the cluster launcher leaves on the head node, where a driver or a job runs; on Kubernetes
    asked of KubeRay, see ``_kuberay_config``.
    """
    path = BOOTSTRAP_FILE.expanduser()
    config = yaml.safe_load(path.read_text()) if path.is_file() else _kuberay_config(*map(os.environ.get, KUBERAY))
    limit = config.get("max_workers", 0)
    types = config.get("available_node_types", {})
    return [(kind.get("resources", {}), min(kind.get("max_workers", limit), limit)) for kind in types.values()]


@cache
def _kuberay_config(name: str | None, namespace: str | None) -> dict[str, Any]:
    """What KubeRay's autoscaler knows of the RayCluster that this pod belongs to; the head's account may read it."""
    if not name or not namespace:
        return {}
    try:
        return kuberay_config(name, namespace)
    except Exception as error:  # no right to it where there is no autoscaler, or no answer
        logger.warning(
            f"RayCluster {name} cannot be read ({one_line(repr(error))}): only nodes that are there already count"
        )
        return {}
