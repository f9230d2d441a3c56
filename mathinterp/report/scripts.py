"""What the page's scripts are given: JSON as JavaScript, arrays as text, and Vega in one file.

Knows bytes and text; knows no run. A page opened from a file may fetch nothing, so data come as scripts.
"""

import base64
import json
import zlib
from functools import cache
from typing import Any

import altair as alt
import numpy as np
import vl_convert

EMBED = "window.vegaEmbed = vegaEmbed; window.vega = vega;"


def script(function: str, *values: Any) -> bytes:
    """A script that calls ``mathinterp.function(...)``; text in it can end no script and break no line."""
    given = ",".join(json.dumps(value, allow_nan=False, separators=(",", ":")) for value in values)  # all ASCII
    return f"mathinterp.{function}({given});\n".replace("<", r"\u003c").encode("ascii")


def spec_of(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """A chart as Vega-Lite, however many rows it has."""
    with alt.data_transformers.enable("default", max_rows=None):
        return chart.to_dict()


def packed(array: np.ndarray) -> str:
    """The bytes of an array, row by row, in little-endian order: zlib's deflate format, then base64."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")


@cache  # takes seconds
def vega_bundle() -> bytes:
    """Vega, Vega-Lite and vega-embed as one plain script; nothing of it is fetched."""
    return f"(() => {{\n{vl_convert.javascript_bundle(EMBED)}\n}})();\n".encode()
