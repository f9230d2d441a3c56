"""What a run on Ray tells a monitoring system: Ray's metrics, in Prometheus as ``ray_mathinterp_...``.

The driver tells all of it, as it alone knows the queue, and hears from replicas what they took. Nothing of it decides
anything. A warm service tells its own (service/metrics.py). docs/operations.md says how to look at it;
deploy/grafana/mathinterp.json is a dashboard.
"""

import time
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
REPEAT_SECONDS = 5.0  # Ray exports a gauge once for each time that it is set, and forgets it 20 s later
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
        self._told: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}  # gauges: name and tags -> last value
        self._repeated = time.monotonic()

    def count(self, name: str, by: float = 1, **tags: str) -> None:
        """Add to a counter."""
        if by:
            self._metrics[name].inc(by, tags=tags)

    def tell(self, name: str, value: float, **tags: str) -> None:
        """Set a gauge; nothing is done where it has this value."""
        which = (name, frozenset(tags.items()))
        if self._told.get(which) != value:
            self._told[which] = value
            self._metrics[name].set(value, tags=tags)

    def forget(self, name: str, **tags: str) -> None:
        """Let a gauge go: what it told of is no longer there."""
        self._told.pop((name, frozenset(tags.items())), None)

    def repeat(self) -> None:
        """Set every gauge again that was set, so that it stays visible; at most every REPEAT_SECONDS."""
        if time.monotonic() - self._repeated >= REPEAT_SECONDS:
            for (name, tags), value in self._told.items():
                self._metrics[name].set(value, tags=dict(tags))
            self._repeated = time.monotonic()


class Metrics(Observer):
    """An observer of the dispatch loop.

    Args:
        evaluations: shard key -> forward evaluations in it.
        run: values of the tags RUN.
        tokens: that one evaluation reads, on average over the run's prompts, up to what predicts the last scored token.
    """

    def __init__(self, evaluations: Mapping[str, int], run: Mapping[str, str], tokens: float):
        self._evaluations, self._tokens = evaluations, tokens
        self._processes: dict[int, dict[str, str]] = {}  # slot -> tags of the replica that last finished a shard there
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
            self._processes[event.slot] = {"node": receipt.node, "pid": str(receipt.pid)}
            self._series.tell("replica_memory_bytes", receipt.peak_memory, **self._processes[event.slot])

    def retried(self, shard: Shard, why: str) -> None:
        """Count it."""
        self._series.count("retries", why=why)

    def given_up(self, shard: Shard) -> None:
        """Count it."""
        self._series.count("shards_given_up")

    def lost(self, slot: int) -> None:
        """Count it, and let its memory go."""
        self._series.count("replicas_lost")
        self._series.forget("replica_memory_bytes", **self._processes.pop(slot, {}))

    def queue(self, waiting: int, running: int) -> None:
        """Tell the depth of the queue."""
        self._series.tell("shards_waiting", waiting)
        self._series.tell("shards_running", running)

    def tick(self, ready: int, waiting: int) -> None:
        """Tell the numbers of replicas, and repeat what has not changed."""
        self._series.tell("replicas_ready", ready)
        self._series.tell("replicas_starting", waiting)
        self._series.repeat()
