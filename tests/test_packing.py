"""How prompts are laid out on a GPU: nothing here needs one."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mathinterp.engine.tree.forest import Planter, count_nodes
from mathinterp.engine.tree.packing import GPU_TOKENS, LARGEST_PACK, best_packing

LLAMA_2_7B = {"weights": 202_383_360, "n_heads": 32, "d_head": 128}
SMOLLM2 = {"weights": 3_540_096, "n_heads": 9, "d_head": 64}


def shape_only(weights: int, n_heads: int, d_head: int, n_layers: int = 32) -> Any:
    """What best_packing looks at of a model."""
    parameters = [torch.empty(weights, device="meta")]
    layer = SimpleNamespace(parameters=lambda: parameters)
    return SimpleNamespace(shape=SimpleNamespace(n_layers=n_layers, n_heads=n_heads, d_head=d_head), layers=[layer])


def sentences(count: int = 1600) -> list[tuple[int, ...]]:
    """Token ids as of arithmetic sentences: few beginnings, two numbers, an end."""
    rng = np.random.default_rng(0)
    stems = [tuple(rng.integers(10, 99, size=6)) for _ in range(8)]
    return [(1, *stems[i % 8], *rng.integers(0, 9, size=2), 7, *rng.integers(0, 9, size=3)) for i in range(count)]


@pytest.mark.parametrize("dense_masks", [True, False])
@pytest.mark.parametrize(("size", "edits"), [(LLAMA_2_7B, 32), (LLAMA_2_7B, 20), (SMOLLM2, 9), (SMOLLM2, 13)])
def test_batches_are_full_even_and_within_the_limit(size: dict[str, int], edits: int, dense_masks: bool) -> None:
    pack, together, at_once = best_packing(
        shape_only(**size), sentences(), None,
        edits=edits, max_tokens=GPU_TOKENS, on_gpu=True, dense_masks=dense_masks,
    )  # fmt: skip
    assert edits % at_once == 0
    rows = pack * together * at_once
    assert GPU_TOKENS / 2 < rows <= GPU_TOKENS


def test_without_dense_masks_packs_are_large_and_repeat_less() -> None:
    def nodes(dense_masks: bool) -> int:
        pack, together, _ = best_packing(
            shape_only(**LLAMA_2_7B), sentences(), None,
            edits=32, max_tokens=GPU_TOKENS, on_gpu=True, dense_masks=dense_masks,
        )  # fmt: skip
        assert pack <= LARGEST_PACK
        return -(-Planter(sentences()).count(pack) // together) * together * pack

    fewest = count_nodes(sentences())
    assert fewest <= nodes(False) < nodes(True)
    assert nodes(False) < 1.02 * fewest


def test_a_few_layers_are_laid_out_as_the_whole_model() -> None:
    """What is compiled ahead on a stand-in of three layers must fit the model."""
    layouts = {
        best_packing(
            shape_only(**LLAMA_2_7B, n_layers=layers), sentences(), None,
            edits=32, max_tokens=GPU_TOKENS, on_gpu=True, dense_masks=False,
        )
        for layers in (3, 32)
    }  # fmt: skip
    assert len(layouts) == 1
