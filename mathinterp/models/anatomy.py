"""Where heads, neurons, norms and the unembedding of a loaded model live.

Knows module paths and sizes, for any family of families.py; knows nothing about prompts or interventions.
Shape legend: B batch, T position, L layer, H query head, G key/value group, D model width, K neurons, V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig

from mathinterp.errors import UserError
from mathinterp.models.families import Family, family_for
from mathinterp.models.positions import positions_of, without_memory
from mathinterp.models.shape import ModelShape as ModelShape
from mathinterp.models.split import connect

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_shape(config: PretrainedConfig) -> ModelShape:
    """Read a decoder's sizes from its config; raises UserError for an unknown family.

    d_head is the config's ``head_dim`` where it names one (Qwen3, Gemma-2), else d_model / n_heads.
    """
    family = family_for(config)
    d_model, n_heads = config.hidden_size, config.num_attention_heads
    groups = getattr(config, family.groups, None) if isinstance(family.groups, str) else family.groups
    parallel = getattr(config, family.parallel) if isinstance(family.parallel, str) else family.parallel
    return ModelShape(
        model_type=config.model_type,
        n_layers=config.num_hidden_layers,
        n_heads=n_heads,
        n_groups=groups or n_heads,
        d_head=getattr(config, "head_dim", None) or d_model // n_heads,
        d_model=d_model,
        n_neurons=getattr(config, family.neurons, None) or 4 * d_model,
        vocabulary=config.vocab_size,
        gated_mlp=bool(family.gate or family.fused_gate_up),
        parallel=bool(parallel),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        attention_windows=_attention_windows(config),
        tied_unembedding=bool(config.tie_word_embeddings),
        positions=positions_of(config),
        n_experts=getattr(config, family.experts) if family.experts else 0,
        experts_per_token=config.num_experts_per_tok if family.experts else 0,
        residual_multiplier=getattr(config, family.residual_multiplier) if family.residual_multiplier else 1.0,
        logits_divisor=getattr(config, family.logits_divisor) if family.logits_divisor else 1.0,
    )


def _attention_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    return (window,) * int(config.num_hidden_layers)


class Multiplied(nn.Module):
    """Stands for the norm between a block and the residual stream, where the model multiplies by a number instead."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The input times the factor."""
        return hidden * self.factor


@dataclass(frozen=True)
class Projection:
    """A linear map from the model's width, as some output features of one module (all of them where none is fused)."""

    module: nn.Module
    features: slice | torch.Tensor  # which of the module's output features, in head (group, neuron) order
    home: torch.device  # where weight and bias are given, wherever the module lies

    @property
    def weight(self) -> torch.Tensor:
        """features x D: row i reads the normed residual stream into output feature i."""
        return input_major_weight(self.module).T[self.features].to(self.home)

    @property
    def places(self) -> torch.Tensor:
        """The features as indices into the module's outputs, on the CPU."""
        return torch.arange(input_major_weight(self.module).shape[1], device="cpu")[self.features]

    @property
    def bias(self) -> torch.Tensor | None:
        """One number per feature, or None."""
        bias = self.module.bias
        assert bias is None or isinstance(bias, torch.Tensor)
        return None if bias is None else bias[self.features].to(self.home)


