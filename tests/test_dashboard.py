"""deploy/grafana: what Grafana takes, every query read by a PromQL parser, every metric one that the code exports."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest

from mathinterp.cluster import metrics
from mathinterp.service import metrics as service_metrics
from tests.test_metrics import exported as of_a_run

ROOT = Path(__file__).parents[1]
BOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "mathinterp.json").read_text())
SCHEMA = json.loads((Path(__file__).parent / "grafana" / "dashboard.schema.json").read_text())
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
GIVEN = {"window": "5m", "run_id": "a1", "service": "here:8390"}  # values of those that stand in queries


def of_a_service() -> dict[str, tuple[str, ...]]:
    """Name in Prometheus -> labels, of every series of a service."""
    tags = {name: (*service_metrics.SERVICE, *service_metrics.TAGS.get(name, ())) for name in service_metrics.COUNTERS}
    counters = {f"ray_{metrics.PREFIX}{name}_total": labels for name, labels in tags.items()}
    return counters | {
        f"ray_{metrics.PREFIX}{name}": (*service_metrics.SERVICE, *service_metrics.TAGS.get(name, ()))
        for name in service_metrics.GAUGES
    }


EXPORTED = {**of_a_run(), **of_a_service()}


def expressions() -> Iterator[str]:
    """Every query of a panel."""
    for panel in BOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def read(expression: str) -> list[Any]:
    """The parts of a query with its variables filled in; raises ValueError where Prometheus would refuse it."""
    parts: list[Any] = []
    filled = re.sub(r"\$(\w+)", lambda found: GIVEN[found[1]], expression)
    promql_parser.walk(promql_parser.parse(filled), parts.append)  # which returns None: go on
    return parts


def selectors(parts: list[Any]) -> list[Any]:
    ranges = [part.vector_selector for part in parts if isinstance(part, promql_parser.MatrixSelector)]
    return ranges + [part for part in parts if isinstance(part, promql_parser.VectorSelector)]


def test_grafana_takes_it():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(BOARD, SCHEMA)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in BOARD["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "interval":
            assert [option["value"] for option in variable["options"]] == variable["query"].split(",")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["schemaVersion"], "39"),
        (["panel"], []),
        (["panels", 0, "gridPos", "w"], 25),
        (["panels", 0, "type"], "timeserie"),
        (["panels", 0, "target"], []),
        (["panels", 0, "targets", 0, "expr"], ""),
        (["panels", 0, "targets", 0, "expression"], "up"),
        (["panels", 0, "options", "legend", "placement"], "below"),
        (["panels", 0, "options", "tooltip", "sort"], True),
        (["panels", 0, "fieldConfig", "defaults", "min"], "0"),
        (["templating", "list", 0, "type"], "data source"),
        (["templating", "list", 1, "refresh"], 3),
    ],
)
def test_faulty_dashboards_would_not_be_taken(place, value):
    faulty = copy.deepcopy(BOARD)
    *above, last = place
    node: Any = faulty
    for key in above:
        node = node[key]
    node[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(faulty, SCHEMA)


@pytest.mark.parametrize("expression", list(expressions()))
def test_every_query_is_promql_and_asks_for_what_is_exported(expression):
    asked = selectors(parts := read(expression))
    assert asked
    for selector in asked:
        assert selector.name in EXPORTED
        assert {matcher.name for matcher in selector.matchers.matchers} <= set(EXPORTED[selector.name])
    for part in parts:
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            for selector in selectors(read(part.expr.prettify())):
                assert set(part.modifier.labels) <= set(EXPORTED[selector.name])
    rated = [part.vector_selector.name for part in parts if isinstance(part, promql_parser.MatrixSelector)]
    assert all(re.search("_(total|sum|count|bucket)$", name) for name in rated), "rates are of counters"


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("sum by (run_id) (rate(ray_x_total[5m])", "unclosed left parenthesis"),
        ("rate(ray_x_total)", "expected type matrix"),
        ("rate(ray_x_total{a=~b}[5m])", "expected string"),
        ("rates(ray_x_total[5m])", "unknown function"),
    ],
)
def test_what_is_no_promql_is_refused(expression, said):
    with pytest.raises(ValueError, match=said):
        read(expression)


def test_variables_are_those_that_queries_use_and_are_asked_of_what_is_exported():
    used = {name for query in expressions() for name in re.findall(r"\$\{?(\w+)", query)}
    assert used == GIVEN.keys()
    assert VARIABLES.keys() == used | {"datasource"}
    for variable in VARIABLES.values():
        if variable["type"] == "query":
            assert variable["query"] == variable["definition"]
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
            assert label in EXPORTED[name]
    for panel in BOARD["panels"]:
        legends = " ".join(target["legendFormat"] for target in panel["targets"])
        asked = [selector.name for target in panel["targets"] for selector in selectors(read(target["expr"]))]
        assert set(re.findall(r"\{\{(\w+)\}\}", legends)) <= {label for name in asked for label in EXPORTED[name]}


def test_all_that_is_exported_is_shown_and_documented():
    assert {selector.name for query in expressions() for selector in selectors(read(query))} == EXPORTED.keys()
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `ray_mathinterp_"))
    for name in EXPORTED:
        short = name.removeprefix("ray_mathinterp").removeprefix("_service")
        assert name in table or f"`{short}`" in table or re.sub("_(sum|count|bucket)$", "", name) in table, name
    assert set(metrics.TAGS) <= {*metrics.COUNTERS, *metrics.GAUGES}
    assert set(service_metrics.TAGS) <= {*service_metrics.COUNTERS, *service_metrics.GAUGES}
