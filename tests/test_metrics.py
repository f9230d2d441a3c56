"""Ray metrics of a run: what is counted, and what Prometheus sees of it; test_dashboard.py has the dashboard."""

import re
import time
from collections import Counter
from typing import Any
from urllib.request import urlopen

import pytest

from mathinterp.cluster import metrics
from mathinterp.cluster.dispatch import Dispatcher
from mathinterp.cluster.events import Finished, Observer, Observers, Receipt
from mathinterp.cluster.metrics import COUNTERS, GAUGES, PREFIX, RUN, SHARD_SECONDS, TAGS, Metrics
from mathinterp.cluster.places import Here
from mathinterp.cluster.run import run_scan
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.models.handle import Model
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.prompt import Prompt
from tests.scripted_workers import ScriptedWorkers, shards
from tests.toy_scan import ToyScan

MINE = {"run_id": "r", "experiment": "toy", "model": "m"}


class Recorded:
    """Stands for Ray's three kinds, and refuses what they refuse."""

    seen: dict[str, list[tuple[float, dict[str, str]]]] = {}  # noqa: RUF012

    def __init__(self, name: str, description: str, *more: Any, tag_keys: tuple[str, ...] = ()):
        self.name, self.tags = name, set(tag_keys or more[-1])
        assert description

    def set_default_tags(self, tags: dict[str, str]) -> "Recorded":
        self.given = tags
        return self

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        given = {**self.given, **(tags or {})}
        assert (value > 0, given.keys()) == (True, self.tags)
        self.seen.setdefault(self.name, []).append((value, given))

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        given = {**self.given, **(tags or {})}
        assert given.keys() == self.tags
        self.seen.setdefault(self.name, []).append((value, given))

    observe = set


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[float, dict[str, str]]]]:
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, Recorded)
    monkeypatch.setattr(Recorded, "seen", {})
    return Recorded.seen


def test_what_a_run_counts(recorded):
    def fate(slot, shard, nth):
        if shard.index == 5:
            return "killed" if nth == 1 else None
        return RuntimeError("bad") if shard.index == 3 else None

    pieces = shards(8)
    observer = Metrics({shard.key: 10 * shard.index for shard in pieces}, MINE, tokens=2.5)
    with observer:
        outcome = Dispatcher(ScriptedWorkers(fate), pieces, replicas=2, max_attempts=2, observer=observer).run()
    assert (len(outcome.receipts), len(outcome.failures), outcome.replicas_lost) == (7, 1, 1)
    sums = {name: sum(value for value, _ in told) for name, told in recorded.items()}
    assert sums[PREFIX + "shards_finished"] == 7
    assert sums[PREFIX + "evaluations"] == 10 * (0 + 1 + 2 + 4 + 5 + 6 + 7)
    assert sums[PREFIX + "prompt_tokens"] == 2.5 * sums[PREFIX + "evaluations"]
    assert sums[PREFIX + "shard_seconds"] == 7 * 1.0
    assert sums[PREFIX + "shards_given_up"] == sums[PREFIX + "replicas_lost"] == 1
    assert Counter(tags["why"] for _, tags in recorded[PREFIX + "retries"]) == {"exception": 1, "lost": 1}
    for gauge in ("shards_waiting", "shards_running", "replicas_ready", "replicas_starting"):
        told = [value for value, _ in recorded[PREFIX + gauge]]
        assert told[-1] == 0, gauge
        assert gauge in ("replicas_starting", "shards_waiting") or max(told) > 0, gauge
    assert all(MINE.items() <= tags.items() for told in recorded.values() for _, tags in told)


def test_several_observers_are_told_alike_and_all_end():
    heard: list[str] = []

    class Hears(Observer):
        def lost(self, slot: int) -> None:
            heard.append(f"lost {slot}")

        def __exit__(self, *error: object) -> None:
            heard.append("end")

    with Observers(Hears(), Hears()) as several:
        several.lost(3)
    assert heard == ["lost 3", "lost 3", "end", "end"]


