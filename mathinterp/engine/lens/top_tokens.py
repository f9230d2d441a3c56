"""What a vector of the residual stream says: the first tokens under the lens (paper A; method.md section 5).

A positive scale changes no order, so c v raises what v raises where the coefficient c is positive, and what -v raises
where it is negative. Biases are left out: no neuron writes them.

Shape legend: N vector or neuron, D model width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from mathinterp.engine.lens.lens import Lens, written_values
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Neuron

SHOWN = 10
AT_ONCE = 512  # vectors projected together


@torch.inference_mode()
def value_directions(anatomy: Anatomy, neurons: Sequence[Neuron]) -> torch.Tensor:
    """W_U (g v) of each neuron's value vector v, before all scales: N V. See ``NeuronLens.directions``."""
    values_ND = torch.cat([written_values(anatomy, layer, [neuron]) for layer, neuron in neurons])
    return Lens(anatomy).directions(values_ND)


def top_tokens(direction_V: torch.Tensor, coefficient: float, count: int) -> list[tuple[int, float]]:
    """The ``count`` token ids that ``coefficient`` times a direction raises most, each with that product."""
    values, ids = (coefficient * direction_V).topk(min(count, len(direction_V)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))


class TopTokens:
    """The first tokens of Lens(vector), without the lens's constants, as text."""

    def __init__(self, anatomy: Anatomy, tokenizer: "PreTrainedTokenizerBase"):
        self.lens, self.tokenizer = Lens(anatomy), tokenizer

    @torch.no_grad()
    def of(self, vectors_ND: torch.Tensor) -> list[list[str]]:
        """For each vector its first SHOWN tokens, the likeliest first."""
        found: list[list[str]] = []
        for part_ND in vectors_ND.split(AT_ONCE):
            for direction_V in self.lens.directions(part_ND):
                found.append([str(self.tokenizer.decode([i])) for i, _ in top_tokens(direction_V, 1.0, SHOWN)])
        return found
