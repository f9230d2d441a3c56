"""Coefficients and importances of FFN neurons and heads at END (method.md section 5).

A neuron's coefficient c is its entry in down_proj's input; its value v is that input's column of down_proj. With r the
residual stream that the MLP adds to, importance = log softmax(Lens(r + c v))[w] - log softmax(Lens(r))[w]. The same
increase is given for a head's output and for attention's whole output (both on the layer's input) and for the MLP's
whole output (on r). Where a family has a norm between a block and the stream (Gemma-2), a value is what that norm,
its scale frozen from the original run as the final norm's is, writes into the stream: g' * v / s'.

Shape legend: P prompt, L layer, K neuron, H head, D model width, Z o_proj input width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields

import torch
from torch import nn

from mathinterp.engine.hooks import watched
from mathinterp.engine.in_flight import on_every
from mathinterp.engine.intervention import CLEAN, Intervention
from mathinterp.engine.lens import TARGETS
from mathinterp.engine.lens.increases import neuron_increases
from mathinterp.engine.lens.lens import Lens, NormParts, norm_parts, written_values
from mathinterp.engine.lens.logsumexp import CPU_ELEMENTS, GPU_ELEMENTS, Base, increases
from mathinterp.engine.pairs import batches_of
from mathinterp.engine.placement import everywhere, hooked
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass
class EndActivations:
    """What one run had at END, in the model's dtype; each list has one tensor a layer."""

    inputs_PD: list[torch.Tensor] = field(default_factory=list)  # x: what the layer read
    head_inputs_PZ: list[torch.Tensor] = field(default_factory=list)  # o_proj's input: the heads side by side
    attention_PD: list[torch.Tensor] = field(default_factory=list)  # o_proj's output
    before_mlp_PD: list[torch.Tensor] = field(default_factory=list)  # r = x + what attention wrote
    coefficients_PK: list[torch.Tensor] = field(default_factory=list)  # down_proj's input
    mlp_PD: list[torch.Tensor] = field(default_factory=list)  # down_proj's output
    final_PD: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # input of the final norm

    def rows(self, rows: slice | list[int]) -> "EndActivations":
        """Some prompts' alone; of a slice without a copy."""
        lists = {f.name: [v[rows] for v in getattr(self, f.name)] for f in fields(self) if f.name != "final_PD"}
        return EndActivations(**lists, final_PD=self.final_PD[rows])

    def share(self, layer: int, rows: slice, card: torch.device) -> "EndActivations":
        """Some prompts' alone, on a card: of one layer, and nothing of the others."""
        names = [f.name for f in fields(self) if f.name != "final_PD"]
        lists = {
            name: [v[rows].to(card) if at == layer else v[:0] for at, v in enumerate(getattr(self, name))]
            for name in names
        }
        return EndActivations(**lists, final_PD=self.final_PD[rows].to(card))


@torch.inference_mode()
def end_activations(
    anatomy: Anatomy, sequences: Sequence[Sequence[int]], changes: Intervention = CLEAN
) -> EndActivations:
    """Run the model on ``sequences``, whose last token is END, under ``changes`` at every token.

    A changed activation is caught as what it becomes. Plain padded forward passes with hooks; each must fire once in
    each pass.
    """
    layers = range(anatomy.shape.n_layers)
    sites = [site for layer in layers for site in _sites(anatomy, layer)] + [(anatomy.final_norm, True)]
    caught: list[list[torch.Tensor]] = [[] for _ in sites]
    rows: list[torch.Tensor] = []
    for batch in batches_of([tuple(sequence) for sequence in sequences], anatomy):
        with ExitStack() as hooks:  # what is changed first, so that it is caught changed
            hooks.enter_context(hooked(everywhere(anatomy), [changes], batch.rows.cpu()))
            for kept, (module, of_input) in zip(caught, sites, strict=True):
                hooks.enter_context(watched(module, of_input, batch.keeper(kept)))
            batch.forward(anatomy)
            rows.append(batch.rows)
        fired = {len(kept) for kept in caught}
        assert fired == {len(rows)}, f"a hook did not fire once in each pass: {fired} in {len(rows)} passes"
    back = torch.cat(rows).argsort()
    return _collect(anatomy, [torch.cat(kept)[back] for kept in caught])


def _sites(anatomy: Anatomy, layer: int) -> list[tuple[nn.Module, bool]]:
    """The modules of a layer that are listened to, and whether to their input (else output).

    Parallel blocks have no module that reads r: there it is x plus attention's output.
    """
    sites = [
        (anatomy.layers[layer], True),
        (anatomy.output_projection(layer), True),
        (anatomy.output_projection(layer), False),
        (anatomy.down_projection(layer), True),
        (anatomy.down_projection(layer), False),
    ]
    return sites if anatomy.shape.parallel else [*sites, (anatomy.stream_reader(layer), True)]


