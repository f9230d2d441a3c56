"""The logit lens: the final norm with a frozen scale, and the unembedding, as one linear map (method.md section 5).

Lens(z) = W_U (g * z / s) + constants, where s is the final norm's scale at END of the original run. LayerNorm models:
z's own mean is subtracted first, and the norm's bias is among the constants. A final soft-cap is not part of it.

Shape legend: N vectors, D model width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from mathinterp.errors import UserError
from mathinterp.models.anatomy import Anatomy, Multiplied

NORM_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}  # of the norm's largest output; RMS norms sum in float32
HALF_NORM_TOLERANCE = 2e-2
SUMMED_AT_ONCE = 2**28  # logits: a second product as large as the first would double the memory


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that results are summed in: float64 for a float64 model, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class NormParts:
    """What a norm does: subtract the mean (LayerNorm alone), divide by the scale, times ``gain``, plus ``bias``.

    Where there is no norm, or a number in its place, the scale is 1.
    """

    gain_D: torch.Tensor
    bias_D: torch.Tensor | None
    centred: bool
    eps: float
    scaled: bool = True

    def on(self, card: torch.device) -> "NormParts":
        """The same on another card."""
        return replace(
            self, gain_D=self.gain_D.to(card), bias_D=None if self.bias_D is None else self.bias_D.to(card)
        )  # fmt: skip

    def centre(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """Each row without its mean, for a LayerNorm; else the row itself."""
        return rows_ND - rows_ND.mean(dim=-1, keepdim=True) if self.centred else rows_ND

    def scale(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """What each row is divided by: N."""
        if not self.scaled:
            return rows_ND.new_ones(rows_ND.shape[:-1], dtype=self.gain_D.dtype)
        rows = self.centre(rows_ND.to(self.gain_D.dtype))
        return (rows.square().mean(dim=-1) + self.eps).sqrt()


def norm_parts(anatomy: Anatomy, norm: nn.Module) -> NormParts:
    """The parts of an RMSNorm or LayerNorm of the model, or of what stands in its place, in the wide dtype."""
    wide = wide_dtype(anatomy.dtype)
    if isinstance(norm, nn.Identity | Multiplied):
        factor = norm.factor if isinstance(norm, Multiplied) else 1.0
        gain_D = torch.full((anatomy.shape.d_model,), factor, dtype=wide, device=anatomy.device)
        return NormParts(gain_D, bias_D=None, centred=False, eps=0.0, scaled=False)
    bias = getattr(norm, "bias", None)
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    assert isinstance(eps, float), f"{type(norm).__name__} has no epsilon under a known name"
    return NormParts(
        gain_D=norm.get_parameter("weight").detach().to(anatomy.device, wide) + anatomy.family.norm_offset,
        bias_D=None if bias is None else bias.detach().to(anatomy.device, wide),
        centred=isinstance(norm, nn.LayerNorm),
        eps=eps,
    )


@torch.no_grad()
def written_values(
    anatomy: Anatomy, layer: int, neurons: Sequence[int] | None = None, card: torch.device | None = None
) -> torch.Tensor:
    """What each neuron writes into the residual stream at coefficient 1, but for positive scales: K D, wide dtype.

    The value vectors, times the weight of the norm behind the MLP where the family has one. ``neurons``: those alone.
    """
    values_KD = anatomy.value_vectors(layer, card)
    chosen_KD = (values_KD if neurons is None else values_KD[list(neurons)]).detach().to(wide_dtype(anatomy.dtype))
    post = anatomy.mlp_post_norm(layer)
    return chosen_KD if post is None else chosen_KD * norm_parts(anatomy, post).gain_D.to(chosen_KD.device)


class Lens:
    """The lens of one model. Products of half-precision weights are summed in float32.

    ``gain_D`` is the final norm's, divided by what logits are divided by (Granite). ``card``: where it computes, of a
    model on several; None: at home.
    """

    def __init__(self, anatomy: Anatomy, card: torch.device | None = None):
        self.anatomy, self.card = anatomy, card or anatomy.device
        self.norm = norm_parts(anatomy, anatomy.final_norm).on(self.card)
        self.gain_D = self.norm.gain_D / anatomy.shape.logits_divisor
        self.wide = wide_dtype(anatomy.dtype)
        self.unembedding_VD = anatomy.unembedding.get_parameter("weight").detach().to(self.card)

    @torch.inference_mode()
    def constant(self) -> torch.Tensor:
        """The share of the biases (final norm's and unembedding's) in every logit: V."""
        total = torch.zeros(len(self.unembedding_VD), dtype=self.wide, device=self.card)
        if self.norm.bias_D is not None:
            total += self.unembedding_VD.to(self.wide) @ self.norm.bias_D
        bias = getattr(self.anatomy.unembedding, "bias", None)
        return (
            total if bias is None else total + bias.detach().to(self.card, self.wide)
        ) / self.anatomy.shape.logits_divisor

    @torch.inference_mode()
    def directions(self, vectors_ND: torch.Tensor) -> torch.Tensor:
        """W_U (g * v) of each vector, before the scale: N V. v's mean is subtracted where the final norm does so."""
        return self._unembed(self.norm.centre(vectors_ND.to(self.wide)) * self.gain_D)

    @torch.inference_mode()
    def logits(self, hidden_ND: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
        """Lens(z) of each row under its frozen scale, biases included, no soft-cap: N V."""
        return self.directions(hidden_ND) / scale_N[:, None] + self.constant()

    def _unembed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        weight_VD = self.unembedding_VD
        if weight_VD.dtype == self.wide or not weight_VD.is_cuda:
            return rows_ND @ weight_VD.to(self.wide).T
        # Tensor cores take half-precision operands: the rows as the sum of two keep 16 bits instead of 8.
        high = rows_ND.to(weight_VD.dtype)
        low = (rows_ND - high).to(weight_VD.dtype)
        product = torch.mm(high, weight_VD.T, out_dtype=self.wide)
        at_once = max(1, SUMMED_AT_ONCE // len(weight_VD))
        for sums_nV, low_nD in zip(product.split(at_once), low.split(at_once), strict=True):
            sums_nV.add_(torch.mm(low_nD, weight_VD.T, out_dtype=self.wide))
        return product

    def check(self, hidden_ND: torch.Tensor) -> None:
        """Raise UserError unless the final norm is what ``norm`` says it is, on these rows."""
        expected = self.anatomy.final_norm(hidden_ND).to(self.wide)
        rows = self.norm.centre(hidden_ND.to(self.wide)) / self.norm.scale(hidden_ND)[:, None]
        found = rows * self.norm.gain_D + (0 if self.norm.bias_D is None else self.norm.bias_D)
        limit = NORM_TOLERANCE.get(hidden_ND.dtype, HALF_NORM_TOLERANCE) * expected.abs().max()
        worst = (found - expected).abs().max()
        if not worst <= limit:
            raise UserError(
                f"family '{self.anatomy.shape.model_type}': its final norm is no LayerNorm or RMSNorm times (weight +"
                f" {self.anatomy.family.norm_offset:g}) (off by {float(worst):.2g}); see norm_offset in"
                " mathinterp/models/families.py"
            )
