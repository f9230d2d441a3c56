"""Interventions laid out over an engine's rows (packs or prompts) and places (tree nodes or tokens), and as hooks.

Shape legend: E intervention, R row, T place, n token, H query head, Z width of a site.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch

from mathinterp.engine.hooks import Edit, edited_site
from mathinterp.engine.intervention import Change, Intervention, Tokens, Value, site_width
from mathinterp.models.anatomy import Anatomy

ALL = slice(None)


class Placement:
    """Lays values and tokens out, each once.

    Args:
        rows, places: how many the engine has.
        flat: row * places + place of each of n tokens.
    """

    def __init__(self, anatomy: Anatomy, rows: int, places: int, flat: Callable[[Tokens], np.ndarray]):
        self.anatomy, self.rows, self.places, self.flat = anatomy, rows, places, flat
        self._laid_out: dict[int, tuple[object, torch.Tensor]] = {}  # by id; keeps the object, so that ids stay its own

    def lay_out(self, interventions: Sequence[Intervention]) -> None:
        """Lay out now all that these need, before batches run side by side."""
        for change in chain.from_iterable(interventions):
            if change.value.tokens is not None:
                self._placed(change.value.tokens, change.value.tokens, None)
                self._placed(change.value, change.value.tokens, change.value.rows)
            if change.tokens is not None:
                self._placed(change.tokens, change.tokens, None)

    def apply(self, value: Value, clean: torch.Tensor, rows: Any = ALL, columns: slice = ALL) -> torch.Tensor:
        """``clean`` (R' T' Z', columns ``columns`` of the site) with the value at each of its tokens."""
        new = self._new(value, clean, rows, columns)
        if value.tokens is None:
            return new.expand_as(clean)
        return torch.where(self._where(value.tokens, clean, rows), new, clean)

    def changed(self, clean_ERTZ: torch.Tensor, changes_E: Sequence[Change | None], rows: Any) -> torch.Tensor:
        """``clean_ERTZ`` with one change of each intervention made (None: none); all are of one site and value."""
        given = [change for change in changes_E if change is not None]
        value, mask = given[0].value, self._units(given[0].site, changes_E, rows)
        if value.tokens is not None:
            mask = mask & self._where(value.tokens, clean_ERTZ, rows)
        if any(change.tokens is not None for change in given):
            everywhere = torch.ones((), dtype=torch.bool, device=mask.device).expand(*clean_ERTZ.shape[1:3], 1)
            tokens_E = [change.tokens if change is not None else None for change in changes_E]
            places = [everywhere if tokens is None else self._where(tokens, clean_ERTZ, rows) for tokens in tokens_E]
            mask = mask & torch.stack(places)
        return torch.where(mask, self._new(value, clean_ERTZ, rows), clean_ERTZ)

    def _new(self, value: Value, clean: torch.Tensor, rows: Any, columns: slice = ALL) -> torch.Tensor:
        if value.rows is None:
            assert value.factor is not None
            return clean * value.factor
        if value.tokens is None:
            return value.rows[columns].to(clean.dtype)
        laid_out_RTZ = self._placed(value, value.tokens, value.rows)
        return laid_out_RTZ[rows][:, : clean.shape[-2], columns].to(clean.dtype)

    def _where(self, tokens: Tokens, clean: torch.Tensor, rows: Any) -> torch.Tensor:
        """Boolean R' T' 1; a batch is as long as its longest sentence, the placement as the longest of all."""
        return self._placed(tokens, tokens, None)[rows][:, : clean.shape[-2], None]

    def _placed(self, of: object, tokens: Tokens, rows_n: torch.Tensor | None) -> torch.Tensor:
        """R T ...: the tokens' rows (None: True) in their places, 0 everywhere else."""
        if id(of) not in self._laid_out:
            index_n = torch.from_numpy(self.flat(tokens)).to(self.anatomy.device)
            rows_n = torch.ones_like(index_n, dtype=torch.bool) if rows_n is None else rows_n
            filled = rows_n.new_zeros(self.rows * self.places, *rows_n.shape[1:])
            filled[index_n] = rows_n
            self._laid_out[id(of)] = of, filled.unflatten(0, (self.rows, self.places))
        return self._laid_out[id(of)][1]

    def _units(self, site: str, changes_E: Sequence[Change | None], rows: Any) -> torch.Tensor:
        """Boolean E (1 or R) 1 (1 or Z): which numbers of the site each intervention changes."""
        masks = [self._columns(site, change, rows) for change in changes_E]
        return torch.stack(torch.broadcast_tensors(*masks)).to(self.anatomy.device)[:, :, None]

    def _columns(self, site: str, change: Change | None, rows: Any) -> torch.Tensor:
        """Boolean (1 or R) (1 or Z)."""
        if change is None or change.units is None:
            return torch.full((1, 1), change is not None)
        if isinstance(change.units, torch.Tensor):
            return change.units[None] if change.units.ndim == 1 else change.units[rows]
        columns_Z = torch.zeros(site_width(self.anatomy, site), dtype=torch.bool)
        for places in map(self.anatomy.head_slice, change.units) if site == "head" else [list(change.units)]:
            columns_Z[places] = True
        return columns_Z[None]


@contextmanager
def hooked(
    placement: Placement, interventions: Sequence[Intervention], rows: Any = ALL, layers: Collection[int] | None = None
) -> Iterator[None]:
    """Within the block the model computes under E interventions: each hook must fire, and none stays.

    Args:
        interventions: of E copies of the rows, one copy after another.
        rows: which of the engine's rows run.
        layers: those that run; None: all.
    """
    places: dict[tuple[int, str], list[list[Change | None]]] = {}  # what is changed, value by value
    for number, changes in enumerate(interventions):
        for change in changes:
            if layers is None or change.layer in layers:
                _group_for(change, number, places.setdefault((change.layer, change.site), []), len(interventions))
    with ExitStack() as hooks:
        for (layer, site), groups in places.items():
            hooks.enter_context(edited_site(placement.anatomy, site, layer, _edit(placement, groups, rows)))
        yield


def _group_for(change: Change, number: int, groups: list[list[Change | None]], count: int) -> None:
    """Put the change of an intervention with those of other ones that have the same value."""
    for changes_E in groups:
        if changes_E[number] is None and any(other and other.value is change.value for other in changes_E):
            changes_E[number] = change
            return
    groups.append([None] * count)
    groups[-1][number] = change


def _edit(placement: Placement, groups: Sequence[Sequence[Change | None]], rows: Any) -> Edit:
    def edit(clean_QTZ: torch.Tensor) -> torch.Tensor:
        clean_ERTZ: torch.Tensor = clean_QTZ.unflatten(0, (len(groups[0]), -1))
        for changes_E in groups:
            clean_ERTZ = placement.changed(clean_ERTZ, changes_E, rows)
        return clean_ERTZ.flatten(0, 1)

    return edit


def everywhere(anatomy: Anatomy) -> Placement:
    """For vectors alone, which need no rows: whatever runs is changed at every token."""

    def none(tokens: Tokens) -> np.ndarray:
        raise AssertionError("nothing is known of prompts and tokens here")

    return Placement(anatomy, 0, 0, none)
