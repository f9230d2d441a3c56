"""Cheap stand-ins for path patching: first-order attribution, and each node's direct share of the logit.

- First order: gradient of the scored logit at X_r with respect to what a node adds at END, times the node's change
  X_c - X_r; one forward and one backward pass serve all nodes. It estimates logit_patched - logit_original of the same
  ``freeze``: with "heads" the gradient runs through MLPs alone, with "all" straight to the final norm, with "none"
  through everything after the node.
- Direct: with the norms' scales frozen, the logit is linear in what embedding, heads and MLPs add to the residual
  stream; their shares, with those of the biases, sum to the logit before a final soft-cap.

Both are dot products of what a node adds with one vector per (layer, pair), here called a reader.

Shape legend: P pair, R pair of one batch, L layer, H query head, D model width, Z o_proj input width.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from mathinterp.engine.hooks import edited_output
from mathinterp.engine.layers import call_layer
from mathinterp.engine.lens.lens import NormParts, norm_parts, wide_dtype
from mathinterp.engine.pairs import Ends
from mathinterp.engine.parts import known_twin
from mathinterp.engine.paths.frozen import PathEngine
from mathinterp.engine.paths.patching import EndPatching, OneLength
from mathinterp.models.anatomy import Anatomy

CPU_ROWS, GPU_ROWS = 512, 1024  # pairs whose activations a backward pass keeps at once


@dataclass(frozen=True)
class Shares:
    """A number for every node and pair, in logits; float32 (float64 for a float64 model)."""

    heads_LHP: torch.Tensor
    mlps_LP: torch.Tensor


@dataclass(frozen=True)
class Readers:
    """What an o_proj output and an MLP output at END are worth, in logits per unit: L P D each."""

    attention_LPD: torch.Tensor
    mlp_LPD: torch.Tensor

    @torch.no_grad()
    def shares(self, anatomy: Anatomy, heads_LPZ: torch.Tensor, mlps_LPD: torch.Tensor) -> Shares:
        """The worth of heads (their o_proj inputs) and MLPs (their outputs)."""
        shape, wide = anatomy.shape, wide_dtype(anatomy.dtype)
        heads, mlps = [], []
        for layer in range(shape.n_layers):
            read_PZ = self.attention_LPD[layer].to(wide) @ anatomy.output_weight(layer).to(wide).T
            worth_PZ = read_PZ * heads_LPZ[layer].to(wide)
            heads.append(worth_PZ.unflatten(1, (shape.n_heads, shape.d_head)).sum(-1).T)
            mlps.append((self.mlp_LPD[layer].to(wide) * mlps_LPD[layer].to(wide)).sum(-1))
        return Shares(torch.stack(heads), torch.stack(mlps))


# ---- first order ----


def first_order(engine: PathEngine | EndPatching, freeze: str) -> Shares:
    """The estimated change of the scored logit under each node, by itself, patched at END.

    Args:
        engine: a PathEngine for freeze "heads" and "all", an EndPatching for "none".
        freeze: as in frozen.py.
    """
    if isinstance(engine, EndPatching):
        parts = [first_order(part, freeze) for part in engine.engines]
        return Shares(
            engine.in_order([part.heads_LHP for part in parts]), engine.in_order([part.mlps_LP for part in parts])
        )
    assert (freeze == "none") == isinstance(engine, OneLength)
    at_once = GPU_ROWS if engine.anatomy.device.type == "cuda" else CPU_ROWS
    pairs = torch.arange(len(engine.pairs), device=engine.anatomy.device)
    readers = [_gradients(engine, pair_R, freeze) for pair_R in pairs.split(at_once)]
    whole = Readers(
        torch.cat([part.attention_LPD for part in readers], dim=1), torch.cat([part.mlp_LPD for part in readers], dim=1)
    )
    own, other = engine.original, engine.counterfactual
    return whole.shares(engine.anatomy, other.heads_LPZ - own.heads_LPZ, other.mlp_LPD - own.mlp_LPD)


@torch.enable_grad()
def _gradients(engine: PathEngine, pair_R: torch.Tensor, freeze: str) -> Readers:
    """Gradient of the scored logit with respect to zeros added to every o_proj and MLP output at END."""
    anatomy, layers = engine.anatomy, engine.anatomy.shape.n_layers
    width = engine.original.attention_LPD[0, pair_R]
    attention = [torch.zeros_like(width, requires_grad=True) for _ in range(layers)]
    mlps = [torch.zeros_like(width, requires_grad=True) for _ in range(layers)]
    if isinstance(engine, OneLength):
        final_RD = _through_everything(engine, pair_R, attention, mlps)
    else:
        final_RD = _through_mlps(engine, pair_R, attention, mlps, mlps_run=freeze == "heads")
    total = _gold_logits(anatomy, final_RD, engine.gold_P[pair_R]).sum()
    found = torch.autograd.grad(total, [*attention, *mlps])
    return Readers(torch.stack(found[:layers]), torch.stack(found[layers:]))


def _through_everything(
    engine: OneLength, pair_R: torch.Tensor, attention: Sequence[torch.Tensor], mlps: Sequence[torch.Tensor]
) -> torch.Tensor:
    anatomy = engine.anatomy
    with ExitStack() as hooks:
        for layer in range(anatomy.shape.n_layers):
            for module, added in (
                (anatomy.output_projection(layer), attention[layer]),
                (anatomy.mlp(layer), mlps[layer]),
            ):
                hooks.enter_context(edited_output(module, _adder(added)))
        return engine.carry(0, engine.original.embedded_PD[pair_R], pair_R)


def _through_mlps(
    engine: PathEngine,
    pair_R: torch.Tensor,
    attention: Sequence[torch.Tensor],
    mlps: Sequence[torch.Tensor],
    mlps_run: bool,
) -> torch.Tensor:
    anatomy, family, own = engine.anatomy, engine.anatomy.family, engine.original
    hidden = own.embedded_PD[pair_R, None]
    for layer in range(anatomy.shape.n_layers):
        known = {family.attention: (own.attention_LPD[layer, pair_R] + attention[layer])[:, None]}
        if mlps_run:
            twin = known_twin(anatomy, layer)
            with edited_output(anatomy.mlp(layer), _adder(mlps[layer])):
                hidden = call_layer(twin.load(**known), hidden, (), dict.fromkeys(family.layer_needs))
        else:
            twin = known_twin(anatomy, layer, family.mlp)
            known[family.mlp] = (own.mlp_LPD[layer, pair_R] + mlps[layer])[:, None]
            hidden = call_layer(twin.load(**known), hidden, (), dict.fromkeys(family.layer_needs))
        twin.check_used()
    return hidden[:, 0]


def _adder(added_RD: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda output_R1D: output_R1D + added_RD[:, None]


def _gold_logits(anatomy: Anatomy, final_RD: torch.Tensor, gold_R: torch.Tensor) -> torch.Tensor:
    """The gold tokens' logits alone: R."""
    wide = wide_dtype(anatomy.dtype)
    weight_RD = anatomy.unembedding.get_parameter("weight")[gold_R].to(wide)
    logits = (anatomy.final_norm(final_RD).to(wide) * weight_RD).sum(-1)
    bias = getattr(anatomy.unembedding, "bias", None)
    return anatomy.finished(logits if bias is None else logits + bias[gold_R].to(wide))


