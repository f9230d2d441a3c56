"""How one FFN neuron drives a later one: edges of the prediction-enhancing graph (paper A, 4.3; method.md section 5).

A lower neuron i writes m_i = c_i v_i into the residual stream at END (Gemma-2: through the norm behind the MLP, its
scale frozen: c_i g' v_i / s'). A later neuron j reads the stream r before its MLP through that layer's norm N with
weight g. Its keys are the gate row and the up row (plain FFN: the fc1 row alone), each times g: coefficient
c = act(a) u with a = <w_gate, N(r)> + b_gate and u = <w_up, N(r)> + b_up (plain: c = act(a)). Edges exist from a lower
layer to a higher:

- sum: <v_i, g (w_gate + w_up)>, weights alone, paper A's inner product. Its sign says nothing before both
  coefficients' signs do. (Gemma-2: v_i times the weight of the norm behind the MLP.)
- signed: sign(c_i) (sign(act(a)) <v_i, g w_gate> + sign(u) <v_i, g w_up>); plain: sign(c_i) sign(c_j) <v_i, g w>. Each
  key counts by the sign of the factor it feeds: positive = what i writes pushes the factors away from zero. Ours.
- first_order: sign(c_j) <m_i, dc_j/dr>, derivative at the prompt's own r, the norm's scale moving too: how much of
  |c_j| what i writes accounts for along the direct path, to first order; in units of the coefficient. Ours.

LayerNorm models: the norm subtracts the mean, so keys (times g) are centred. Parallel blocks (GPT-J, NeoX): r is the
layer's input, which earlier layers' neurons write into all the same; the attention of j's layer stands beside the MLP,
not before it.

Shape legend: P prompt, N neuron of the graph, M neuron that edges start from, K neuron of a layer, D model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from mathinterp.engine.lens.lens import NormParts, norm_parts, wide_dtype, written_values
from mathinterp.engine.lens.neurons import EndActivations
from mathinterp.models.anatomy import Anatomy, Projection
from mathinterp.models.units import Neuron


@dataclass(frozen=True)
class Edges:
    """Pairs of a prompt's neurons, from row to column; float32 (float64 for a float64 model).

    ``exists`` is True from a lower layer to a higher; elsewhere the numbers mean nothing.
    """

    exists_MN: torch.Tensor
    sum_MN: torch.Tensor
    signed_MN: torch.Tensor
    first_order_MN: torch.Tensor

    def of(self, measure: str) -> torch.Tensor:
        """M N: the edges under one of lens.MEASURES."""
        return {"sum": self.sum_MN, "signed": self.signed_MN, "first_order": self.first_order_MN}[measure]


@dataclass(frozen=True)
class _Reading:
    """How each neuron reads its layer's stream on one prompt; rows in the neurons' order."""

    keys_ND: list[torch.Tensor]  # gate and up (plain: fc1), times the norm's weight, centred under a LayerNorm
    signs_N: list[torch.Tensor]  # of the factor that each key feeds
    coefficient_N: torch.Tensor
    gradient_ND: torch.Tensor  # of the coefficient with respect to the stream


class GraphReader:
    """Edges between neurons of one model."""

    def __init__(self, anatomy: Anatomy):
        self.anatomy, self.wide = anatomy, wide_dtype(anatomy.dtype)
        layers = range(anatomy.shape.n_layers)
        self.norms = [norm_parts(anatomy, anatomy.mlp_norm(layer)) for layer in layers]
        self.post_norms = [
            None if (norm := anatomy.mlp_post_norm(layer)) is None else norm_parts(anatomy, norm) for layer in layers
        ]

    @torch.no_grad()
    def values(self, neurons: Sequence[Neuron]) -> torch.Tensor:
        """v of each neuron, times the weight of the norm behind the MLP where there is one: N D."""
        return _by_layer(neurons, lambda layer, numbers: written_values(self.anatomy, layer, numbers))

    @torch.no_grad()
    def coefficients(self, neurons: Sequence[Neuron], activations: EndActivations, prompt: int) -> torch.Tensor:
        """c of each neuron on the prompt: N."""
        return _by_layer(
            neurons, lambda layer, numbers: activations.coefficients_PK[layer][prompt, numbers].to(self.wide)
        )

    @torch.no_grad()
    def edges(
        self, neurons: Sequence[Neuron], activations: EndActivations, prompt: int, sources: int | None = None
    ) -> Edges:
        """Edges of ``neurons`` on one prompt.

        Args:
            activations: of the unedited model; ``prompt`` is the row in them.
            sources: edges from the first so many neurons alone (rows of the result); None: from all.
        """
        layer_N = torch.tensor([layer for layer, _ in neurons])
        lower = neurons[:sources]
        values_MD = self.values(lower)
        lower_M = self.coefficients(lower, activations, prompt)
        reading = self._read(neurons, activations, prompt)
        products = [values_MD @ keys_ND.T for keys_ND in reading.keys_ND]
        signed_MN = sum(product * sign for product, sign in zip(products, reading.signs_N, strict=True))
        assert isinstance(signed_MN, torch.Tensor)
        written_MD = values_MD * (lower_M / self._post_scales(lower, activations, prompt))[:, None]
        return Edges(
            exists_MN=layer_N[:sources, None] < layer_N[None, :],
            sum_MN=torch.stack(products).sum(dim=0),
            signed_MN=lower_M.sign()[:, None] * signed_MN,
            first_order_MN=(written_MD @ reading.gradient_ND.T) * reading.coefficient_N.sign()[None, :],
        )

    def _post_scales(self, neurons: Sequence[Neuron], activations: EndActivations, prompt: int) -> torch.Tensor:
        """What the norm behind each neuron's MLP divides by on the prompt (1 where there is none): N."""

        def of_layer(layer: int, numbers: list[int]) -> torch.Tensor:
            post = self.post_norms[layer]
            if post is None:
                return torch.ones(len(numbers), dtype=self.wide, device=self.anatomy.device)
            return post.scale(activations.mlp_PD[layer][prompt : prompt + 1]).expand(len(numbers))

        return _by_layer(neurons, of_layer)

    def _read(self, neurons: Sequence[Neuron], activations: EndActivations, prompt: int) -> _Reading:
        """Keys, factors' signs, coefficients and their gradients, layer by layer and back in the neurons' order."""
        parts = {
            layer: self._read_layer(layer, numbers, activations, prompt) for layer, numbers in _layers(neurons).items()
        }

        def rows(part_of: Callable[[_Reading], torch.Tensor]) -> torch.Tensor:
            return _by_layer(neurons, lambda layer, _: part_of(parts[layer]))

        keys = range(2 if self.anatomy.shape.gated_mlp else 1)
        return _Reading(
            [rows(partial(_nth_key, i)) for i in keys],
            [rows(partial(_nth_sign, i)) for i in keys],
            rows(lambda part: part.coefficient_N),
            rows(lambda part: part.gradient_ND),
        )

    def _read_layer(self, layer: int, numbers: list[int], activations: EndActivations, prompt: int) -> _Reading:
        anatomy, norm = self.anatomy, self.norms[layer]
        before_PD = activations.inputs_PD if anatomy.shape.parallel else activations.before_mlp_PD
        stream_1D = before_PD[layer][prompt : prompt + 1].to(self.wide)
        scale, unit_D = norm.scale(stream_1D), norm.centre(stream_1D)[0] / norm.scale(stream_1D)
        normed_D = unit_D * norm.gain_D + (0 if norm.bias_D is None else norm.bias_D)
        gate, up = anatomy.gate(layer), anatomy.up(layer)
        projections = [up] if gate is None else [gate, up]
        weights = [projection.weight[numbers].detach().to(self.wide) for projection in projections]
        inputs_N = [
            weight_ND @ normed_D + _bias(projection, numbers, self.wide)
            for weight_ND, projection in zip(weights, projections, strict=True)
        ]
        activated_N, slope_N = _activated(getattr(anatomy.mlp(layer), anatomy.family.activation), inputs_N[0])
        if gate is None:
            factors, slopes = [activated_N], [slope_N]
        else:
            factors, slopes = [activated_N, inputs_N[1]], [slope_N * inputs_N[1], activated_N]
        keys_ND = [weight_ND * norm.gain_D for weight_ND in weights]
        through_norm_ND = sum(slope_N[:, None] * key_ND for slope_N, key_ND in zip(slopes, keys_ND, strict=True))
        assert isinstance(through_norm_ND, torch.Tensor)
        gradient_ND = _through_norm(norm, through_norm_ND, unit_D) / scale
        signs_N = [factor_N.sign() for factor_N in factors]
        return _Reading([norm.centre(key_ND) for key_ND in keys_ND], signs_N, torch.stack(factors).prod(0), gradient_ND)


