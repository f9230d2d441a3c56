"""Layers with a part replaced: an output that is known already, or a projection at chosen rows alone.

Each replacement is a module put into a shallow copy of its parent, so the model itself is never touched, the same
code serves every family, and torch.compile sees ordinary modules. A replacement is loaded before a call and empties
itself when the call uses it: what is still loaded afterwards was never asked for, and that is an error.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mathinterp.models.anatomy import Anatomy
from mathinterp.models.split import at_module


class Known(nn.Module):
    """Gives an output computed beforehand, whatever the input."""

    def __init__(self, as_tuple: bool = False):
        super().__init__()
        self.loaded: torch.Tensor | None = None
        self.as_tuple = as_tuple  # attention modules return (output, weights)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loaded output, once; a copy of an MLP's, into which Falcon's layers add in place."""
        output, self.loaded = self.loaded, None
        if self.as_tuple:
            return output, None
        return None if output is None else output.clone()


class Idle(nn.Module):
    """Gives its input back, for calls that are made for their arguments alone."""

    def __init__(self, as_tuple: bool = False):
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The input."""
        return (hidden_states, None) if self.as_tuple else hidden_states


class AtRows(nn.Module):
    """A projection computed at the rows it was given alone (R M, indices into N)."""

    def __init__(self, projection: nn.Module):
        super().__init__()
        self.projection = projection
        self.loaded: torch.Tensor | None = None

    def at_rows(self, values_RNX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loaded rows, once, and the projection of them: R M Y."""
        rows, self.loaded = self.loaded, None
        assert rows is not None
        return rows, self.projection(gather_rows(values_RNX, rows))


class ReadsRows(AtRows):
    """R N X -> R M Y: the output keeps the rows alone."""

    def forward(self, values_RNX: torch.Tensor) -> torch.Tensor:
        """The projection of the loaded rows."""
        return self.at_rows(values_RNX)[1]


class FillsRows(AtRows):
    """R N X -> R N Y: the rows in their places, zero everywhere else."""

    def forward(self, values_RNX: torch.Tensor) -> torch.Tensor:
        """The projection of the loaded rows in their places."""
        rows, found_RMY = self.at_rows(values_RNX)
        return fill_rows(found_RMY.flatten(0, 1), _flat(rows, values_RNX.shape[1]), values_RNX.shape[:2])


class Twin:
    """A shallow copy of a module in which some children are replaced; all else is shared with the original.

    Args:
        original: the module; it stays as it is.
        children: name -> replacement. Those of the kinds above want loading before each call.
    """

    def __init__(self, original: nn.Module, children: Mapping[str, nn.Module]):
        self.module = object.__new__(type(original))  # copy.copy would construct a sharded layer anew
        self.module.__dict__ |= vars(original)
        self.module._modules = dict(original._modules)
        for name, child in children.items():
            assert name in original._modules, f"{type(original).__name__} has no {name}"
            self.module._modules[name] = child
        self._loaded = {n: child for n, child in children.items() if isinstance(child, Known | AtRows)}

    def load(self, **values: torch.Tensor) -> nn.Module:
        """The module, ready for one call with these values in its replaced children."""
        assert values.keys() == self._loaded.keys()
        for name, value in values.items():
            self._loaded[name].loaded = at_module(self.module, value)
        return self.module

    def load_all(self, value: torch.Tensor) -> nn.Module:
        """The module, ready for one call with ``value`` in each replaced child."""
        return self.load(**dict.fromkeys(self._loaded, value))

    def check_used(self) -> None:
        """Raise AssertionError if a loaded value was not asked for; it is forgotten either way."""
        unused = [name for name, child in self._loaded.items() if child.loaded is not None]
        for child in self._loaded.values():
            child.loaded = None
        assert not unused, f"{type(self.module).__name__} never called its {', '.join(unused)}"


def known_twin(anatomy: Anatomy, layer: int, *also_known: str) -> Twin:
    """The layer with the outputs of its attention and of the children ``also_known`` given.

    The norm that only attention reads is left out.
    """
    family = anatomy.family
    children: dict[str, nn.Module] = {family.attention: Known(as_tuple=True), **{name: Known() for name in also_known}}
    if family.attention_norm is not None and family.attention_norm != family.mlp_norm:
        children[family.attention_norm] = nn.Identity()
    return Twin(anatomy.layers[layer], children)


def attention_at_rows(anatomy: Anatomy, attention: nn.Module) -> Twin:
    """An attention module with queries (where the family has them apart) and output at chosen rows alone."""
    family = anatomy.family
    projection = getattr(attention, family.output_projection)
    children: dict[str, nn.Module] = {family.output_projection: ReadsRows(projection)}
    if family.query is not None:
        children[family.query] = FillsRows(getattr(attention, family.query))
    return Twin(attention, children)


def gather_rows(values_RNX: torch.Tensor, rows_RM: torch.Tensor) -> torch.Tensor:
    """R M X: row r's entries ``rows_RM[r]``."""
    picked: torch.Tensor = values_RNX.flatten(0, 1).index_select(0, _flat(rows_RM, values_RNX.shape[1]))
    rows_RMX: torch.Tensor = picked.unflatten(0, rows_RM.shape)
    return rows_RMX


def fill_rows(found_nY: torch.Tensor, flat_n: torch.Tensor, places: torch.Size) -> torch.Tensor:
    """R N Y for ``places`` R N: the found rows at ``flat_n`` of R * N, zero everywhere else."""
    filled = found_nY.new_zeros(places.numel(), found_nY.shape[-1])
    rows_RNY: torch.Tensor = filled.index_copy_(0, flat_n, found_nY).unflatten(0, places)
    return rows_RNY


def _flat(rows_RM: torch.Tensor, places: int) -> torch.Tensor:
    """Indices into R * N rows laid end to end; whole rows are copied much faster so."""
    return (rows_RM + places * torch.arange(len(rows_RM), device=rows_RM.device)[:, None]).flatten()
