"""What a run on Ray tells a monitoring system: Ray's metrics, in Prometheus as ``ray_mathinterp_...``.

The driver tells all of it, as it alone knows the queue, and hears from replicas what they took. Nothing of it decides
anything. A warm service tells its own (service/metrics.py). docs/operations.md says how to look at it;
deploy/grafana/mathinterp.json is a dashboard.
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
    "prompt_tokens": "Evaluations, each times the tokens that its prompt has on average: what plain passes would read.",
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


class Series:
    """Counters and gauges by their names, all of which have some tags in common.

    Args:
        counters, gauges: name -> what it says.
        common: the tags of all, and their values.
        further: name -> tags that it has beside them.
    """

    def __init__(
        self, counters: Mapping[str, str], gauges: Mapping[str, str], common: Mapping[str, str],
        further: Mapping[str, tuple[str, ...]],
    ):  # fmt: skip
        self._metrics: dict[str, Any] = {
            name: kind(PREFIX + name, help, tag_keys=(*common, *further.get(name, ()))).set_default_tags(dict(common))
            for kind, metrics in ((Counter, counters), (Gauge, gauges))
            for name, help in metrics.items()
        }
        self._told: dict[tuple[str, ...], float] = {}  # gauges, which are set only when they change

    def count(self, name: str, by: float = 1, **tags: str) -> None:
        """Add to a counter."""
        if by:
            self._metrics[name].inc(by, tags=tags)

    def tell(self, name: str, value: float, **tags: str) -> None:
        """Set a gauge."""
        which = (name, *tags.values())
        if self._told.get(which) != value:
            self._told[which] = value
            self._metrics[name].set(value, tags=tags)


class Metrics(Observer):
    """An observer of the dispatch loop.

    Args:
        evaluations: shard key -> forward evaluations in it.
        run: values of the tags RUN.
        tokens: that one evaluation reads, on average over the run's prompts, up to what predicts the last scored token.
    """

    def __init__(self, evaluations: Mapping[str, int], run: Mapping[str, str], tokens: float):
        self._evaluations, self._tokens = evaluations, tokens
        self._series = Series(COUNTERS, GAUGES, run, TAGS)
        seconds = Histogram(PREFIX + SHARD_SECONDS, "Seconds that shards took.", BOUNDARIES, RUN)
        self._seconds = seconds.set_default_tags(dict(run))

    def __exit__(self, *error: object) -> None:
        """Nothing waits or runs any more."""
        self.queue(0, 0)
        self.tick(0, 0)

    def finished(self, event: Finished) -> None:
        """Count a shard and what it took."""
        receipt, evaluations = event.receipt, self._evaluations[event.shard.key]
        self._series.count("shards_finished")
        self._series.count("evaluations", evaluations)
        self._series.count("prompt_tokens", evaluations * self._tokens)
        self._series.count("rows", receipt.rows)
        if receipt.pid:  # else its file was found, and nobody knows what it took
            self._seconds.observe(receipt.seconds)
            self._series.tell("replica_memory_bytes", receipt.peak_memory, node=receipt.node, pid=str(receipt.pid))

    def retried(self, shard: Shard, why: str) -> None:
        """Count it."""
        self._series.count("retries", why=why)

    def given_up(self, shard: Shard) -> None:
        """Count it."""
        self._series.count("shards_given_up")

    def lost(self) -> None:
        """Count it."""
        self._series.count("replicas_lost")

    def queue(self, waiting: int, running: int) -> None:
        """Tell the depth of the queue."""
        self._series.tell("shards_waiting", waiting)
        self._series.tell("shards_running", running)

    def tick(self, ready: int, waiting: int) -> None:
        """Tell the numbers of replicas."""
        self._series.tell("replicas_ready", ready)
        self._series.tell("replicas_starting", waiting)