def _nth_key(number: int, reading: _Reading) -> torch.Tensor:
    return reading.keys_ND[number]


def _nth_sign(number: int, reading: _Reading) -> torch.Tensor:
    return reading.signs_N[number]


def _layers(neurons: Sequence[Neuron]) -> dict[int, list[int]]:
    """Layer -> its neurons' numbers, in the order in which they come."""
    found: dict[int, list[int]] = {}
    for layer, neuron in neurons:
        found.setdefault(layer, []).append(neuron)
    return found


def _by_layer(neurons: Sequence[Neuron], of_layer: Callable[[int, list[int]], torch.Tensor]) -> torch.Tensor:
    """One row per neuron, in their order, from ``of_layer(layer, numbers)``: few look-ups instead of one per neuron."""
    by_layer = _layers(neurons)
    parts = torch.cat([of_layer(layer, numbers) for layer, numbers in by_layer.items()])
    start, next_row = 0, {}
    for layer, numbers in by_layer.items():
        next_row[layer] = iter(range(start, start + len(numbers)))
        start += len(numbers)
    return parts[[next(next_row[layer]) for layer, _ in neurons]]


def _through_norm(norm: NormParts, vectors_ND: torch.Tensor, unit_D: torch.Tensor) -> torch.Tensor:
    """The norm's transposed derivative without its division by the scale: y - n <n, y> / D, centred under a LayerNorm.

    n = ``unit_D`` is the stream divided by its scale (centred under a LayerNorm); the scale moves with the stream.
    """
    if not norm.scaled:
        return vectors_ND
    along_N = vectors_ND @ unit_D / len(unit_D)
    return norm.centre(vectors_ND - along_N[:, None] * unit_D)


def _activated(activation: nn.Module, inputs_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """act(a) and its derivative."""
    with torch.enable_grad():
        leaf_N = inputs_N.detach().clone().requires_grad_()
        activated_N = activation(leaf_N)
        (slope_N,) = torch.autograd.grad(activated_N.sum(), leaf_N)
    return activated_N.detach(), slope_N


def _bias(projection: Projection, numbers: list[int], wide: torch.dtype) -> torch.Tensor | float:
    bias = projection.bias
    return 0.0 if bias is None else bias[numbers].detach().to(wide)