def _collect(anatomy: Anatomy, caught: list[torch.Tensor]) -> EndActivations:
    found = EndActivations(final_PD=caught[-1])
    per_layer = len(_sites(anatomy, 0))
    for layer in range(anatomy.shape.n_layers):
        x, heads, attention, coefficients, mlp, *rest = caught[per_layer * layer : per_layer * (layer + 1)]
        found.inputs_PD.append(x)
        found.head_inputs_PZ.append(heads)
        found.attention_PD.append(attention)
        found.coefficients_PK.append(coefficients)
        found.mlp_PD.append(mlp)
        found.before_mlp_PD.append(rest[0] if rest else x + attention)
    return found


@dataclass(frozen=True)
class FrozenScales:
    """Scales of the original run: of the final norm (P), and of the norms behind each block (P a layer, or None)."""

    final_P: torch.Tensor
    attention_P: list[torch.Tensor | None]
    mlp_P: list[torch.Tensor | None]

    def rows(self, rows: slice) -> "FrozenScales":
        """Some prompts' alone."""
        behind = ([None if s is None else s[rows] for s in scales] for scales in (self.attention_P, self.mlp_P))
        return FrozenScales(self.final_P[rows], *behind)

    def on(self, card: torch.device) -> "FrozenScales":
        """The same on a card."""
        behind = ([None if s is None else s.to(card) for s in scales] for scales in (self.attention_P, self.mlp_P))
        return FrozenScales(self.final_P.to(card), *behind)


@dataclass(frozen=True)
class LayerImportance:
    """Log-probability increases of one layer, nats. ffn_P and attention_P: of the whole blocks' outputs."""

    neurons_PK: torch.Tensor
    heads_PH: torch.Tensor
    ffn_P: torch.Tensor
    attention_P: torch.Tensor

    @staticmethod
    def joined(parts: Sequence["LayerImportance"], home: torch.device) -> "LayerImportance":
        """Those of some prompts after those of others."""
        names = [f.name for f in fields(LayerImportance)]
        return LayerImportance(*(torch.cat([getattr(part, name).to(home) for part in parts]) for name in names))