# ---- direct shares ----


@torch.no_grad()
def direct_shares(anatomy: Anatomy, ends: Ends, gold_P: torch.Tensor) -> tuple[Shares, torch.Tensor]:
    """Each node's share of the gold logit at END, and that of the embedding and all biases (P).

    Together they sum to the logit before a final soft-cap. down_proj's bias counts as the MLP's.
    """
    wide = wide_dtype(anatomy.dtype)
    divisor = anatomy.shape.logits_divisor
    unembedding = anatomy.unembedding.get_parameter("weight")[gold_P].to(wide) / divisor
    final = norm_parts(anatomy, anatomy.final_norm)
    read_PD = _behind(final, ends.final_PD, unembedding)
    rest = (read_PD * ends.embedded_PD.to(wide)).sum(-1)
    if final.bias_D is not None:
        rest += unembedding @ final.bias_D
    if (bias := getattr(anatomy.unembedding, "bias", None)) is not None:
        rest += bias[gold_P].to(wide) / divisor
    attention: list[torch.Tensor] = []
    mlps: list[torch.Tensor] = []
    for layer in range(anatomy.shape.n_layers):
        for reads, norm, outputs_LPD in (
            (attention, anatomy.attention_post_norm(layer), ends.attention_LPD),
            (mlps, anatomy.mlp_post_norm(layer), ends.mlp_LPD),
        ):
            parts = None if norm is None else norm_parts(anatomy, norm)
            reads.append(read_PD if parts is None else _behind(parts, outputs_LPD[layer], read_PD))
        bias = getattr(anatomy.output_projection(layer), "bias", None)
        if bias is not None:
            rest += attention[layer] @ bias.to(anatomy.device, wide)
    readers = Readers(torch.stack(attention), torch.stack(mlps))
    return readers.shares(anatomy, ends.heads_LPZ, ends.mlp_LPD), rest


def _behind(norm: NormParts, input_PD: torch.Tensor, read_PD: torch.Tensor) -> torch.Tensor:
    """What reads the norm's input so as ``read_PD`` reads its output, the scale frozen (its bias left out)."""
    return norm.centre(read_PD * norm.gain_D) / norm.scale(input_PD)[:, None]
