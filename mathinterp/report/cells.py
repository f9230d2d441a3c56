"""How a value of a table looks, on a terminal and on the page."""

import json
from typing import Any

from mathinterp.text import printable


def format_value(value: Any) -> str:
    """A cell's text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict | list):
        return printable(json.dumps(value, ensure_ascii=False))
    return printable(str(value))
