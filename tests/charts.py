"""What tests look at in a chart: its rows, every part with the data it reads, and its expressions."""

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from mathinterp.experiments.figures import Figure, rows_of

PARTS = ("layer", "concat", "hconcat", "vconcat")


def table_of(figure: Figure, column: str) -> pd.DataFrame:
    """The rows of the first data set that has the column."""
    rows = next(rows for rows in rows_of(figure) if column in rows[0])
    return pd.DataFrame(rows)


def parts_of(spec: dict[str, Any], data: dict[str, Any] | None = None) -> Iterator[tuple[dict[str, Any], str]]:
    """Every part with a mark, and the name of the data set that it reads."""
    data = spec.get("data", data)
    inner = [part for kind in PARTS for part in spec.get(kind, [])] + [spec[name] for name in ("spec",) if name in spec]
    for part in inner:
        yield from parts_of(part, data)
    if "mark" in spec:
        assert data is not None
        yield spec, data["name"]


def expressions_of(spec: Any) -> Iterator[str]:
    """Every expression of Vega in a chart."""
    if isinstance(spec, list):
        for each in spec:
            yield from expressions_of(each)
    elif isinstance(spec, dict):
        for name, value in spec.items():
            if name in ("calculate", "filter", "test", "labelExpr", "expr", "signal"):
                assert isinstance(value, str)
                yield value
            elif name != "datasets":
                yield from expressions_of(value)


def check_parts(figure: Figure) -> int:
    """Hold every field and tooltip of a chart to be a column of its data; how many marks have a tooltip."""
    spec = figure.to_dict()
    columns = {
        name: set(rows[0]) for name, rows in zip(spec.get("datasets", {}), rows_of(figure), strict=True)
    }  # fmt: skip
    told = 0
    for part, data in parts_of(spec):
        made = {step["as"]: step["calculate"] for step in part.get("transform", []) if "calculate" in step}
        for expression in made.values():
            assert set(re.findall(r"datum\.(\w+)", expression)) <= columns[data], expression
        for channel, encoding in part["encoding"].items():
            for each in encoding if isinstance(encoding, list) else [encoding]:
                if "field" in each:
                    assert each["field"] in columns[data] | set(made), (channel, each["field"])
        told += bool(part["encoding"].get("tooltip"))
        assert all(re.fullmatch(r"\w+", name) for name in columns[data])
    if "facet" in spec:
        assert spec["facet"]["field"] in columns[spec["data"]["name"]]
    return told


def texts_of(svg: str) -> list[str]:
    """The texts of an SVG, which must be XML."""
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
