"""What this package uses of Ray that Ray does not promise to keep; there is no public way to any of it.

Knows Ray's own modules, which it imports when they are asked for; tests/test_ray_private.py says for each what would
break here if Ray changes it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def machine_cores() -> int:
    """Cores of this machine as Ray counts them, which heeds a container's limit."""
    from ray._private.utils import get_num_cpus

    return int(get_num_cpus())


def local_gpus() -> int:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, as Ray counts them: through NVML, without CUDA."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    assert manager is not None
    visible = manager.get_current_process_visible_accelerator_ids()
    found = manager.get_current_node_num_accelerators()
    return found if visible is None else min(found, len(visible))


def local_card_bytes() -> int | None:
    """Memory of the smallest GPU of this machine that is visible, through NVML, without CUDA; None: not known."""
    from ray._private.thirdparty import pynvml  # nvidia-ml-py, as Ray carries it

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        numbers = range(pynvml.nvmlDeviceGetCount()) if visible is None else map(int, visible.split(","))
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]
        return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles), default=None)
    except (pynvml.NVMLError, ValueError):  # no NVIDIA driver, or cards named by UUID or as parts of one
        return None


def read_authentication_again() -> None:
    """Ray reads RAY_AUTH_MODE and the token's variables when it is imported, and the token once."""
    import ray._private.authentication.authentication_token_setup as setup

    setup.Config.initialize("")
    setup.AuthenticationTokenLoader.instance().reset_cache()


def refuses_token(address: str) -> bool:
    """Whether the cluster asks for a token that this process does not have.

    ray.init() would try for 20 s, with a line on stderr in each of them, and then not say why it could not connect.
    """
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError, RayError

    with _stderr_closed():
        try:
            ensure_token_if_auth_enabled(None, create_token_if_missing=False)  # GcsClient ends the process without one
            GcsClient(address=address)
        except AuthenticationError:
            return True
        except (RayError, RuntimeError):  # for ray.init() to tell
            return False
    return False


def found_address() -> str | None:
    """The head node that ray.init("auto") would join, as host:port; None: it finds none, and says so itself."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address("auto")
    except (ConnectionError, RuntimeError, ValueError):
        return None


@contextmanager
def _stderr_closed() -> Iterator[None]:
    """Within the block nothing comes out of stderr, what libraries write past Python included."""
    try:
        os.fstat(2)
    except OSError:  # it is closed already
        yield
        return
    earlier, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(earlier, 2)
        os.close(earlier)
        os.close(nowhere)


@contextmanager
def loopback_stays() -> Iterator[None]:
    """Within the block Ray takes 127.0.0.1 as it is given.

    Else it puts the machine's address on the network in its place, except on macOS and Windows. A Ray whose node is
    127.0.0.1 binds all of its ports there.
    """
    from ray._private import ray_constants

    earlier, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = earlier


@contextmanager
def few_processes() -> Iterator[None]:
    """Within the block Ray starts none of what a local Ray has no use for, which takes seconds of processor.

    That is its dashboard's server, its autoscaler, what forwards lines of logs to the driver, and a worker per core
    that no replica could take over, because replicas have an environment of their own.

    The dashboard's agent listens on a port that is free, not on Ray's 52365: the head node of a cluster that is started
    on this machine meanwhile needs that one, and without it takes no jobs.
    """
    from ray._private import node, parameter

    parameters: Any = parameter  # its types do not foresee this
    head: Any = node.Node
    asked, server = parameters.RayParams, head.start_api_server
    parameters.RayParams = partial(asked, include_log_monitor=False, no_monitor=True, dashboard_agent_listen_port=0)
    head.start_api_server = lambda self, **_: None
    try:
        yield
    finally:
        parameters.RayParams, head.start_api_server = asked, server


def kuberay_config(name: str, namespace: str) -> dict[str, Any]:
    """What KubeRay's autoscaler knows of a RayCluster."""
    from ray.autoscaler._private.kuberay.autoscaling_config import AutoscalingConfigProducer

    config: dict[str, Any] = AutoscalingConfigProducer(name, namespace)()
    return config
