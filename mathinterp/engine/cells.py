"""A few numbers that every replica computes alike before it takes work, and how far two replicas' numbers are apart.

Replicas of one model on equal devices must give equal rows. These cells tell, bit for bit, from what each has
prepared: the model's own passes over a few prompts, and the engine's where a scan has one.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_CELLS = 64  # of one kind: answers, or tokens


@dataclass(frozen=True)
class Cells:
    """n values (log-probabilities in nats, and logits) and m predicted tokens, in a fixed order."""

    values_n: np.ndarray  # float64, which holds every narrower float exactly
    predicted_m: np.ndarray  # int64

    @staticmethod
    def joined(parts: Sequence["Cells"]) -> "Cells":
        """All parts' cells, in order; there may be none."""
        none = Cells(np.empty(0), np.empty(0, np.int64))
        parts = [none, *parts]
        return Cells(np.concatenate([p.values_n for p in parts]), np.concatenate([p.predicted_m for p in parts]))

    @staticmethod
    def of(values: Sequence[np.ndarray], predicted: np.ndarray) -> "Cells":
        """Cells from arrays of one shape, of which at most MOST_CELLS places are taken, evenly spread."""
        chosen = evenly(predicted.size)
        flat = [np.asarray(array, np.float64).ravel()[chosen] for array in values]
        return Cells(np.concatenate(flat), np.asarray(predicted, np.int64).ravel()[chosen])

    @property
    def digest(self) -> str:
        """16 hex digits of all bits."""
        return hashlib.sha256(self.values_n.tobytes() + self.predicted_m.tobytes()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """To be kept beside a run."""
        return {
            "digest": self.digest,
            "cells": len(self.values_n) + len(self.predicted_m),
            "values": base64.b64encode(self.values_n.astype("<f8").tobytes()).decode(),
            "predicted": base64.b64encode(self.predicted_m.astype("<i8").tobytes()).decode(),
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "Cells":
        """What ``as_json`` wrote."""
        values, predicted = (base64.b64decode(record[name]) for name in ("values", "predicted"))
        return Cells(np.frombuffer(values, "<f8").astype(np.float64), np.frombuffer(predicted, "<i8").astype(np.int64))

    def difference(self, other: "Cells") -> "Difference | None":
        """How the two differ; None if bit for bit alike."""
        if self.digest == other.digest:
            return None
        if (len(self.values_n), len(self.predicted_m)) != (len(other.values_n), len(other.predicted_m)):
            return Difference(None, 0, 0)
        differ_n = self.values_n.view(np.int64) != other.values_n.view(np.int64)
        with np.errstate(invalid="ignore"):
            largest = float(np.abs(self.values_n - other.values_n)[differ_n].max(initial=0.0))
        predictions = int((self.predicted_m != other.predicted_m).sum())
        return Difference(largest if np.isfinite(largest) else None, int(differ_n.sum()), predictions)


@dataclass(frozen=True)
class Difference:
    """Of two replicas' cells: the largest (nats; logits too), and how many values and predictions differ.

    largest: None where there is no such number: one replica has NaN, or computes other cells (another version).
    """

    largest: float | None
    values: int
    predictions: int


def evenly(count: int, most: int = MOST_CELLS) -> np.ndarray:
    """At most ``most`` of range(count), evenly spread, first and last included; none of none."""
    if count == 0:
        return np.empty(0, np.int64)
    return np.unique(np.linspace(0, count - 1, num=min(most, count), dtype=np.int64))
