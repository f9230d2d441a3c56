"""Tiny models whose circuit is known because their weights were written: what methods are held against.

Four transformers models of 4 layers with 4 heads, built in a moment; nothing is trained and nothing loaded.
"""

from mathinterp.models.ground_truth import clock, pointer, table
from mathinterp.models.ground_truth.planted import Build, Planted

PLANTED: dict[str, Build] = {
    "table": table.table, "backup": table.backup, "pointer": pointer.pointer, "clock": clock.clock,
}  # fmt: skip

__all__ = ["PLANTED", "Build", "Planted"]
