"""A grid of cells as the page's script reads it: arrays of small integers, and what they stand for.

The change of log-probability becomes one byte: 0 is missing, 128 is nothing, and q stands for
sign(q - 128) * ((q - 128) / 127)^2 * bound, finer where most changes are.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mathinterp.experiments.grid import Attention, Grid
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
    levels, bound = quantised(grid.change)
    error = float(np.nanmax(np.abs(restored(levels, bound) - grid.change), initial=0.0))
    wide = len(grid.answers) > 65535
    return {
        "word": grid.word,
        "layers": grid.layers.tolist(),
        "heads": grid.heads.tolist(),
        "prompts": [
            [shown_text(str(row[name])) for name in ("prompt_id", "text", "answer", "predicted", "operation")]
            for row in grid.prompts
        ],
        "cells": packed(grid.cells),
        "change": packed(levels),
        "bound": bound,
        "error": error,
        "answers": [shown_text(text) for text in grid.answers],
        "after": packed(grid.after.astype(np.uint32 if wide else np.uint16)),
        "wide": wide,
        "attention": None if grid.attention is None else _attention_data(grid.attention, packed),
    }


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
