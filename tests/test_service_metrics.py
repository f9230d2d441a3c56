"""Ray metrics of a warm service: what is counted, and what Prometheus sees of it."""

import socket
import threading
import time
from typing import Any

import pytest

import mathinterp as mi
from mathinterp.cluster import metrics
from mathinterp.cluster.metrics import PREFIX
from mathinterp.service import metrics as service_metrics
from mathinterp.service.host import Answer, There
from mathinterp.service.metrics import ServiceMetrics
from mathinterp.service.serve import serving
from mathinterp.service.settings import Settings
from mathinterp.service.turns import Call
from tests.service_case import routed, served
from tests.test_dashboard import of_a_service
from tests.test_metrics import Recorded, endpoint, scraped, series
from tests.toy_scan import ToyScan

TINY = "random:llama-tiny"
PROMPTS = mi.prompts([(f"{a} plus 5 is", str(a + 5)) for a in (3, 14, 62, 71)])


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[float, dict[str, str]]]]:
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(metrics, kind, Recorded)
    monkeypatch.setattr(Recorded, "seen", {})
    monkeypatch.setattr(service_metrics, "LOOK_SECONDS", 0.01)
    return Recorded.seen


class Gated:
    """A process that answers when its gate is open, with one model on each level."""

    def __init__(self, gate: threading.Event):
        self.gate = gate

    def load(self) -> dict[str, Any]:
        return {}

    def run(self, call: Any) -> Answer:
        assert self.gate.wait(20)
        levels = (("card", 8, 8), ("memory", 70, 70), ("memory", 700, 700), ("disk", 6000, 0))  # and bytes in memory
        held = [
            {
                "fingerprint": f"m{size}",
                "label": "m",
                "dtype": "float32",
                "level": level,
                "bytes": size,
                "in_memory": there,
            }
            for level, size, there in levels
        ]
        return Answer({"seconds": 0.5}, (), There(held), rows=12)


def until_last(recorded: dict[str, Any], name: str, value: float, **tags: str) -> None:
    """Wait until a gauge was last told so."""
    end = time.monotonic() + 20
    while [found for found, of in recorded.get(PREFIX + name, []) if tags.items() <= of.items()][-1:] != [value]:
        assert time.monotonic() < end, (name, value, recorded.get(PREFIX + name))
        time.sleep(0.01)


@pytest.mark.slow
def test_what_a_service_tells(recorded):
    gate = threading.Event()
    with routed(lambda: Gated(gate)) as (router, workers), ServiceMetrics(router, "here:1") as told:
        router.until_ready()
        until_last(recorded, "service_replicas_ready", 1)
        calls = [Call("ada", "rows", "m", {}) for _ in range(4)]
        for call in calls:
            router.submit(call, 0)
        until_last(recorded, "service_requests_waiting", 3)
        until_last(recorded, "service_replicas_busy", 1)
        gate.set()
        for call in calls:
            told.computed("toy", call.future.result(20))
        told.computed("ablate", Answer({"seconds": 0.25}))
        until_last(recorded, "service_requests_waiting", 0)
        for level, models, size in (("card", 1, 8), ("memory", 2, 778), ("disk", 1, 6000)):
            until_last(recorded, "service_models", models, level=level)
            until_last(recorded, "service_model_bytes", size, level=level)
        workers.die(0)
        until_last(recorded, "service_model_bytes", 0, level="memory")  # the process that follows has none
    sums = {
        name: [sum(value for value, tags in recorded[PREFIX + name] if tags.get("experiment") == who) for who in whose]
        for name, whose in {
            "service_shards": ["toy"], "service_rows": ["toy"], "service_seconds": ["toy", "ablate"],
            "service_ablations": [None], "service_replicas_replaced": [None],
        }.items()
    }  # fmt: skip
    assert sums == {
        "service_shards": [4], "service_rows": [48], "service_seconds": [2.0, 0.25], "service_ablations": [1],
        "service_replicas_replaced": [1],
    }  # fmt: skip
    for gauge in service_metrics.GAUGES:
        assert recorded[PREFIX + gauge][-1][0] == 0, "at the end"
    assert all(tags["service"] == "here:1" for told in recorded.values() for _, tags in told)


def test_rows_and_questions_of_clients_are_counted_once_each(tmp_path):
    computed: list[tuple[str, Answer]] = []
    with served(1, computed=lambda experiment, answer: computed.append((experiment, answer))) as (url, router, _):
        router.until_ready()
        run = mi.connect(url).run(ToyScan(3), TINY, PROMPTS, store=str(tmp_path), progress=False)
        mi.connect(url).ablate(TINY, PROMPTS, heads=["0.1"])
    assert [experiment for experiment, _ in computed] == ["toy"] * 3 + ["ablate"]
    assert sum(answer.rows for _, answer in computed) == run.ended.rows > 0
    assert all(answer.facts["seconds"] > 0 for _, answer in computed)


@pytest.mark.ray
@pytest.mark.timeout(200)
def test_prometheus_sees_what_a_service_tells(tmp_path):
    settings = Settings(port=0, replicas=1, experiments=("tests.toy_scan:ToyScan",))
    with serving(settings) as service:
        service.router.until_ready()
        asked = mi.connect(f"http://{service.host}:{service.port}")
        run = asked.run(ToyScan(3), TINY, PROMPTS, store=str(tmp_path), progress=False)
        asked.ablate(TINY, PROMPTS, heads=["0.1"])
        expected = of_a_service().keys() - {"ray_mathinterp_service_replicas_replaced_total"}
        wanted = {
            "shards_total": 3,
            "rows_total": run.ended.rows,
            "ablations_total": 1,
            "replicas_ready": 1,
            "models": 1,
        }
        values: dict[str, float] = {}
        deadline = time.monotonic() + 60
        seen: dict[str, tuple[dict[str, str], float]] = {}
        while not (wanted.items() <= values.items() and expected <= seen.keys()):  # they come a part at a time
            assert time.monotonic() < deadline, values
            time.sleep(1)
            seen, text = {}, scraped(endpoint())
            for further in ({}, {"experiment": "toy"}, {"level": "memory"}):  # the last of several lines of a name
                seen |= series(text, service=f"{socket.gethostname()}:{service.port}", **further)
            values = {name.removeprefix("ray_mathinterp_service_"): value for name, (_, value) in seen.items()}
    assert seen.keys() == expected
    assert values["seconds_total"] > 0
    assert values["model_bytes"] > 0
    for name in expected:
        assert set(of_a_service()[name]) <= seen[name][0].keys(), name