def test_gauges_are_told_again_while_they_do_not_change(recorded, monkeypatch):
    """Ray exports a gauge once for each time that it is set, so that one set once is gone soon after."""
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    pieces = shards(2)
    observer = Metrics({shard.key: 1 for shard in pieces}, MINE, tokens=2.5)
    for slot, shard in enumerate(pieces):
        receipt = Receipt(shard.key, rows=2, seconds=1.0, node="here", pid=70 + slot, bytes=5, peak_memory=900 + slot)
        observer.finished(Finished(slot, shard, receipt))
    told: list[dict[str, list[float]]] = []
    for moment in (0.0, 1.0, 5.0, 6.0, 10.0):
        clock[0] = moment
        if moment == 10.0:
            observer.lost(0)
        recorded.clear()
        observer.queue(7, 2)
        observer.tick(2, 0)
        told.append({name.removeprefix(PREFIX): [value for value, _ in all_of] for name, all_of in recorded.items()})
    numbers = {"shards_waiting": [7], "shards_running": [2], "replicas_ready": [2], "replicas_starting": [0]}
    both = {**numbers, "replica_memory_bytes": [900, 901]}
    assert told == [numbers, {}, both, {}, {**numbers, "replica_memory_bytes": [901]}]


def test_a_run_in_this_process_has_none():
    assert Here(Model(ModelSpec("random:llama-tiny"))).observers({}, MINE, 1.0) == []


def exported() -> dict[str, tuple[str, ...]]:
    """Name in Prometheus -> labels, of every series of a run."""
    counters = {f"ray_{PREFIX}{name}_total": RUN + TAGS.get(name, ()) for name in COUNTERS}
    gauges = {f"ray_{PREFIX}{name}": RUN + TAGS.get(name, ()) for name in GAUGES}
    parts = {f"ray_{PREFIX}{SHARD_SECONDS}_{part}": RUN for part in ("sum", "count")}
    return {**counters, **gauges, **parts, f"ray_{PREFIX}{SHARD_SECONDS}_bucket": (*RUN, "le")}


@pytest.mark.ray
@pytest.mark.timeout(200)
def test_prometheus_sees_every_metric(tmp_path):
    prompts = [Prompt("p", "3 plus 5 is", "8", operation="add"), Prompt("q", "12 plus 34 is", "46", operation="add")]
    scan = ToyScan(5, 0.1, str(tmp_path), once={1: "raise"})
    store = str(tmp_path / "store")
    summary = run_scan(scan, ModelSpec("random:llama-tiny"), prompts, store, replicas=1, progress=False)
    assert summary.complete
    place = endpoint()
    never = {
        name
        for name in exported()
        if name.startswith(("ray_mathinterp_shards_given_up", "ray_mathinterp_replicas_lost"))
    }
    deadline, seen = time.monotonic() + 60, {}
    finished = "ray_mathinterp_shards_finished_total"  # counts come a part at a time, and gauges go when a run is over
    while not (exported().keys() - never <= seen.keys() and seen[finished][1] == 5) and time.monotonic() < deadline:
        time.sleep(1)
        seen |= series(scraped(place), run_id=summary.run_id)
    for name in exported().keys() - never:
        assert set(exported()[name]) <= seen[name][0].keys(), name
    assert seen[finished][1] == 5
    assert seen["ray_mathinterp_retries_total"][0]["why"] == "exception"
    assert seen["ray_mathinterp_rows_total"][1] == summary.rows
    read = tokenize_prompts(prompts, resolve(ModelSpec("random:llama-tiny"), "cpu").tokenizer)
    assert len(read[0].fed) != len(read[1].fed)
    assert seen["ray_mathinterp_evaluations_total"][1] == 5 * 2
    assert seen["ray_mathinterp_prompt_tokens_total"][1] == 5 * sum(len(prompt.fed) for prompt in read)


def endpoint() -> str:
    """Where Prometheus would read what this machine's Ray exports."""
    import ray

    node = next(node for node in ray.nodes() if node["Alive"])
    return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"


def scraped(place: str) -> str:
    """What Prometheus reads there now."""
    return urlopen(place, timeout=10).read().decode()


def series(text: str, **wanted: str) -> dict[str, tuple[dict[str, str], float]]:
    """Name -> labels and value, of the last line of each series that has these labels."""
    found = {}
    for name, labels, value in re.findall(r"^(ray_mathinterp_\w+)\{(.*)\} (\S+)", text, re.MULTILINE):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if wanted.items() <= named.items():
            found[name] = (named, float(value))
    return found
