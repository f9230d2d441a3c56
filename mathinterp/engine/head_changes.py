"""What o_proj gives where some of the heads that it reads are changed.

Shape legend: P pack, N tree node, M answer slot, E edit, D model width, Z o_proj input width.
"""

from collections.abc import Sequence
from typing import Any

import torch

from mathinterp.engine.intervention import Change
from mathinterp.engine.parts import gather_rows
from mathinterp.engine.placement import Placement
from mathinterp.models.anatomy import Anatomy


def heads_changed(
    anatomy: Anatomy,
    changes: Sequence[Change],
    placement: Placement,
    span: Any,
    clean_PNZ: torch.Tensor,
    rows_PM: torch.Tensor | None,
) -> torch.Tensor:
    """Attention output (E * P) N D under each change of heads of one layer, at ``rows_PM`` alone where given.

    o_proj is linear, so a change of heads moves its output by the share of their slices alone. (A quantised one is not,
    as it rounds what it reads: there it runs anew for each change.)

    Args:
        span: which of the placement's rows ``clean_PNZ`` are.
    """
    projection = anatomy.output_projection(changes[0].layer)

    def at_rows(values_PNX: torch.Tensor) -> torch.Tensor:
        return values_PNX if rows_PM is None else gather_rows(values_PNX, rows_PM)

    output_PND: torch.Tensor = projection(at_rows(clean_PNZ))
    edited: torch.Tensor = output_PND.new_empty(len(changes), *output_PND.shape)
    weight = None if anatomy.quantised else anatomy.output_weight(changes[0].layer)
    for row, change in zip(edited, changes, strict=True):
        if not change.units:
            row.copy_(output_PND)
            continue
        if weight is None:
            row.copy_(projection(at_rows(_input(anatomy, change, placement, span, clean_PNZ))))
            continue
        before = output_PND
        for columns in map(anatomy.head_slice, change.units):
            clean = clean_PNZ[..., columns]
            moved = at_rows(placement.apply(change.value, clean, span, columns) - clean)
            torch.addmm(before.flatten(0, 1), moved.flatten(0, 1), weight[columns], out=row.flatten(0, 1))
            before = row
    return edited.flatten(0, 1)


def _input(
    anatomy: Anatomy, change: Change, placement: Placement, span: Any, clean_PNZ: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """What o_proj reads under the change."""
    changed_PNZ = clean_PNZ.clone()
    for columns in map(anatomy.head_slice, change.units or ()):
        changed_PNZ[..., columns] = placement.apply(change.value, clean_PNZ[..., columns], span, columns)
    return changed_PNZ
