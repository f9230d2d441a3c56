"""Five estimates of D = m(node as on X_c) - m(X_r), for all nodes at once and pair by pair.

m is the logit difference of pairs.py; a node is patched at every token (or at END alone: ``positions``), and its
estimate sums over these. But for AtP* it is linear in the gradient, so that a layer's neurons sum to its MLP.

Shape legend: B pair of one batch, T token, Z width of a site, U units of a site, S step, L layer.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from mathinterp.engine.attribution.pairs import (
    PairBatch,
    Place,
    Values,
    activations,
    caught,
    changes,
    embedding,
    metric,
    products,
)
from mathinterp.engine.attribution.rules import identity, relevance_rules
from mathinterp.engine.hooks import Edit, edited_output, edited_site
from mathinterp.engine.lens.lens import wide_dtype
from mathinterp.models.anatomy import Anatomy

EMBEDDING: Place = ("residual", 0)


def atp(anatomy: Anatomy, batch: PairBatch, places: Sequence[Place], positions: str, steps: int) -> Values:
    """Attribution patching: D ~ sum over tokens t of (a_c - a_r)_t . (dm / da_t), the gradient at X_r.

    Source: arXiv 2310.10348, which takes the absolute value of this product for each edge from a node to a later one.
    Ours stands at nodes (heads at o_proj's input, MLPs at their output), is summed over edges, and keeps its sign.
    ``first_order`` of engine/paths with freeze "none" is this at END, of the answer's logit alone.
    2 forward passes, 1 backward pass.
    """
    other = activations(anatomy, batch, batch.other, places)
    clean, gradient = _at_clean(anatomy, batch, places)
    return products(anatomy, changes(clean, other, batch, positions), gradient)


def eap_ig_inputs(anatomy: Anatomy, batch: PairBatch, places: Sequence[Place], positions: str, steps: int) -> Values:
    """EAP-IG: the gradient of attribution patching, averaged over embeddings on the line from X_r to X_c.

    D ~ sum_t (a_c - a_r)_t . (1/S) sum_s dm / da_t at embedding e_r + alpha_s (e_c - e_r).
    Source: arXiv 2403.17806 (EAP-IG inputs of MIB, arXiv 2504.13151). Ours differs: alpha_s = (s - 1/2) / S, the
    midpoints, of error S^-2; its authors' code takes s / S from X_c, of error S^-1, with X_r itself the last step.
    Of the embedding itself it is integrated gradients: it sums to m(X_c) - m(X_r). 2 + S forward, S backward passes.
    """
    sides = [activations(anatomy, batch, side, [*places, EMBEDDING]) for side in (batch.clean, batch.other)]
    clean, other = sides
    start, change = clean[EMBEDDING], other[EMBEDDING] - clean[EMBEDDING]
    total: Values = {}
    for alpha in midpoints(steps):
        with embedding(anatomy, _in_place(start + alpha * change)), caught(anatomy, places) as found:
            normed_BD = batch.forward(anatomy, batch.clean)
        _add(total, places, batch.gradients(metric(anatomy, normed_BD, batch), [found[p] for p in places]), steps)
    return products(anatomy, changes(clean, other, batch, positions), total)


def eap_ig_activations(
    anatomy: Anatomy, batch: PairBatch, places: Sequence[Place], positions: str, steps: int
) -> Values:
    """Integrated gradients of each layer's heads together, and of each MLP, from X_r to X_c, all else on X_r.

    D ~ sum_t (a_c - a_r)_t . (1/S) sum_s dm / da_t where the layer's heads (or its MLP) are a_r + alpha_s (a_c - a_r).
    Source: "EAP-IG activations" of MIB (arXiv 2504.13151), after arXiv 2403.17806. As S grows, a layer's heads sum to
    the exact D of all of them patched together, and an MLP has its own exact D. Ours differs: midpoints as in
    ``eap_ig_inputs``, and a node's gradient is averaged over its own interpolation alone, where the authors' code also
    averages it over those of all other layers. 2 + 2 L S forward, 2 L S backward passes.
    """
    clean, other = (activations(anatomy, batch, side, places) for side in (batch.clean, batch.other))
    change = changes(clean, other, batch, positions)
    total: Values = {}
    for moved, read in _together(places):
        for alpha in midpoints(steps):
            leaf = (clean[moved] + alpha * change[moved]).requires_grad_()
            beside = [place for place in read if place != moved]
            with edited_site(anatomy, *moved, _in_place(leaf)), caught(anatomy, beside) as found:
                normed_BD = batch.forward(anatomy, batch.clean)
            values = [leaf if place == moved else found[place] for place in read]
            _add(total, read, batch.gradients(metric(anatomy, normed_BD, batch), values), steps)
    return products(anatomy, change, total)


def relp(anatomy: Anatomy, batch: PairBatch, places: Sequence[Place], positions: str, steps: int) -> Values:
    """Relevance patching: attribution patching with the coefficients of Layer-wise Relevance Propagation.

    D ~ sum_t (a_c - a_r)_t . c_t, where c is what a backward pass gives for dm / da at X_r under the rules of rules.py.
    Source: arXiv 2508.21258. Ours: of its rules the LN-, identity-, half-, 0- and AH-rule (attention weights are
    constants, which its code leaves to choice); Gemma-2's final soft-cap follows the identity-rule. 2 forward passes,
    1 backward pass.
    """
    other = activations(anatomy, batch, batch.other, places)
    with relevance_rules(anatomy):
        clean, coefficients = _at_clean(anatomy, batch, places, relevance=True)
    return products(anatomy, changes(clean, other, batch, positions), coefficients)


def atp_star(
    anatomy: Anatomy, batch: PairBatch, places: Sequence[Place], positions: str, steps: int, *, drop: bool = True
) -> Values:
    """AtP*: attribution patching without its two known kinds of false negatives, saturation and cancellation.

    D ~ sign(AtP) 1/(L-1) sum_l |sum_t (a_c - a_r)_t . (dm / da_t)^l|, the gradient ^l at X_r with nothing passed back
    through what layer l adds to the residual stream (GradDrop). Source: arXiv 2403.00745.
    Its other part, the QK fix, recomputes the softmax where a query or key is patched, to first order from the head's
    output on. At a head's output it has nothing left to mend: a_c - a_r there holds the exact change of softmax and
    values. Ours differs: the tokens of a node are summed before the absolute value (a node is patched at all of
    them), and the estimate has AtP's sign, where theirs has none. 2 forward, L + 1 backward passes; without ``drop`` it
    is ``atp``.
    """
    other = activations(anatomy, batch, batch.other, places)
    layers = anatomy.shape.n_layers if drop else 0
    gate = _Gate()
    with ExitStack() as hooks:
        hooks.enter_context(embedding(anatomy, lambda hidden: hidden))
        found = hooks.enter_context(caught(anatomy, places))  # before the gates: a node is not its own way on
        for layer in range(layers):
            for module in (anatomy.output_projection(layer), anatomy.mlp(layer)):
                hooks.enter_context(edited_output(module, gate.edit(layer)))
        normed_BD = batch.forward(anatomy, batch.clean)
    metric_B, values = metric(anatomy, normed_BD, batch), [found[place] for place in places]
    change = changes({place: value.detach() for place, value in found.items()}, other, batch, positions)

    def estimate(closed: int | None) -> Values:
        gate.closed = closed
        gradients = batch.gradients(metric_B, values, keep=closed is None or closed < layers - 1)
        return products(anatomy, change, dict(zip(places, gradients, strict=True)))

    whole = estimate(None)
    if not drop:
        return whole
    sums = {place: torch.zeros_like(value) for place, value in whole.items()}
    for layer in range(layers):
        for place, value in estimate(layer).items():
            sums[place] += value.abs()
    assert gate.fired == 2 * layers * (layers + 1), f"the gates fired {gate.fired} times"
    return {place: whole[place].sign() * sums[place] / (layers - 1) for place in whole}


METHODS: dict[str, Callable[[Anatomy, PairBatch, Sequence[Place], str, int], Values]] = {
    "atp": atp,
    "eap-ig-inputs": eap_ig_inputs,
    "eap-ig-activations": eap_ig_activations,
    "relp": relp,
    "atp-star": atp_star,
}


def passes_of(method: str, layers: int, steps: int) -> tuple[int, int]:
    """Forward and backward passes over each pair."""
    runs = {"eap-ig-inputs": steps, "eap-ig-activations": 2 * layers * steps}.get(method)
    if runs is None:
        return 2, layers + 1 if method == "atp-star" else 1
    return 2 + runs, runs


def midpoints(steps: int) -> list[float]:
    """(s - 1/2) / S for s = 1 .. S."""
    return [(step + 0.5) / steps for step in range(steps)]


class _Gate:
    """Lets gradients pass through what each layer adds to the residual stream, but for the closed layer."""

    def __init__(self) -> None:
        self.closed: int | None = None
        self.fired = 0

    def edit(self, layer: int) -> Edit:
        def passing(gradient: torch.Tensor) -> torch.Tensor:
            self.fired += 1
            return torch.zeros_like(gradient) if layer == self.closed else gradient

        def edit(output: torch.Tensor) -> torch.Tensor:
            passed = output.view_as(output)
            passed.register_hook(passing)
            return passed.clone()  # Falcon adds into what its MLP gives

        return edit


def _at_clean(
    anatomy: Anatomy, batch: PairBatch, places: Sequence[Place], relevance: bool = False
) -> tuple[Values, Values]:
    """Activations on X_r, and the metric's gradients there (or the coefficients of relevance)."""
    with embedding(anatomy, lambda hidden: hidden), caught(anatomy, places) as found:
        normed_BD = batch.forward(anatomy, batch.clean)
    metric_B = metric(anatomy, normed_BD, batch, identity if relevance else None)
    gradients = batch.gradients(metric_B, [found[place] for place in places])
    clean = {place: value.detach() for place, value in found.items()}
    return clean, dict(zip(places, gradients, strict=True))


def _together(places: Sequence[Place]) -> list[tuple[Place, list[Place]]]:
    """What is interpolated together, and the places whose gradients that gives: an MLP moves with its neurons."""
    found: list[tuple[Place, list[Place]]] = []
    for site, layer in places:
        if site == "head":
            found.append((("head", layer), [("head", layer)]))
        elif site == "mlp":
            neurons: list[Place] = [("neuron", layer)] if ("neuron", layer) in places else []
            found.append(((neurons or [("mlp", layer)])[0], [("mlp", layer), *neurons]))
    return found


def _in_place(value: torch.Tensor) -> Edit:
    return lambda _: value.clone()


def _add(total: Values, places: Sequence[Place], gradients: Sequence[torch.Tensor], steps: int) -> None:
    for place, gradient in zip(places, gradients, strict=True):
        total[place] = total.get(place, 0) + gradient.to(wide_dtype(gradient.dtype)) / steps
