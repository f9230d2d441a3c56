"""Tiny models whose circuit is known because their weights were written: what methods are held against.

Four transformers models of 4 layers with 4 heads, built in a moment; nothing is trained and nothing loaded.
"""

from mathinterp.models.ground_truth.clock import clock
from mathinterp.models.ground_truth.planted import Build, Planted
from mathinterp.models.ground_truth.pointer import pointer
from mathinterp.models.ground_truth.table import backup, table

PLANTED: dict[str, Build] = {"table": table, "backup": backup, "pointer": pointer, "clock": clock}

__all__ = ["PLANTED", "Build", "Planted"]
