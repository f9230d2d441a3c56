"""Which heads an experiment is about, and how many go into one file.

Knows sizes of a model and lists of heads; knows nothing about what is done to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mathinterp.errors import UserError
from mathinterp.models.units import Head

if TYPE_CHECKING:
    from mathinterp.models.anatomy import ModelShape

FEWEST_HEADS, MOST_HEADS = 16, 32  # in a file, and in a batch: never a thousand small files


def check_choice(heads: Sequence[tuple[int, int]] | None, layers: Sequence[int] | None) -> None:
    """Raise UserError unless at most one of them is given, and it names something."""
    if heads is not None and layers is not None:
        raise UserError("`heads` and `layers` name heads in two ways; give one of them")
    if (heads is not None and not heads) or (layers is not None and not layers):
        raise UserError("no heads are chosen; name at least one, or leave `heads` and `layers` out for all")


def chosen_heads(
    shape: ModelShape, heads: Sequence[tuple[int, int]] | None, layers: Sequence[int] | None
) -> list[Head]:
    """``heads``, or all heads of ``layers``, or of the model, layer by layer; UserError for one that does not exist."""
    if heads is None:
        within = range(shape.n_layers) if layers is None else sorted(set(layers))
        heads = [Head(layer, head) for layer in within for head in range(shape.n_heads)]
    for layer, head in heads:
        shape.check_head(layer, head)
    return sorted({Head(*head) for head in heads})


def choice_parameters(heads: Sequence[tuple[int, int]] | None, layers: Sequence[int] | None) -> dict[str, Any]:
    """The choice as run parameters."""
    return {
        "heads": None if heads is None else [f"{layer}.{head}" for layer, head in sorted(set(heads))],
        "layers": None if layers is None else sorted(set(layers)),
    }


def most_at_once(n_heads: int) -> int:
    """Most heads of one layer in one file, and so in one batch: 32 of 32, 20 of 40, 8 of 8."""
    return -(-n_heads // -(-n_heads // MOST_HEADS))


def cut_heads(heads: Sequence[Head]) -> list[list[Head]]:
    """Cut a sorted list of heads into files: whole layers where they are narrow, parts of one where it is wide.

    Llama-2-7B (32 heads per layer) gives one file per layer, 13B (40) two, a model of 8 heads one file for two layers.
    """
    files: list[list[Head]] = [[]]
    for layer in sorted({layer for layer, _ in heads}):
        members = [head for head in heads if head[0] == layer]
        for part in np.array_split(np.array(members), -(-len(members) // MOST_HEADS)):
            if len(files[-1]) >= FEWEST_HEADS:
                files.append([])
            files[-1] += [Head(int(layer), int(head)) for layer, head in part]
    return files
