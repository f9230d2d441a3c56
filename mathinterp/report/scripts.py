"""What the page's scripts are given: JSON as JavaScript, arrays as text, and Vega in one file.

Knows bytes and text; knows no run. A page opened from a file may fetch nothing, so data come as scripts.
"""

import base64
import csv
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

import altair as alt
import numpy as np
import vl_convert

from mathinterp.models.cache import cache_folder, keep_sealed, read_sealed

EMBED = "window.vegaEmbed = vegaEmbed; window.vega = vega;"


def script(function: str, *values: Any) -> bytes:
    """A script that calls ``mathinterp.function(...)``; text in it can end no script and break no line."""
    given = ",".join(json.dumps(value, allow_nan=False, separators=(",", ":")) for value in values)  # all ASCII
    return f"mathinterp.{function}({given});\n".replace("<", r"\u003c").encode("ascii")


def spec_of(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """A chart as Vega-Lite, however many rows it has; CSV in it becomes columns, as Vega's reader of CSV needs eval.

    The page's script makes rows of ``{"columns": {name: values}}``.
    """
    with alt.data_transformers.enable("default", max_rows=None):
        spec: dict[str, Any] = chart.to_dict()
    for data in [node["data"] for node in _nodes(spec) if isinstance(node.get("data"), dict)]:
        form = data.get("format") or {}
        if form.get("type") == "csv":
            holder, name = (data, "values") if "values" in data else (spec["datasets"], data["name"])
            if isinstance(holder[name], str):
                holder[name] = _columns(holder[name], form.get("parse") or {})
            del data["format"]
    return spec


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a specification but for rows of data."""
    if isinstance(value, dict):
        yield value
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        if name not in ("datasets", "values"):
            yield from _nodes(inner)


def _columns(text: str, kinds: Mapping[str, str]) -> dict[str, dict[str, list[Any]]]:
    names, *rows = csv.reader(io.StringIO(text))
    read = [float if kinds.get(name) == "number" else str for name in names]
    columns = zip(names, read, zip(*rows, strict=True), strict=True)
    return {"columns": {name: [each(value) if value else None for value in values] for name, each, values in columns}}


def packed(array: np.ndarray) -> str:
    """The bytes of an array, row by row, in little-endian order: zlib's deflate format, then base64."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")


@cache
def vega_bundle() -> bytes:
    """Vega, Vega-Lite and vega-embed as one plain script; nothing of it is fetched.

    It takes more than a second, in which no other thread runs, so it is kept in the user's cache folder.
    """
    file = cache_folder() / "vega" / f"{version('vl-convert-python')}.js"
    bundle = read_sealed(file, EMBED)
    if bundle is None:
        bundle = f"(() => {{\n{vl_convert.javascript_bundle(EMBED)}\n}})();\n"
        keep_sealed(file, EMBED, bundle)
    return bundle.encode()
