"""How a value of a table looks, on a terminal and on the page."""

import json
import math
from typing import Any

from mathinterp.text import printable

LONGEST = 2_000  # characters of a text on the page; a browser lays out longer ones for seconds


def shown_text(text: str) -> str:
    """``text`` as the page shows it: printable, and of a very long one the beginning and how long it is."""
    return printable(text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)")


def format_value(value: Any) -> str:
    """A cell's text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else f"{value:.4g}"
    if isinstance(value, dict | list):
        return printable(json.dumps(value, ensure_ascii=False))
    return printable(str(value))
