"""Sets of heads over several layers, and what their outputs become: for tests of what edits many heads at once."""

import numpy as np

from mathinterp.engine.edits import Replacement
from mathinterp.engine.head_sets import NO_HEADS, HeadSet
from mathinterp.engine.plain import PlainEngine
from mathinterp.models.anatomy import Anatomy
from tests.exact import PROMPTS, random_prompts

RANKING = ((1, 3), (0, 2), (2, 0), (1, 0))
SETS: list[HeadSet] = [
    frozenset({(1, 0), (1, 3)}),
    frozenset({(0, 1), (1, 2), (2, 0), (2, 3)}),
    NO_HEADS,
    frozenset({(2, 1)}),
]


def zeros(anatomy: Anatomy) -> dict[int, Replacement]:
    return {layer: Replacement.zero(anatomy, "head", layer) for layer in range(anatomy.shape.n_layers)}


def resampled(anatomy: Anatomy) -> dict[int, Replacement]:
    """Values of another prompt at END, per prompt: what mean and resample ablation look like to an engine."""
    others = random_prompts()[::-1]
    source, prompt_n = PlainEngine(anatomy, others), np.arange(len(PROMPTS))
    ends, other_ends = (np.array([p.end for p in prompts]) for prompts in (PROMPTS, others))
    return {
        layer: Replacement(source.token_values("head", layer, prompt_n, other_ends), prompt_n, ends)
        for layer in range(anatomy.shape.n_layers)
    }
