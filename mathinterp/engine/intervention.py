"""What an intervention is, apart from how it is run: the one vocabulary of all engines and experiments.

A *site* is a kind of activation of a layer: "head" (a query head's slice of the *input* of the output projection, never
of its output, which mixes heads), "neuron" (its coefficient, a column of down_proj's input), "attention" (the output of
the output projection), "mlp" (the output of the MLP module), "residual" (the residual stream that the layer reads; to
look at, also that which the final norm reads, as of one layer more).
A *value* says what activations become (zero, a mean, those of another run, any vector, a multiple of themselves);
*tokens* say where. A *change* is some units of one site of one layer, their value and tokens; an *intervention* is all
changes that are made together. ``run(interventions)`` of an engine scores each by itself.

Shape legend: P prompt, n token, K neuron, Z width of a site.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import AttentionOutput, Head, Mlp, Neuron, Unit
from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True, eq=False)
class Tokens:
    """n tokens of an engine's prompts: the prompt's index, and the token's in it."""

    prompt_n: np.ndarray
    token_n: np.ndarray

    @staticmethod
    def ends(prompts: Sequence[TokenizedPrompt]) -> "Tokens":
        """END of each prompt."""
        return Tokens(np.arange(len(prompts)), np.array([prompt.end for prompt in prompts]))

    @staticmethod
    def every(prompts: Sequence[TokenizedPrompt]) -> "Tokens":
        """All tokens that are read, prompt by prompt."""
        prompt_n = np.concatenate([np.full(len(prompt.fed), i) for i, prompt in enumerate(prompts)])
        return Tokens(prompt_n, np.concatenate([np.arange(len(prompt.fed)) for prompt in prompts]))

    @staticmethod
    def of_types(types: Sequence[Sequence[str]], *chosen: str) -> "Tokens":
        """Those of some token types, given those of each prompt's tokens (prompts/token_types.py)."""
        places = [(i, t) for i, own in enumerate(types) for t, kind in enumerate(own) if kind in chosen]
        return Tokens(*np.array(places, np.int64).reshape(-1, 2).T)


@dataclass(frozen=True, eq=False)
class Value:
    """What activations become: a vector for every token, a row for each of n tokens, or a multiple of themselves.

    rows: Z, or n Z, where Z is the width of the whole site (``site_width``), whichever units are changed.
    tokens: whose rows those are; None for a vector.
    factor: instead of rows.
    """

    rows: torch.Tensor | None = None
    tokens: Tokens | None = None
    factor: float | None = None

    @staticmethod
    def zero(anatomy: Anatomy, site: str, layer: int, tokens: Tokens | None = None) -> "Value":
        """Zero ablation, at every token by default; biases of output and down projection stay (method.md section 2)."""
        zeros = torch.zeros(site_width(anatomy, site), dtype=anatomy.dtype, device=anatomy.device)
        bias = None
        if site == "attention":
            bias = getattr(anatomy.output_projection(layer), "bias", None)
        elif site == "mlp" and not anatomy.shape.n_experts:
            bias = getattr(anatomy.down_projection(layer), "bias", None)
        value = zeros if bias is None else bias.detach().to(anatomy.device)
        return Value(value) if tokens is None else Value(value.expand(len(tokens.prompt_n), -1), tokens)

    @staticmethod
    def mean(rows_nZ: torch.Tensor, tokens: Tokens | None = None, groups: Sequence[Hashable] | None = None) -> "Value":
        """The mean of all rows, for every token; or at each of n tokens the mean over the rows of its group."""
        if tokens is None or groups is None:
            return Value(rows_nZ.mean(dim=0))
        number = {key: i for i, key in enumerate(dict.fromkeys(groups))}
        group_n = torch.tensor([number[key] for key in groups], device=rows_nZ.device)
        wide = rows_nZ.to(torch.float64 if rows_nZ.dtype == torch.float64 else torch.float32)
        sums = wide.new_zeros(len(number), rows_nZ.shape[1]).index_add_(0, group_n, wide)
        counts = torch.bincount(group_n, minlength=len(number))
        return Value((sums / counts[:, None])[group_n].to(rows_nZ.dtype), tokens)


@dataclass(frozen=True, eq=False)
class Change:
    """Units of one site of one layer, and what they become.

    units: heads or neurons; None for all of the site; a boolean K, or P K where neurons differ from prompt to prompt.
    tokens: where; None: every token that the value is for.
    """

    site: str
    layer: int
    units: tuple[int, ...] | torch.Tensor | None
    value: Value
    tokens: Tokens | None = None


Intervention = tuple[Change, ...]
CLEAN: Intervention = ()


def intervention(
    units: Iterable[Unit], value: Value | Callable[[str, int], Value], tokens: Tokens | None = None
) -> Intervention:
    """The units changed together.

    Args:
        value: what they become; or a function of site and layer that says so.
        tokens: where; None: every token that the value is for.
    """
    places: dict[tuple[int, str], list[int]] = {}
    for unit in units:
        number = unit.head if isinstance(unit, Head) else unit.neuron if isinstance(unit, Neuron) else None
        members = places.setdefault((unit.layer, site_of(unit)), [])
        if number is not None:
            members.append(number)
    return tuple(
        Change(
            site, layer, tuple(sorted(set(members))) or None,
            value if isinstance(value, Value) else value(site, layer), tokens,
        )
        for (layer, site), members in sorted(places.items())
    )  # fmt: skip


def zeroed(anatomy: Anatomy, units: Iterable[Unit]) -> Intervention:
    """The units zeroed at every token."""
    return intervention(units, partial(Value.zero, anatomy))


def site_of(unit: Unit) -> str:
    """The kind of activation that a unit is."""
    if isinstance(unit, Head):
        return "head"
    if isinstance(unit, Neuron):
        return "neuron"
    return "mlp" if isinstance(unit, Mlp) else "attention" if isinstance(unit, AttentionOutput) else "residual"


def no_op(anatomy: Anatomy, layer: int) -> Intervention:
    """No head of a layer, which an engine runs as it runs heads of it."""
    return (Change("head", layer, (), Value.zero(anatomy, "head", layer)),)


def first_middle_last(layers: int) -> list[int]:
    """The layers in which a no-op says how far an engine strays from itself."""
    return sorted({0, layers // 2, layers - 1})


def site_width(anatomy: Anatomy, site: str) -> int:
    """Z: numbers per token."""
    shape = anatomy.shape
    return {"head": shape.n_heads * shape.d_head, "neuron": shape.n_neurons}.get(site, shape.d_model)


def label(changes: Intervention) -> str:
    """For messages: "heads 14.19, 17.22", "mlp 3"."""
    parts = []
    for site in dict.fromkeys(change.site for change in changes):
        own = [change for change in changes if change.site == site]
        named = [
            f"{change.layer}.{unit}" if unit is not None else str(change.layer)
            for change in own
            for unit in (change.units if isinstance(change.units, tuple) else (None,))
        ]
        parts.append(f"{site}{'s' if len(named) > 1 and site in ('head', 'neuron') else ''} {', '.join(named)}")
    return "; ".join(parts) or "nothing"


def differing_layers(one: Intervention, other: Intervention) -> set[int]:
    """Layers in which two interventions are not the same."""

    def parts(changes: Intervention) -> set[tuple[int, Any]]:
        named: set[tuple[int, Any]] = set()
        for change in changes:
            units = change.units if isinstance(change.units, tuple) else (id(change.units),)
            named |= {(change.layer, (change.site, unit, id(change.value), id(change.tokens))) for unit in units}
        return named

    return {layer for layer, _ in parts(one) ^ parts(other)}
