"""The last decoder layer at the tokens that predict answers: nothing reads what it computes at the others.

Attention still reads the keys and values of every token; queries (where the family has them apart), the output
projection and the MLP run at chosen tokens alone, with and without gradients. Knows modules, nothing about losses.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mathinterp.engine.parts import Twin, fill_rows
from mathinterp.models.anatomy import Anatomy
from mathinterp.tuning.attached import other_layers


class OnRows(nn.Module):
    """A module that acts on each token by itself, called at some tokens alone; its output is zero at the others."""

    def __init__(self, module: nn.Module, flat_N: torch.Tensor) -> None:
        """``flat_N``: the tokens, as indices into B * T, each once."""
        super().__init__()
        self._modules["module"] = module  # as it stands: its parameters stay where they are registered
        self._flat_N = flat_N

    def forward(self, values_BTX: torch.Tensor) -> torch.Tensor:
        """B T X -> B T Y."""
        chosen_1NX = values_BTX.flatten(0, 1)[None, self._flat_N]  # mixtures of experts want a batch
        found_NY = self._modules["module"](chosen_1NX)[0]  # type: ignore[misc]
        return fill_rows(found_NY, self._flat_N, values_BTX.shape[:2])


@contextmanager
def last_layer_on_rows(anatomy: Anatomy, flat_N: torch.Tensor) -> Iterator[None]:
    """Inside the block the decoder's last layer gives its output at the tokens ``flat_N`` alone.

    They are indices into B * T, each once: a token given twice would get its gradient twice.

    What it gives at other tokens means nothing. The layer runs uncompiled: the number of answer tokens varies.
    """
    running = getattr(anatomy.decoder, anatomy.family.layers)  # those of an input cache, perhaps
    with other_layers(anatomy, [*running[:-1], _on_rows(anatomy, anatomy.shape.n_layers - 1, flat_N)]):
        yield


def _on_rows(anatomy: Anatomy, layer: int, flat_N: torch.Tensor) -> nn.Module:
    family, attention = anatomy.family, anatomy.attention(layer)
    names = [family.output_projection, *([] if family.query is None else [family.query])]
    partial = Twin(attention, {name: OnRows(getattr(attention, name), flat_N) for name in names}).module
    children = {family.attention: partial, family.mlp: OnRows(anatomy.mlp(layer), flat_N)}
    twin = Twin(anatomy.layers[layer], children).module
    twin._compiled_call_impl = None  # the program of the original layer
    return twin