class NeuronLens:
    """Importances of one model's neurons and heads.

    ``card``: where it computes, of a model on several (``layer_importances``); None: at home.
    """

    def __init__(self, anatomy: Anatomy, card: torch.device | None = None):
        self.anatomy, self.lens = anatomy, Lens(anatomy, card)

    @property
    def card(self) -> torch.device:
        """Where it computes."""
        return self.lens.card

    def frozen_scales(self, original: EndActivations) -> FrozenScales:
        """The scales that ``original`` had, after checking that the norms are what they are taken for."""
        self.lens.check(original.final_PD)
        layers = range(self.anatomy.shape.n_layers)

        def scales(
            norm_of: Callable[[int], nn.Module | None], written_PD: list[torch.Tensor]
        ) -> list[torch.Tensor | None]:
            parts = [self._post_norm(norm_of(layer)) for layer in layers]
            return [None if p is None else p.scale(rows) for p, rows in zip(parts, written_PD, strict=True)]

        return FrozenScales(
            self.lens.norm.scale(original.final_PD),
            scales(self.anatomy.attention_post_norm, original.attention_PD),
            scales(self.anatomy.mlp_post_norm, original.mlp_PD),
        )

    def _post_norm(self, norm: nn.Module | None) -> NormParts | None:
        if norm is None:
            return None
        parts = norm_parts(self.anatomy, norm).on(self.card)
        assert not parts.centred, "a LayerNorm behind a block is not known in any family"
        return parts

    def logits(self, activations: EndActivations) -> torch.Tensor:
        """The run's own logits at END, soft-capped: P V."""
        return self.anatomy.capped(self.lens.logits(activations.final_PD, self.lens.norm.scale(activations.final_PD)))

    def targets(
        self, prompts: Sequence[TokenizedPrompt], target: str, original: EndActivations | None = None
    ) -> torch.Tensor:
        """The token w of each prompt: the one "predicted" at END, or "gold", the first scored answer token: P.

        Args:
            original: the original run's activations, where they are there already.
        """
        assert target in TARGETS
        if target == "gold":
            return torch.tensor([prompt.scored[0].token_id for prompt in prompts], device=self.anatomy.device)
        if original is None:
            original = end_activations(self.anatomy, [prompt.input_ids[: prompt.end + 1] for prompt in prompts])
        return self.logits(original).argmax(dim=-1)

    @torch.inference_mode()
    def directions(self, layer: int) -> torch.Tensor:
        """(W_U g) of every value vector of the layer, before all scales: K V. Once a layer, for all prompts."""
        return self.lens.directions(written_values(self.anatomy, layer, card=self.card))

    def amounts(self, layer: int, activations: EndActivations, scales: FrozenScales) -> torch.Tensor:
        """What ``directions`` are multiplied with in one run: coefficients over the frozen scales, P K."""
        amounts_PK = activations.coefficients_PK[layer].to(self.lens.wide) / scales.final_P[:, None]
        mlp_scale_P = scales.mlp_P[layer]
        return amounts_PK if mlp_scale_P is None else amounts_PK / mlp_scale_P[:, None]

    @torch.inference_mode()
    def layer(
        self,
        layer: int,
        activations: EndActivations,
        scales: FrozenScales,
        target_P: torch.Tensor,
        directions_KV: torch.Tensor,
    ) -> LayerImportance:
        """Importances in one layer of one run: closed form, or the direct form under a soft-cap.

        Args:
            target_P: the token w of each prompt.
            directions_KV: from ``directions``.
        """
        cap = self.anatomy.shape.logit_softcap
        before = Base.of(self.lens.logits(activations.before_mlp_PD[layer], scales.final_P), target_P, cap)
        neurons_PK = neuron_increases(before, self.amounts(layer, activations, scales), directions_KV)
        post = self._post_norm(self.anatomy.mlp_post_norm(layer))
        ffn_P1D = _written(activations.mlp_PD[layer].to(self.lens.wide), post, scales.mlp_P[layer])[:, None]
        ffn_P = self._vector_increases(before, ffn_P1D, scales.final_P)[:, 0]

        base = Base.of(self.lens.logits(activations.inputs_PD[layer], scales.final_P), target_P, cap)
        post = self._post_norm(self.anatomy.attention_post_norm(layer))
        attention_P1D = _written(activations.attention_PD[layer].to(self.lens.wide), post, scales.attention_P[layer])
        attention_P = self._vector_increases(base, attention_P1D[:, None], scales.final_P)[:, 0]
        heads_PHD = _written(self._head_outputs(layer, activations), post, scales.attention_P[layer])
        return LayerImportance(neurons_PK, self._vector_increases(base, heads_PHD, scales.final_P), ffn_P, attention_P)

    def _head_outputs(self, layer: int, activations: EndActivations) -> torch.Tensor:
        """What each head adds to o_proj's output, without its bias: P H D."""
        shape = self.anatomy.shape
        heads_PHZ = activations.head_inputs_PZ[layer].to(self.lens.wide).unflatten(1, (shape.n_heads, shape.d_head))
        weight_HZD = self.anatomy.output_weight(layer, self.card).detach().unflatten(0, (shape.n_heads, shape.d_head))
        return torch.einsum("phz,hzd->phd", heads_PHZ, weight_HZD.to(self.lens.wide))

    def _vector_increases(self, base: Base, vectors_PUD: torch.Tensor, scale_P: torch.Tensor) -> torch.Tensor:
        """Increase of each of a prompt's own U vectors: P U; in blocks of prompts."""
        units = vectors_PUD.shape[1]
        elements = GPU_ELEMENTS if vectors_PUD.is_cuda else CPU_ELEMENTS
        at_once = max(1, elements // (units * self.anatomy.shape.vocabulary))
        parts = []
        for start in range(0, len(vectors_PUD), at_once):
            rows = slice(start, start + at_once)
            shifts = self.lens.directions(vectors_PUD[rows].flatten(0, 1)).unflatten(0, (-1, units))
            parts.append(increases(base.rows(rows), shifts / scale_P[rows, None, None]))
        return torch.cat(parts)


def lenses_of(anatomy: Anatomy) -> list[NeuronLens]:
    """One for each card of the model, that at home first."""
    return [NeuronLens(anatomy, card) for card in anatomy.cards]


def layer_importances(
    lenses: Sequence[NeuronLens],
    layer: int,
    runs: Sequence[EndActivations],
    scales: FrozenScales,
    target_P: torch.Tensor,
) -> list[LayerImportance]:
    """Importances in one layer of several runs on the same prompts, which are shared out to the cards; at home.

    Unembedding times values is multiplied once on each card, for all runs.

    Args:
        lenses: from ``lenses_of``.
    """
    cards = [lens.card for lens in lenses]
    spans = [(n * len(target_P) // len(cards), (n + 1) * len(target_P) // len(cards)) for n in range(len(cards))]
    shares = [  # all brought before any card begins to compute
        ([run.share(layer, rows, card) for run in runs], scales.rows(rows).on(card), target_P[rows].to(card))
        for card, rows in zip(cards, (slice(*span) for span in spans), strict=True)
    ]

    def share(number: int) -> list[LayerImportance]:
        lens, (own, own_scales, targets) = lenses[number], shares[number]
        if not len(targets):
            return []
        directions_KV = lens.directions(layer)
        return [lens.layer(layer, run, own_scales, targets, directions_KV) for run in own]

    found = [each for each in on_every(cards, share) if each]
    return [LayerImportance.joined(parts, cards[0]) for parts in zip(*found, strict=True)]


def _written(output: torch.Tensor, post: NormParts | None, scale_P: torch.Tensor | None) -> torch.Tensor:
    """What a block's output (P ... D) writes into the stream through the frozen norm behind the block, if any."""
    if post is None or scale_P is None:
        return output
    return output * post.gain_D / scale_P.view(-1, *[1] * (output.ndim - 1))
