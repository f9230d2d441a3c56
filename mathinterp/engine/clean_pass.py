"""The clean pass of the packed engine: the arguments of every layer, and every layer's input at every node.

Shape legend: L layer, P pack, N tree node, D model width.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mathinterp.engine.layer_runner import Layers
from mathinterp.engine.layers import RecordedCalls, joined, record
from mathinterp.engine.tree.attention import trees_of, with_trees
from mathinterp.engine.tree.forest import Forest
from mathinterp.engine.tree.packing import Group
from mathinterp.models.anatomy import Anatomy

CACHE_SHARE = 0.4  # of the free device memory that cached residuals may take


@torch.inference_mode()
def clean_pass(
    layers: Layers, forest: Forest, groups: Sequence[Group], together: int | None, *, tree_attention: bool
) -> tuple[torch.Tensor, list[RecordedCalls]]:
    """Inputs of all layers (L P N D, on the model's device where they fit), and the calls of each group.

    In half precision a product's last bits depend on the shape of its batch, and clean and edited values are compared:
    there ``together`` groups run at once, as many as edited passes have copies. None: the model's own passes.
    """
    anatomy = layers.anatomy
    shape = (anatomy.shape.n_layers, forest.n_packs, forest.pack_size, anatomy.shape.d_model)
    residual_LPND = torch.empty(shape, dtype=anatomy.dtype, device=_cache_device(anatomy, math.prod(shape)))

    def keeper(group: Group) -> Callable[[int, torch.Tensor], None]:
        def keep(layer: int, hidden_PND: torch.Tensor) -> None:
            residual_LPND[layer, group.span] = hidden_PND.to(residual_LPND.device)

        return keep

    calls = []
    for group in groups:
        recorded = record(anatomy, forest, group.packs, keeper(group) if together is None else None)
        trees = trees_of(forest, group.packs, anatomy.device) if tree_attention else None
        calls.append(recorded if trees is None else with_trees(recorded, trees))
    if together is not None:
        _rerun(layers, groups, calls, together, residual_LPND)
    return residual_LPND, calls


def _rerun(
    layers: Layers, groups: Sequence[Group], calls: Sequence[RecordedCalls], together: int, residual_LPND: torch.Tensor
) -> None:
    """The clean pass again, ``together`` groups at once."""
    last = len(residual_LPND) - 1
    for start in range(0, len(groups), together):
        indices = [i % len(groups) for i in range(start, start + together)]
        packs = torch.from_numpy(np.concatenate([groups[i].packs for i in indices]))
        of_all = joined([calls[i] for i in indices])
        hidden = of_all.embedded_PND
        for layer in range(last + 1):
            residual_LPND[layer, packs] = hidden.to(residual_LPND.device)
            if layer < last:  # in every pass the last one runs at answer positions only
                hidden = layers.whole(layer, hidden, of_all)


def _cache_device(anatomy: Anatomy, elements: int) -> torch.device:
    if anatomy.device.type != "cuda":
        return anatomy.device
    free, _ = torch.cuda.mem_get_info(anatomy.device)
    kept = torch.cuda.memory_reserved(anatomy.device) - torch.cuda.memory_allocated(anatomy.device)  # spare, by torch
    wanted = elements * torch.empty(0, dtype=anatomy.dtype).element_size()
    return anatomy.device if wanted < CACHE_SHARE * (free + kept) else torch.device("cpu")
