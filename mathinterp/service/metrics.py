"""What a warm service tells a monitoring system: Ray's metrics, in Prometheus as ``ray_mathinterp_service_...``.

The service's own process tells all of it: it looks at the router every few seconds, and hears from the front what was
computed for clients, whose own processes may know no Ray. Nothing of it decides anything. docs/operations.md lists it.
"""

import threading
from typing import Any, Self

from mathinterp.cluster.metrics import Series
from mathinterp.service.host import Answer
from mathinterp.service.router import Router
from mathinterp.service.shelf import CARD, DISK, MEMORY

LOOK_SECONDS = 2.0  # between two looks; Ray passes on what it is told every ten seconds or so
SERVICE = ("service",)  # tags of every metric
COUNTERS = {
    "service_shards": "Shards computed for clients.",
    "service_rows": "Rows in them.",
    "service_seconds": "Seconds that replicas computed for clients, shards and `ablate` (experiment: ablate).",
    "service_ablations": "Questions of `ablate` answered.",
    "service_replicas_replaced": "Replicas that died or were ended because they hung.",
}
GAUGES = {
    "service_requests_waiting": "Requests that wait for a replica.",
    "service_replicas_ready": "Replicas that have started, whether they compute or not.",
    "service_replicas_busy": "Those of them that compute.",
    "service_models": "Models on a level (card, memory, disk), summed over replicas; disk: known, and loaded by none.",
    "service_model_bytes": "Bytes of their weights.",
}
ABLATE = "ablate"
TAGS = {
    **dict.fromkeys(("service_shards", "service_rows", "service_seconds"), ("experiment",)),
    **dict.fromkeys(("service_models", "service_model_bytes"), ("level",)),
}  # further ones


class ServiceMetrics:
    """Within its ``with`` block a router is looked at; at the end nothing waits, and no replica is ready.

    Args:
        router: of the service.
        service: its node and port.
    """

    def __init__(self, router: Router, service: str):
        self._router = router
        self._series = Series(COUNTERS, GAUGES, dict.fromkeys(SERVICE, service), TAGS)
        self._replaced = 0  # that were counted
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="metrics", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._tell(waiting=0, states=[], models=[])

    def computed(self, experiment: str, answer: Answer) -> None:
        """A client is told this answer; ``experiment``: its name, or ABLATE."""
        if experiment == ABLATE:
            self._series.count("service_ablations")
        else:
            self._series.count("service_shards", experiment=experiment)
            self._series.count("service_rows", answer.rows, experiment=experiment)
        self._series.count("service_seconds", answer.facts["seconds"], experiment=experiment)

    def _look_on(self) -> None:
        self._look()
        while not self._ended.wait(LOOK_SECONDS):
            self._look()
        self._look()

    def _look(self) -> None:
        found = self._router.status()
        self._series.count("service_replicas_replaced", found["replaced"] - self._replaced)
        self._replaced = found["replaced"]
        self._tell(found["queue"], [row["state"] for row in found["replicas"]], found["models"])

    def _tell(self, waiting: int, states: list[str], models: list[dict[str, Any]]) -> None:
        self._series.tell("service_requests_waiting", waiting)
        self._series.tell("service_replicas_ready", sum(state in ("ready", "busy") for state in states))
        self._series.tell("service_replicas_busy", states.count("busy"))
        for level in (CARD, MEMORY, DISK):
            there = [row["bytes"] for row in models if row["level"] == level]
            self._series.tell("service_models", len(there), level=level)
            # copies in memory of what is on a card take memory, too
            taken = sum(row["in_memory"] for row in models) if level == MEMORY else sum(there)
            self._series.tell("service_model_bytes", taken, level=level)
        self._series.repeat()
