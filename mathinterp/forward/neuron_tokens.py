"""What a neuron writes, in tokens: the vocabulary entries that its value vector raises most through the lens (paper A).

A positive scale changes no order, so c v raises what v raises where the coefficient c is positive, and what -v raises
where it is negative. Biases are left out: no neuron writes them.

Shape legend: N neuron, D model width, V vocabulary.
"""

from collections.abc import Sequence

import torch

from mathinterp.forward.lens import Lens, norm_parts
from mathinterp.forward.neuron_ablation import Neuron
from mathinterp.models.anatomy import Anatomy


@torch.inference_mode()
def value_directions(anatomy: Anatomy, neurons: Sequence[Neuron]) -> torch.Tensor:
    """W_U (g v) of each neuron's value vector v, before all scales: N V. See ``NeuronLens.directions``."""
    lens = Lens(anatomy)
    return lens.directions(torch.stack([_written(anatomy, lens, layer, neuron) for layer, neuron in neurons]))


def _written(anatomy: Anatomy, lens: Lens, layer: int, neuron: int) -> torch.Tensor:
    """The value vector, times the weight of the norm behind the MLP where there is one: D."""
    value_D = anatomy.value_vectors(layer)[neuron].detach().to(lens.wide)
    norm = anatomy.mlp_post_norm(layer)
    return value_D if norm is None else value_D * norm_parts(anatomy, norm).gain_D


def top_tokens(direction_V: torch.Tensor, coefficient: float, count: int) -> list[tuple[int, float]]:
    """The ``count`` token ids that ``coefficient`` times a direction raises most, each with that product."""
    values, ids = (coefficient * direction_V).topk(min(count, len(direction_V)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))