class Anatomy:
    """Handles to the parts of one loaded causal language model.

    ``cards`` are all devices that its layers lie on (split.py), ``device`` the first of them: there everything outside
    of layers is computed, and there weights are given unless another is asked for.
    """

    def __init__(self, model: "PreTrainedModel"):
        self.model = model
        self.shape = model_shape(model.config)
        without_memory(model)
        from mathinterp.models.opt_layers import with_mlps  # transformers' models take seconds to import

        with_mlps(model)
        self.family: Family = family_for(model.config)
        self.decoder: nn.Module = model.get_submodule(self.family.decoder)
        self.layers: nn.ModuleList = getattr(self.decoder, self.family.layers)
        self.final_norm: nn.Module = getattr(self.decoder, self.family.final_norm)
        self.unembedding: nn.Module = model.get_output_embeddings()  # weight V D
        self.cards: tuple[torch.device, ...] = connect(model)
        self.device: torch.device = self.cards[0]
        self.dtype: torch.dtype = model.dtype
        if self.shape.n_experts and self.dtype == torch.float64:
            model.set_experts_implementation("eager")  # grouped products know no float64
        self.quantised = not self.output_projection(0).get_parameter("weight").is_floating_point()
        self._check_widths()

    def attention(self, layer: int) -> nn.Module:
        """The attention module of ``layer``; returns (output B T D, weights or None)."""
        return self.layers[layer].get_submodule(self.family.attention)

    def attention_norm(self, layer: int) -> nn.Module:
        """The norm whose output attention reads; an identity where it reads the residual stream itself."""
        return self._norm(layer, self.family.attention_norm) or nn.Identity()

    def output_projection(self, layer: int) -> nn.Module:
        """o_proj: its input is B T (H * d_head), the query heads side by side."""
        return self.attention(layer).get_submodule(self.family.output_projection)

    def mlp(self, layer: int) -> nn.Module:
        """The MLP module of ``layer``."""
        return self.layers[layer].get_submodule(self.family.mlp)

    def mlp_norm(self, layer: int) -> nn.Module:
        """The norm whose output the MLP reads; an identity where it reads the residual stream itself."""
        return self._norm(layer, self.family.mlp_norm) or nn.Identity()

    def stream_reader(self, layer: int) -> nn.Module:
        """The module whose input is the residual stream before the MLP: its norm or, where it has none, the MLP."""
        return self._norm(layer, self.family.mlp_norm) or self.mlp(layer)

    def attention_post_norm(self, layer: int) -> nn.Module | None:
        """What stands between o_proj's output and the residual stream, where the family has a norm or a number there.

        A number is a module of ours, which the model does not call: hooks on it would never fire.
        """
        return self._norm(layer, self.family.attention_post_norm) or self._multiplied()

    def mlp_post_norm(self, layer: int) -> nn.Module | None:
        """The same between the MLP's output and the residual stream."""
        return self._norm(layer, self.family.mlp_post_norm) or self._multiplied()

    def _norm(self, layer: int, name: str | None) -> nn.Module | None:
        return None if name is None else getattr(self.layers[layer], name)

    def _multiplied(self) -> nn.Module | None:
        factor = self.shape.residual_multiplier
        return None if factor == 1 else Multiplied(factor)

    def down_projection(self, layer: int) -> nn.Module:
        """down_proj: its input is B T K, the neurons' coefficients. Raises UserError for a mixture of experts."""
        self.shape.check_neurons()
        return self.mlp(layer).get_submodule(self.family.down_projection)

    def head_slice(self, head: int) -> slice:
        """Columns of o_proj's input that belong to query head ``head``."""
        d = self.shape.d_head
        return slice(head * d, (head + 1) * d)

    def output_weight(self, layer: int, card: torch.device | None = None) -> torch.Tensor:
        """o_proj's matrix as (H * d_head) x D: row block h maps head h's slice into the residual stream."""
        return input_major_weight(self.output_projection(layer)).to(card or self.device)

    def value_vectors(self, layer: int, card: torch.device | None = None) -> torch.Tensor:
        """down_proj's matrix as K x D: row k is neuron k's value vector (paper A's "subvalue")."""
        return input_major_weight(self.down_projection(layer)).to(card or self.device)

    def query(self, layer: int) -> Projection:
        """W_Q: H * d_head features, head by head (before any rotary embedding or query norm)."""
        return self._attention_projection(layer, 0)

    def key(self, layer: int) -> Projection:
        """W_K: G * d_head features, key/value group by group; query head h reads group h // (H / G)."""
        return self._attention_projection(layer, 1)

    def value(self, layer: int) -> Projection:
        """W_V: G * d_head features, key/value group by group."""
        return self._attention_projection(layer, 2)

    def gate(self, layer: int) -> Projection | None:
        """W_gate: K features, whose activation multiplies ``up``'s; None for an MLP without a gate."""
        return self._mlp_projection(layer, self.family.gate, 0)

    def up(self, layer: int) -> Projection:
        """W_up of a gated MLP, the first matrix of a plain one: K features."""
        found = self._mlp_projection(layer, self.family.up, 1)
        assert found is not None, "a family names up or fused_gate_up"
        return found

    def _mlp_projection(self, layer: int, name: str | None, which: int) -> Projection | None:
        """``which``: 0 for gate, 1 for up, where they are fused; None where the family has none of that name."""
        self.shape.check_neurons()
        fused, n = self.family.fused_gate_up, self.shape.n_neurons
        if fused is not None:
            return Projection(getattr(self.mlp(layer), fused), slice(which * n, (which + 1) * n), self.device)
        return None if name is None else Projection(getattr(self.mlp(layer), name), slice(None), self.device)

    def _check_widths(self) -> None:
        """Raise UserError when heads or neurons cannot be where the family's entry says; the self-test proves more."""
        wanted = [("output_projection", self.output_projection(0), self.shape.n_heads * self.shape.d_head)]
        if not self.shape.n_experts:
            wanted.append(("down_projection", self.down_projection(0), self.shape.n_neurons))
        for what, module, width in wanted:
            found = _widths(module)
            if found != (width, self.shape.d_model):
                raise UserError(
                    f"family '{self.shape.model_type}': {what} maps {found[0]} features to {found[1]}, but the config "
                    f"says {width} to {self.shape.d_model}: its entry in mathinterp/models/families.py is wrong"
                )

    def _attention_projection(self, layer: int, which: int) -> Projection:
        """``which``: 0 for q, 1 for k, 2 for v."""
        family, shape = self.family, self.shape
        name = (family.query, family.key, family.value)[which]
        if name is not None:
            return Projection(getattr(self.attention(layer), name), slice(None), self.device)
        assert family.fused_qkv is not None, "a family names query, key and value, or fused_qkv"
        module = getattr(self.attention(layer), family.fused_qkv)
        d, heads, groups = shape.d_head, shape.n_heads, shape.n_groups
        if family.fused_qkv_layout == "blocks":
            start = (0, heads * d, (heads + groups) * d)[which]
            return Projection(module, slice(start, start + (heads, groups, groups)[which] * d), self.device)
        assert family.fused_qkv_layout == "per_group"
        queries = heads // groups
        part = (slice(queries), slice(queries, queries + 1), slice(queries + 1, None))[which]
        features = torch.arange((heads + 2 * groups) * d).view(groups, queries + 2, d)[:, part].reshape(-1)
        return Projection(module, features, self.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm, unembedding and, where the family has them, the division of logits and the final soft-cap.

        Args:
            hidden: ... D, output of the last layer before the final norm.
        Returns:
            ... V, the logits the model itself would give.
        """
        return self.finished(self.unembedding(self.final_norm(hidden)))

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model makes of the unembedding's output: divided and soft-capped, where the family does so."""
        return self.capped(logits if self.shape.logits_divisor == 1 else logits / self.shape.logits_divisor)

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits under the final soft-cap, where the family has one."""
        cap = self.shape.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _widths(projection: nn.Module) -> tuple[int, int]:
    """Features that a projection reads and writes."""
    if isinstance(projection, nn.Linear):  # also a quantised one, whose weight is stored in another shape
        return projection.in_features, projection.out_features
    return tuple(input_major_weight(projection).shape)  # type: ignore[return-value]


def input_major_weight(projection: nn.Module) -> torch.Tensor:
    """The weight as in x out; GPT-2's Conv1D stores it so, nn.Linear stores the transpose.

    Raises UserError for a quantised one, whose numbers are no weights.
    """
    weight = projection.weight
    assert isinstance(weight, torch.Tensor)
    if not weight.is_floating_point():
        raise UserError(
            "this reads weights as numbers, and the layers are quantised: leave out `load_in` (or load more cards with"
            " `gpus_per_replica`)"
        )
    return weight if type(projection).__name__ == "Conv1D" else weight.T
