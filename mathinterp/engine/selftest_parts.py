"""What a family's entry says, held against what the model computes: the part of the self-test that needs no engine.

Everything is recomputed from the parts that Anatomy names, so that a wrong name, layout, norm or factor shows. Each
function gives the largest relative difference over some layers.

Shape legend: T token of one prompt, D model width, Z o_proj input width, C features of a projection, K neurons.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from mathinterp.engine.hooks import caught_input, caught_output, edited_output
from mathinterp.engine.layers import recorded
from mathinterp.engine.lens.lens import Lens, NormParts, norm_parts, wide_dtype
from mathinterp.models.anatomy import Anatomy, Projection


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Size of the difference over that of ``expected``; NaN if there is one."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def worst(differences: Sequence[float]) -> float:
    """The largest; NaN if there is one."""
    return max(differences, key=lambda difference: (difference != difference, difference))


@dataclass(frozen=True)
class Seen:
    """One clean pass over one prompt: what the parts of every layer read and gave."""

    stream_TD: list[torch.Tensor]  # each layer's input, and at last the final norm's
    attention_read_TD: list[torch.Tensor]
    heads_TZ: list[torch.Tensor]  # o_proj's input
    attention_TD: list[torch.Tensor]  # o_proj's output
    mlp_read_TD: list[torch.Tensor]
    mlp_TD: list[torch.Tensor]
    logits_TV: torch.Tensor


@torch.inference_mode()
def look(anatomy: Anatomy, fed: Sequence[int]) -> Seen:
    """One clean pass, every module hooked."""
    layers = range(anatomy.shape.n_layers)
    streams: list[torch.Tensor] = []
    attention_reads: list[torch.Tensor] = []
    mlp_reads: list[torch.Tensor] = []
    with ExitStack() as hooks:
        for modules, seen in (
            (list(anatomy.layers), streams),
            ([anatomy.attention(layer) for layer in layers], attention_reads),
            ([anatomy.mlp(layer) for layer in layers], mlp_reads),
        ):
            hooks.enter_context(recorded(modules, _keeper(seen)))
        projections = [anatomy.output_projection(layer) for layer in layers]
        heads = [hooks.enter_context(caught_input(projection)) for projection in projections]
        attention = [hooks.enter_context(caught_output(projection)) for projection in projections]
        mlps = [hooks.enter_context(caught_output(anatomy.mlp(layer))) for layer in layers]
        final = hooks.enter_context(caught_input(anatomy.final_norm))
        logits = anatomy.model(torch.tensor([list(fed)], device=anatomy.device), use_cache=False).logits
    caught = [[one[0][0] for one in kept] for kept in (heads, attention, mlps)]
    reads = [[one[0] for one in kept] for kept in (streams, attention_reads, mlp_reads)]
    assert {len(kept) for kept in reads} == {len(layers)}, "an attention or MLP module did not run once"
    return Seen([*reads[0], final[0][0]], reads[1], caught[0], caught[1], reads[2], caught[2], logits[0])


def _keeper(seen: list[torch.Tensor]) -> Callable[[int, torch.Tensor], None]:
    return lambda _, hidden: seen.append(hidden.clone())


# ---- attention ----


@torch.inference_mode()
def attention_difference(anatomy: Anatomy, seen: Seen, fed: Sequence[int], layer: int) -> float:
    """Attention by hand, from W_Q, W_K and W_V, against o_proj's input.

    The first token attends to itself alone: its heads are its values, each head those of its key/value group. A query
    of zeros (which stays so under rotary embeddings and norms) attends to all that END sees alike: so with the query
    features of END zeroed, or the key features of every token, END's heads are the mean of the values in the window.
    """
    shape = anatomy.shape
    assert not _overlap(anatomy, layer), "query, key and value features are the same ones"
    values_TZ = _by_head(anatomy, projected(anatomy.value(layer), seen.attention_read_TD[layer]))
    window = shape.attention_windows[layer] or len(fed)
    uniform_Z = values_TZ[-window:].mean(dim=0)
    found = [relative(seen.heads_TZ[layer][0], values_TZ[0])]
    for projection, features, only_end in (
        (anatomy.query(layer), shape.n_heads, True),
        (anatomy.key(layer), shape.n_groups, False),
    ):
        whole = torch.arange(features * shape.d_head)
        heads_Z = _end_heads(anatomy, layer, fed, projection, whole, only_end)
        found.append(relative(heads_Z, uniform_Z))
        for unit in sorted({0, features - 1}):  # one alone: the others' stay what they are, unless a norm joins them
            own = whole.unflatten(0, (features, -1))[unit]
            heads_Z = _end_heads(anatomy, layer, fed, projection, own, only_end)
            members = torch.arange(shape.n_heads * shape.d_head).unflatten(0, (features, -1))[unit]
            found.append(relative(heads_Z[members], uniform_Z[members]))
    return worst(found)


def projected(projection: Projection, rows_TD: torch.Tensor) -> torch.Tensor:
    """The projection of each row by hand: T C."""
    values_TC = rows_TD @ projection.weight.T
    return values_TC if projection.bias is None else values_TC + projection.bias


def _by_head(anatomy: Anatomy, values_TC: torch.Tensor) -> torch.Tensor:
    """Values of key/value groups, one copy for each query head of the group: T Z."""
    shape = anatomy.shape
    values_TG1d: torch.Tensor = values_TC.unflatten(1, (shape.n_groups, 1, shape.d_head))
    return values_TG1d.expand(-1, -1, shape.n_heads // shape.n_groups, -1).flatten(1)


def _end_heads(
    anatomy: Anatomy, layer: int, fed: Sequence[int], projection: Projection, which_C: torch.Tensor, only_end: bool
) -> torch.Tensor:
    """o_proj's input at END with some features of a projection zero, at END or at every token: Z."""
    features = projection.places[which_C].to(anatomy.device)

    def zero(output_BTC: torch.Tensor) -> torch.Tensor:
        output_BTC = output_BTC.clone()
        if only_end:
            output_BTC[:, -1, features] = 0
        else:
            output_BTC[..., features] = 0
        return output_BTC

    with edited_output(projection.module, zero), caught_input(anatomy.output_projection(layer)) as caught:
        anatomy.decoder(input_ids=torch.tensor([list(fed)], device=anatomy.device), use_cache=False)
    return caught[0][0, -1]


