"""Do replicas agree? Each that joins has computed the same few cells; the first one's are kept with the run.

Knows cells, records and warnings; knows nothing about Ray or about how cells are computed. Replicas that differ go on:
on unequal devices nothing else can be had. But the run says so, and by how much.
"""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mathinterp.cluster.events import Ready
from mathinterp.engine.cells import Cells, Difference
from mathinterp.store import Run

PROBE = "replica_probe"  # in the notes: what the first replica of the run computed, and where
DEVIATION = "replica_deviation"  # in the notes: who computed something else; absent where all agree


def probe_note(cells: Cells, device: str, node: str) -> dict[str, Any]:
    """A replica's cells as it tells them."""
    return {"device": device_name(device), "node": node, **cells.as_json()}


def device_name(device: str) -> str:
    """What computes: the GPU's name, or the processor's with the number of threads, which decides last bits too."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Agreement:
    """Compares every replica that joins with the first one of the run, be that of this call or of an earlier one."""

    def __init__(self, run: Run):
        self._run = run

    def joined(self, event: Ready) -> str | None:
        """Keep the first replica's cells with the run, compare any other's; returns a warning if they differ.

        The warning is one line, and not repeated for a replica that strays no farther than those before it.
        """
        told, kept = event.notes.get(PROBE), self._run.record["notes"]
        first = kept.get(PROBE)
        new = {name: fact for name, fact in event.notes.items() if name not in kept}
        if new:  # before the first row, so that no killed driver leaves rows without their noise
            self._run.note(new)
        if told is None or first is None:
            return None
        difference = Cells.from_json(first).difference(Cells.from_json(told))
        return None if difference is None else self._differs(first, told, difference)

    def _differs(self, first: Mapping[str, Any], told: Mapping[str, Any], difference: Difference) -> str | None:
        known = self._run.record["notes"].get(DEVIATION)
        here = {
            "node": told["node"],
            "device": told["device"],
            "largest": difference.largest,
            "values": difference.values,
            "predictions": difference.predictions,
        }
        others = [] if known is None else known["replicas"]
        worse = _rank(difference.largest) > max((_rank(other["largest"]) for other in others), default=-1.0)
        kept = {**(known or {}), "first": {"node": first["node"], "device": first["device"]}, "cells": first["cells"]}
        if here not in others:
            kept["replicas"] = [*others, here]
            kept["largest"] = max((replica["largest"] for replica in kept["replicas"]), key=_rank)
            self._run.note({DEVIATION: kept})
        return self._warning(first, told, difference) if worse else None

    def _warning(self, first: Mapping[str, Any], told: Mapping[str, Any], difference: Difference) -> str:
        apart = (
            "cannot be compared" if difference.largest is None else
            f"differ by up to {difference.largest:.3g} nats ({difference.values + difference.predictions} of"
            f" {first['cells']} checked cells, {difference.predictions} predictions)"
        )  # fmt: skip
        return (
            f"rows of this run depend on the replica: what {told['device']} on {told['node']} computes and what"
            f" {first['device']} on {first['node']} computed first {apart}; kept in the run's notes as {DEVIATION}"
        )


def _rank(largest: float | None) -> float:
    """A deviation that is no number counts as the largest."""
    return float("inf") if largest is None else largest
