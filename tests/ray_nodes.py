"""A Ray of several nodes on this machine, for tests that kill one of them."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from mathinterp.cluster.ray_private import few_processes
from mathinterp.cluster.temporary import ray_folder

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@contextmanager
def ray_nodes() -> Iterator[Cluster]:
    """A head node with one CPU in this process tree, which is connected; tests may add nodes (NODE)."""
    earlier = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    # A dead raylet is noticed by its missing answers, by default after some 15 s, and its workers go on till then.
    noticing = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 4,
        "prestart_worker_first_driver": False,
    }
    head = {**NODE, "include_dashboard": False, "_system_config": noticing}
    with few_processes(), ray_folder():  # also where the tests' own temporary folder is a long one
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
        ray.shutdown()
        cluster.shutdown()
    os.environ.pop("RAY_AUTH_MODE")
    os.environ.update({} if earlier is None else {"RAY_AUTH_MODE": earlier})
