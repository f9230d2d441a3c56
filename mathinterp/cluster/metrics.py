"""What a run on Ray tells a monitoring system: Ray's metrics, in Prometheus as ``ray_mathinterp_...``.

The driver tells all of it, as it alone knows the queue, and hears from replicas what they took. Nothing of it decides
anything. docs/operations.md says how to look at it; deploy/grafana/mathinterp.json is a dashboard.
"""

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from mathinterp.cluster.events import Finished, Observer
from mathinterp.experiments.base import Shard

PREFIX = "mathinterp_"
RUN = ("run_id", "experiment", "model")  # tags of every metric
COUNTERS = {
    "shards_finished": "Shards whose files are written.",
    "evaluations": "Forward evaluations in them.",
    "rows": "Rows in them.",
    "retries": "Shards that ran again; why: exception, or lost with their replica.",
    "shards_given_up": "Shards that failed too often.",
    "replicas_lost": "Replicas that died or were ended because they hung.",
}
GAUGES = {
    "shards_waiting": "Shards that no replica has yet.",
    "shards_running": "Shards that are with a replica.",
    "replicas_ready": "Replicas that have loaded.",
    "replicas_starting": "Replicas that load, or wait for a machine.",
    "replica_memory_bytes": "Peak memory of a replica's last shard: of the GPU, or of the process on a CPU.",
}
SHARD_SECONDS = "shard_seconds"
TAGS: Mapping[str, tuple[str, ...]] = {"retries": ("why",), "replica_memory_bytes": ("node", "pid")}  # further ones
BOUNDARIES = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]


class Metrics(Observer):
    """An observer of the dispatch loop.

    Args:
        evaluations: shard key -> forward evaluations in it.
        run: values of the tags RUN.
    """

    def __init__(self, evaluations: Mapping[str, int], run: Mapping[str, str]):
        self._evaluations = evaluations
        self._metrics: dict[str, Any] = {
            name: kind(PREFIX + name, help, tag_keys=RUN + TAGS.get(name, ())).set_default_tags(dict(run))
            for kind, metrics in ((Counter, COUNTERS), (Gauge, GAUGES))
            for name, help in metrics.items()
        }
        seconds = Histogram(PREFIX + SHARD_SECONDS, "Seconds that shards took.", BOUNDARIES, RUN)
        self._metrics[SHARD_SECONDS] = seconds.set_default_tags(dict(run))
        self._told: dict[str, float] = {}  # gauges, which are set only when they change

    def __exit__(self, *error: object) -> None:
        """Nothing waits or runs any more."""
        self.queue(0, 0)
        self.tick(0, 0)

    def finished(self, event: Finished) -> None:
        """Count a shard and what it took."""
        receipt = event.receipt
        self._count("shards_finished")
        self._count("evaluations", self._evaluations[event.shard.key])
        self._count("rows", receipt.rows)
        if receipt.pid:  # else its file was found, and nobody knows what it took
            self._metrics[SHARD_SECONDS].observe(receipt.seconds)
            whose = {"node": receipt.node, "pid": str(receipt.pid)}
            self._metrics["replica_memory_bytes"].set(receipt.peak_memory, tags=whose)

    def retried(self, shard: Shard, why: str) -> None:
        """Count it."""
        self._metrics["retries"].inc(1, tags={"why": why})

    def given_up(self, shard: Shard) -> None:
        """Count it."""
        self._count("shards_given_up")

    def lost(self) -> None:
        """Count it."""
        self._count("replicas_lost")

    def queue(self, waiting: int, running: int) -> None:
        """Tell the depth of the queue."""
        self._tell(shards_waiting=waiting, shards_running=running)

    def tick(self, ready: int, waiting: int) -> None:
        """Tell the numbers of replicas."""
        self._tell(replicas_ready=ready, replicas_starting=waiting)

    def _count(self, name: str, by: float = 1) -> None:
        if by:
            self._metrics[name].inc(by)

    def _tell(self, **values: float) -> None:
        for name, value in values.items():
            if self._told.get(name) != value:
                self._told[name] = value
                self._metrics[name].set(value)
