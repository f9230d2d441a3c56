"""Random neurons to hold a chosen set against: as many in each layer, never one of the set.

Knows numbers of layers and neurons, and seeds; knows nothing about models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mathinterp.errors import UserError
from mathinterp.models.units import Neuron

if TYPE_CHECKING:
    from mathinterp.models.anatomy import ModelShape


def layer_matched_neurons(shape: ModelShape, key: Sequence[Neuron], seed: int) -> list[Neuron]:
    """As many other neurons in each layer as ``key`` has there, in the order of the layers.

    Raises UserError where a layer has fewer others than ``key`` has there.
    """
    rng = np.random.default_rng(seed)
    drawn: list[Neuron] = []
    for layer in sorted({layer for layer, _ in key}):
        own = [neuron for at, neuron in key if at == layer]
        others = np.setdiff1d(np.arange(shape.n_neurons), own)
        if len(others) < len(own):
            raise UserError(
                f"layer {layer}: {len(own)} of {shape.n_neurons} neurons are chosen, which leaves {len(others)} for a"
                " random control of the same size; choose fewer"
            )
        drawn += [Neuron(layer, int(neuron)) for neuron in np.sort(rng.choice(others, len(own), replace=False))]
    return drawn


def has_control(shape: ModelShape, key: Iterable[Neuron]) -> bool:
    """Whether every layer has at least as many other neurons as ``key`` has there."""
    return all(2 * count <= shape.n_neurons for count in Counter(layer for layer, _ in key).values())
