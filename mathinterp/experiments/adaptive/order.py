"""The random order of an adaptive scan's prompts.

Knows a seed, weights and fingerprints; knows nothing about models or rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mathinterp.experiments.adaptive.betting import FloatArray
from mathinterp.experiments.adaptive.judge import prompt_order

if TYPE_CHECKING:
    from mathinterp.prompts.prompt import TokenizedPrompt


def order_of(prompts: Sequence[TokenizedPrompt], weights_P: FloatArray, seed: int) -> np.ndarray:
    """Indices of the prompts in random order: a function of seed, the prompts' fingerprint and weights alone."""
    from mathinterp.prompts.alignment import prompts_fingerprint

    digest = hashlib.sha256(f"{seed} {prompts_fingerprint(prompts)}".encode()).hexdigest()
    return prompt_order(weights_P, int(digest[:16], 16))


def block_of(order_P: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Indices of the prompts from ``start`` to ``stop`` of the order, ascending: an engine sorts them anyway."""
    return np.sort(order_P[start:stop])
