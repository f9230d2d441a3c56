"""A grid of cells as the page's script reads it: arrays of small integers, and what they stand for.

A quantity becomes one byte per cell: 0 is missing, 128 is nothing, and q stands for
sign(q - 128) * ((q - 128) / 127)^2 * bound, finer where most changes are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from mathinterp.experiments.grid import Attention, Decisions, Grid, Quantity
from mathinterp.report.cells import shown_text

MIDDLE, STEPS = 128, 127


def quantised(change: np.ndarray) -> tuple[np.ndarray, float]:
    """Bytes of changes, and the bound: the largest change."""
    bound = float(np.nanmax(np.abs(change), initial=0.0)) or 1.0
    steps = np.rint(np.sqrt(np.abs(change) / bound) * STEPS) * np.sign(change)
    return np.where(np.isnan(change), 0, np.nan_to_num(steps) + MIDDLE).astype(np.uint8), bound


def restored(levels: np.ndarray, bound: float) -> np.ndarray:
    """The changes that bytes stand for; NaN where missing."""
    steps = levels.astype(np.float64) - MIDDLE
    return np.where(levels == 0, np.nan, np.sign(steps) * (steps / STEPS) ** 2 * bound)


def grid_data(grid: Grid, packed: Any) -> Mapping[str, Any]:
    """Plain JSON; ``packed`` makes text of an array."""
    columns = ("prompt_id", "text", "answer", "predicted", "operation", *grid.extras)
    after = {} if grid.after is None or grid.answers is None else _after_data(grid.answers, grid.after, packed)
    return {
        "word": grid.word,
        "layers": grid.layers.tolist(),
        "heads": grid.heads.tolist(),
        "prompts": [
            [shown_text("-" if row[name] is None else str(row[name])) for name in columns] for row in grid.prompts
        ],
        "extras": list(grid.extras),
        "cells": packed(grid.cells),
        "outcomes": asdict(grid.outcomes),
        "quantities": [_quantity_data(each, packed) for each in grid.quantities],
        "by_quantity": grid.by_quantity,
        "answers": None,
        **after,
        "logprobs": None if grid.logprobs is None else [float(f"{value:.5g}") for value in grid.logprobs],
        "attention": None if grid.attention is None else _attention_data(grid.attention, packed),
        "decisions": None if grid.decisions is None else _decisions_data(grid.decisions),
    }


def _after_data(answers: Sequence[str], after: np.ndarray, packed: Any) -> Mapping[str, Any]:
    wide = len(answers) > 65535
    return {
        "answers": [shown_text(text) for text in answers],
        "after": packed(after.astype(np.uint32 if wide else np.uint16)),
        "wide": wide,
    }


def _quantity_data(quantity: Quantity, packed: Any) -> Mapping[str, Any]:
    """In the units that people read: of 1, per cent and points are hundred times as large."""
    scale = 100 if quantity.unit in ("%", "points") else 1
    levels, bound = quantised(quantity.values)
    error = float(np.nanmax(np.abs(restored(levels, bound) - quantity.values), initial=0.0))
    return {
        "title": quantity.title, "unit": quantity.unit, "levels": packed(levels), "bound": scale * bound,
        "error": scale * error,
    }  # fmt: skip


def _decisions_data(decisions: Decisions) -> Mapping[str, Any]:
    scale = 100 if decisions.unit in ("%", "points") else 1

    def number(value: float | None) -> float | None:
        return None if value is None else float(f"{scale * value:.4g}")

    rows = [
        row and {**row, **{name: number(row[name]) for name in ("threshold", "estimate", "low", "high")}}
        for row in decisions.rows
    ]
    return {"unit": decisions.unit, "rows": rows}


def _attention_data(attention: Attention, packed: Any) -> Mapping[str, Any]:
    """Masses in 254ths of 1; 255 is missing."""
    mass = attention.mass
    return {
        "run": attention.run_id,
        "types": [shown_text(each) for each in attention.types],
        "heads": attention.heads.tolist(),
        "mass": packed(np.where(np.isnan(mass), 255, np.rint(np.nan_to_num(mass) * 254)).astype(np.uint8)),
        "left_out": attention.left_out,
    }