def _overlap(anatomy: Anatomy, layer: int) -> bool:
    taken: set[tuple[int, int]] = set()
    count = 0
    for projection in (anatomy.query(layer), anatomy.key(layer), anatomy.value(layer)):
        features = projection.places.tolist()
        taken |= {(id(projection.module), feature) for feature in features}
        count += len(features)
    return len(taken) < count


# ---- MLP ----


@torch.inference_mode()
def coefficient_difference(anatomy: Anatomy, seen: Seen, layer: int, coefficients_TK: torch.Tensor) -> float:
    """act(gate) * up, or act(up) without a gate, against down_proj's input."""
    read_TD, gate = seen.mlp_read_TD[layer], anatomy.gate(layer)
    activation = getattr(anatomy.mlp(layer), anatomy.family.activation)
    up_TK = projected(anatomy.up(layer), read_TD)
    by_hand_TK = activation(up_TK) if gate is None else activation(projected(gate, read_TD)) * up_TK
    return relative(by_hand_TK, coefficients_TK)


@torch.inference_mode()
def neuron_sum_difference(anatomy: Anatomy, seen: Seen, layer: int, coefficients_TK: torch.Tensor) -> float:
    """Coefficients times value vectors, and down_proj's bias, against the MLP's output."""
    total_TD = coefficients_TK.double() @ anatomy.value_vectors(layer).double()
    bias = getattr(anatomy.down_projection(layer), "bias", None)
    return relative(total_TD if bias is None else total_TD + bias.double(), seen.mlp_TD[layer])


@torch.inference_mode()
def coefficients(anatomy: Anatomy, fed: Sequence[int], layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Layer -> T K: down_proj's input in a clean pass."""
    with ExitStack() as hooks:
        kept = {layer: hooks.enter_context(caught_input(anatomy.down_projection(layer))) for layer in layers}
        anatomy.decoder(input_ids=torch.tensor([list(fed)], device=anatomy.device), use_cache=False)
    return {layer: caught[0][0] for layer, caught in kept.items()}


@contextmanager
def zeroed_value(anatomy: Anatomy, layer: int, neuron: int) -> Iterator[None]:
    """Within the block the neuron's column of down_proj's weight is zero."""
    with torch.no_grad():
        row_D = anatomy.value_vectors(layer)[neuron]
        saved_D = row_D.clone()
        row_D.zero_()
    try:
        yield
    finally:
        with torch.no_grad():
            row_D.copy_(saved_D)


# ---- norms and the residual stream ----


@torch.inference_mode()
def stream_difference(anatomy: Anatomy, seen: Seen) -> float:
    """The residual stream, layer by layer from what attention and MLPs gave, and what each of them read of it by hand.

    Norms are recomputed from their weights, those behind the blocks too.
    """
    wide, found = wide_dtype(anatomy.dtype), []
    stream_TD = seen.stream_TD[0].to(wide)
    for layer in range(anatomy.shape.n_layers):
        found.append(
            relative(_normed(anatomy, anatomy.attention_norm(layer), stream_TD), seen.attention_read_TD[layer])
        )
        attention_TD = _written(anatomy, anatomy.attention_post_norm(layer), seen.attention_TD[layer].to(wide))
        before_mlp_TD = stream_TD if anatomy.shape.parallel else stream_TD + attention_TD
        found.append(relative(_normed(anatomy, anatomy.mlp_norm(layer), before_mlp_TD), seen.mlp_read_TD[layer]))
        mlp_TD = _written(anatomy, anatomy.mlp_post_norm(layer), seen.mlp_TD[layer].to(wide))
        stream_TD = stream_TD + attention_TD + mlp_TD
        found.append(relative(stream_TD, seen.stream_TD[layer + 1]))
    return worst(found)


def _written(anatomy: Anatomy, post: nn.Module | None, output_TD: torch.Tensor) -> torch.Tensor:
    return output_TD if post is None else _normed(anatomy, post, output_TD)


def _normed(anatomy: Anatomy, norm: nn.Module, rows_TD: torch.Tensor) -> torch.Tensor:
    return applied(norm_parts(anatomy, norm), rows_TD)


def applied(norm: NormParts, rows_TD: torch.Tensor) -> torch.Tensor:
    """The norm of each row, from its parts."""
    unit_TD = norm.centre(rows_TD) / norm.scale(rows_TD)[:, None]
    return unit_TD * norm.gain_D + (0 if norm.bias_D is None else norm.bias_D)


@torch.inference_mode()
def lens_difference(anatomy: Anatomy, seen: Seen) -> float:
    """The lens on the final residual stream, divided and soft-capped as the model does it, against its logits; nats."""
    lens, final_TD = Lens(anatomy), seen.stream_TD[-1]
    logits_TV = anatomy.capped(lens.logits(final_TD, lens.norm.scale(final_TD)))
    return float((logits_TV - seen.logits_TV.to(logits_TV.dtype)).abs().max())
