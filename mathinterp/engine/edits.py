"""What an intervention is, apart from how it is run.

An edit names one or more heads of a layer, or the layer's MLP; a replacement says what their activations
become and at which tokens. Both engines take the same two objects. Sites: "head" is the query head's slice of
the *input* of the output projection (never its output, which mixes heads); "mlp" is the output of the MLP module.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mathinterp.models.anatomy import Anatomy


@dataclass(frozen=True)
class Edit:
    """Heads of one layer that are replaced together, or the layer's MLP."""

    layer: int
    site: str  # "head" or "mlp"
    heads: tuple[int, ...] = ()

    @staticmethod
    def heads_of(layer: int, heads: Sequence[int]) -> "Edit":
        """Edit the given query heads of ``layer`` together; no heads = a no-op."""
        return Edit(layer, "head", tuple(heads))

    @staticmethod
    def mlp_of(layer: int) -> "Edit":
        """Edit the whole MLP block of ``layer``."""
        return Edit(layer, "mlp")

    @property
    def label(self) -> str:
        """For messages: "head 17.22" or "mlp 17"."""
        if self.site == "mlp":
            return f"mlp {self.layer}"
        return "head " + "+".join(f"{self.layer}.{head}" for head in self.heads)


@dataclass(frozen=True)
class Replacement:
    """New activations: one vector for every token, or one row for each of n named tokens.

    values: Z, or n Z, where Z is the width of the site (``site_width``).
    prompt_n, token_n: prompt index and token index of each row; None for a vector that goes everywhere.
    """

    values: torch.Tensor
    prompt_n: np.ndarray | None = None
    token_n: np.ndarray | None = None

    @staticmethod
    def zero(anatomy: Anatomy, site: str, layer: int) -> "Replacement":
        """Zero ablation at every token; the output projection's bias stays (method.md section 2)."""
        zeros = torch.zeros(site_width(anatomy, site), dtype=anatomy.dtype, device=anatomy.device)
        if site != "mlp" or anatomy.shape.n_experts:
            return Replacement(zeros)
        bias = getattr(anatomy.down_projection(layer), "bias", None)  # zeroed neurons leave down_proj's bias
        return Replacement(zeros if bias is None else bias.detach())

    @property
    def everywhere(self) -> bool:
        """True if one vector replaces the activation of every token."""
        return self.prompt_n is None


def site_width(anatomy: Anatomy, site: str) -> int:
    """Z: numbers per token at "head" (o_proj's input), "mlp" (the MLP's output) or "neuron" (down_proj's input)."""
    shape = anatomy.shape
    return {"head": shape.n_heads * shape.d_head, "mlp": shape.d_model, "neuron": shape.n_neurons}[site]


class PlacedReplacement:
    """A replacement laid out over an engine's batch of rows: R rows (packs or prompts) x T places."""

    def __init__(self, values: torch.Tensor, where_RT: torch.Tensor | None):
        self.values, self.where_RT = values, where_RT

    @staticmethod
    def place(replacement: Replacement, rows: int, places: int, flat_n: np.ndarray | None) -> "PlacedReplacement":
        """Lay ``replacement`` out; ``flat_n`` is row * places + place of each of its n tokens."""
        if flat_n is None:
            return PlacedReplacement(replacement.values, None)
        values = replacement.values
        index = torch.from_numpy(flat_n).to(values.device)
        laid_out = values.new_zeros(rows * places, values.shape[-1])
        laid_out[index] = values
        where = torch.zeros(rows * places, dtype=torch.bool, device=values.device)
        where[index] = True
        return PlacedReplacement(laid_out.unflatten(0, (rows, places)), where.unflatten(0, (rows, places)))

    def apply(
        self, clean: torch.Tensor, rows: np.ndarray | slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        """``clean`` (R' T Z', columns ``columns`` of the site) with the new values where they belong."""
        if self.where_RT is None:
            return self.values[columns].to(clean.dtype).expand_as(clean)
        new = self.values[rows][..., columns].to(clean.dtype)
        return torch.where(self.where_RT[rows][..., None], new, clean)
