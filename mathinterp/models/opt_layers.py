"""OPT's decoder layers with the MLP as a module of its own, which takes and gives B T D as in every other family.

transformers' layer flattens all tokens of a batch and calls fc1, the activation and fc2 itself. The layer here computes
the same; parameters keep their names and places, so that weights, adapters and exports are those of any OPT.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import dropout
from transformers.models.opt.modeling_opt import OPTDecoderLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OptMlp(nn.Module):
    """fc2(activation(fc1(x))) of a layer, which owns the three."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self._owner = (layer,)  # a tuple, so that it is no child of this module

    @property
    def fc1(self) -> nn.Module:
        """W_up."""
        return self._owner[0].get_submodule("fc1")

    @property
    def fc2(self) -> nn.Module:
        """W_down."""
        return self._owner[0].get_submodule("fc2")

    @property
    def activation_fn(self) -> nn.Module:
        """Between them."""
        return self._owner[0].get_submodule("activation_fn")

    def forward(self, normed_BTD: torch.Tensor) -> torch.Tensor:
        """B T D -> B T D."""
        output_BTD: torch.Tensor = self.fc2(self.activation_fn(self.fc1(normed_BTD)))
        return output_BTD


class OptLayer(OPTDecoderLayer):
    """A decoder layer whose norms stand before attention and MLP (do_layer_norm_before)."""

    mlp: OptMlp

    def forward(self, hidden_states: torch.Tensor, use_cache: bool | None = False, **kwargs: Any) -> torch.Tensor:
        """B T D -> B T D; ``kwargs`` are attention's."""
        attended_BTD, _ = self.self_attn(hidden_states=self.self_attn_layer_norm(hidden_states), **kwargs)
        hidden_BTD: torch.Tensor = hidden_states + dropout(attended_BTD, self.dropout, self.training)
        return hidden_BTD + dropout(self.mlp(self.final_layer_norm(hidden_BTD)), self.dropout, self.training)


def with_mlps(model: "PreTrainedModel") -> None:
    """Give every OPT layer of ``model`` its MLP; does nothing for other models and for one that has them."""
    for layer in model.modules():
        if type(layer) is OPTDecoderLayer:
            layer.mlp = OptMlp(layer)
            layer.__class__ = OptLayer
