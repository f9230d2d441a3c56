"""Whether a large difference in a half-precision dtype is only rounding: the same passes again in float32.

Two things must hold. In float32 prompts that share passes agree with prompts alone, so that the mask is right; and in
the model's own dtype they are about as near to float32 as prompts alone are, so that what runs here does no worse.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch

from mathinterp.engine.alone import TOLERATED_DEVIATION, tolerated
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import Scores
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt

TIMES = 3.0  # so much farther from float32 than prompts alone may prompts be that share a pass


@dataclass(frozen=True)
class Rounding:
    """Largest differences, in nats."""

    together_float32: float  # of prompts together against alone, both in float32
    alone: float  # of prompts alone against float32
    together: float  # of prompts together against prompts alone in float32
    limit: float

    @property
    def explains(self) -> bool:
        """Whether nothing but rounding is to be seen; NaN is no agreement."""
        right = self.together_float32 <= TOLERATED_DEVIATION[torch.float32]
        return right and self.together <= max(self.limit, TIMES * self.alone)

    def __str__(self) -> str:
        return (
            f"in float32 they differ by {self.together_float32:.2g}; from float32 prompts alone are {self.alone:.3g}"
            f" away, those together {self.together:.3g}"
        )


def rounding_of(
    together: Scores,
    alone: Scores,
    anatomy: Anatomy,
    prompts: Sequence[TokenizedPrompt],
    baseline: Callable[[Anatomy, Sequence[TokenizedPrompt]], Scores],
) -> Rounding | None:
    """Compare with float32; None where that is the dtype, or weights in float32 cannot be had.

    Args:
        together: scores of ``prompts`` in shared passes, in the model's dtype.
        alone: the same, each in a pass of its own.
        baseline: scores in shared passes of a given model.
    """
    exact = in_float32(anatomy)
    if exact is None:
        return None
    truth = PlainEngine(exact, prompts, batch_size=1).baseline()
    return Rounding(
        together_float32=baseline(exact, prompts).difference(truth),
        alone=alone.difference(truth),
        together=together.difference(truth),
        limit=tolerated(anatomy),
    )


def in_float32(anatomy: Anatomy) -> Anatomy | None:
    """A copy of a half-precision model with its weights in float32; None for any other, or where there is no room."""
    if anatomy.quantised or anatomy.dtype in TOLERATED_DEVIATION or len(anatomy.cards) > 1:
        return None
    on_gpu = anatomy.device.type == "cuda"
    free = torch.cuda.mem_get_info(anatomy.device)[0] if on_gpu else psutil.virtual_memory().available
    if 2 * 4 * sum(weight.numel() for weight in anatomy.model.parameters()) > free:
        return None
    return Anatomy(copy.deepcopy(anatomy.model).float())
