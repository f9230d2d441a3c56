"""Attention over packed trees without a dense mask, for half-precision models on a GPU.

A pack's nodes are in depth-first order, so node i sees node j iff j <= i < end of j's subtree, and what a block of
consecutive nodes sees outside itself is the path from the root to its first node. So each block of BLOCK queries reads
its own BLOCK keys and one path: work grows with the nodes times the longest prompt, not with their square, and packs
may be large enough to repeat hardly any prefix. A decoder takes this through transformers' attention interface, on a
shallow copy of each attention module: the model itself stays as it is.

The kernel for CUDA is in tree_attention_triton.py; ``blockwise`` here is its reference, and runs on a CPU.
"""

import copy
import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from mathinterp.engine.layers import Call, RecordedCalls
from mathinterp.engine.parts import Twin
from mathinterp.engine.tree.forest import Forest
from mathinterp.models.anatomy import Anatomy

NAME = "mathinterp_tree"  # of this attention in transformers' interface
BLOCK = 64  # queries that share a path
MOST_WIDTH = 128  # of a head: a block's queries, keys and values stay in the fast memory of one multiprocessor
OLDEST = (8, 0)  # compute capability: bfloat16 products in Triton
PATH_CHUNK = 16  # path lengths are multiples of it, filled up with -1
Trees = tuple[torch.Tensor, torch.Tensor]  # ends P N, paths P B C; what stands in for the attention mask


def serves(anatomy: Anatomy, sequences: Sequence[Sequence[int]]) -> bool:
    """Whether the kernel can take the place of the model's own attention on these token sequences.

    It wants half precision on CUDA with Triton, attention that transformers dispatches by name and that the family runs
    as SDPA (so no soft-cap), heads no wider than MOST_WIDTH, and no sliding window that the sequences would feel.
    """
    half = anatomy.dtype in (torch.bfloat16, torch.float16)
    longest = max(map(len, sequences))
    return (
        anatomy.device.type == "cuda"
        and half
        and anatomy.shape.d_head <= MOST_WIDTH
        and torch.cuda.get_device_capability(anatomy.device) >= OLDEST
        and importlib.util.find_spec("triton") is not None
        and dispatches(anatomy)
        and all(window is None or window >= longest for window in anatomy.shape.attention_windows)
    )


def dispatches(anatomy: Anatomy) -> bool:
    """Whether the family's attention takes its kernel from transformers' attention interface, as plain SDPA."""
    names = inspect.unwrap(type(anatomy.attention(0)).forward).__code__.co_names
    return anatomy.family.attention_backend == "sdpa" and "ALL_ATTENTION_FUNCTIONS" in names


def with_tree_attention(anatomy: Anatomy, layer: int) -> nn.Module:
    """A shallow copy of the layer whose attention takes ``Trees`` for its mask; it has the modules of now."""
    attention = Twin(anatomy.attention(layer), {}).module
    config: Any = copy.copy(attention.config)
    config._attn_implementation = NAME
    attention.config = config
    return Twin(anatomy.layers[layer], {anatomy.family.attention: attention}).module


def with_trees(calls: RecordedCalls, trees: Trees) -> RecordedCalls:
    """The calls with ``trees`` in place of every dense mask (P 1 N N)."""
    n_nodes = trees[0].shape[1]
    on_card: dict[torch.device, Trees] = {trees[0].device: trees}

    def swapped(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[1:] == (1, n_nodes, n_nodes)):
            return value
        if value.device not in on_card:
            on_card[value.device] = tuple(each.to(value.device) for each in trees)  # type: ignore[assignment]
        return on_card[value.device]

    def swap(call: Call) -> Call:
        new = Call(tuple(map(swapped, call.args)), {name: swapped(value) for name, value in call.kwargs.items()})
        put = [id(each) for each in on_card.values()]
        assert any(id(value) in put for value in (*new.args, *new.kwargs.values())), "a layer got no mask"
        return new

    return RecordedCalls(calls.batch, calls.embedded_PND, [*map(swap, calls.layer)], [*map(swap, calls.attention)])


def trees_of(forest: Forest, packs: np.ndarray, device: torch.device) -> Trees:
    """Where each node's subtree ends (P N) and which nodes each block sees before itself (P B C, -1 where fewer)."""
    ends = np.stack([forest.subtree_ends(int(pack)) for pack in packs])
    paths = [[_path(forest.parents_PN[pack], start) for start in range(0, forest.pack_size, BLOCK)] for pack in packs]
    # one length for all packs of the forest: each length would be a compilation
    length = max(PATH_CHUNK, -(-int(forest.depths_PN.max()) // PATH_CHUNK) * PATH_CHUNK)
    filled = np.full((len(packs), len(paths[0]), length), -1)
    for pack, blocks in enumerate(paths):
        for block, path in enumerate(blocks):
            filled[pack, block, : len(path)] = path
    return tuple(torch.from_numpy(array.astype(np.int32)).to(device) for array in (ends, filled))  # type: ignore[return-value]


def _path(parents_N: np.ndarray, node: int) -> list[int]:
    """The ancestors of ``node``, from the root down."""
    path = []
    while (node := int(parents_N[node])) >= 0:
        path.append(node)
    return path[::-1]


def blockwise(
    query_RHNZ: torch.Tensor,
    key_RGNZ: torch.Tensor,
    value_RGNZ: torch.Tensor,
    ends_RN: torch.Tensor,
    paths_RBC: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attention of every node to itself and its ancestors: R N H Z, Z the width of a head, G key/value groups.

    The kernel's steps one after another: each block of queries against its own nodes and its path.
    """
    (rows, heads, nodes, _), groups = query_RHNZ.shape, key_RGNZ.shape[1]
    key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key_RGNZ, value_RGNZ))
    at_row = torch.arange(rows, device=query_RHNZ.device)[:, None]
    blocks = []
    for block, start in enumerate(range(0, nodes, BLOCK)):
        own = torch.arange(start, min(start + BLOCK, nodes), device=query_RHNZ.device)
        path_RC = paths_RBC[:, block].long()
        seen_RK = torch.cat([own.expand(rows, -1), path_RC.clamp(min=0)], dim=1)
        known_RK = torch.cat([torch.ones_like(own, dtype=torch.bool).expand(rows, -1), path_RC >= 0], dim=1)
        inside_RQK = (seen_RK[:, None] <= own[:, None]) & (own[:, None] < ends_RN[at_row, seen_RK][:, None])
        keys_RHKZ, values_RHKZ = (x[at_row, :, seen_RK].transpose(1, 2) for x in (key, value))
        products = query_RHNZ[:, :, own] @ keys_RHKZ.transpose(2, 3) * scaling
        allowed = (inside_RQK & known_RK[:, None])[:, None]
        blocks.append(products.masked_fill(~allowed, -torch.inf).softmax(dim=-1) @ values_RHKZ)
    return torch.cat(blocks, dim=2).transpose(1, 2).contiguous()


tree_attention = torch.library.custom_op("mathinterp::tree_attention", blockwise, mutates_args=())


@tree_attention.register_kernel("cuda")
def _on_cuda(*inputs: Any) -> torch.Tensor:
    from mathinterp.engine.tree.attention_triton import fused_tree_attention  # Triton comes with CUDA builds alone

    return fused_tree_attention(*inputs)


@tree_attention.register_fake
def _shape(query_RHNZ: torch.Tensor, *_: Any) -> torch.Tensor:
    rows, heads, nodes, width = query_RHNZ.shape
    return query_RHNZ.new_empty(rows, nodes, heads, width)


def _forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Trees,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; a window is not applied: ``serves`` lets none through that would be felt."""
    assert softcap is None, "tree attention knows no soft-cap"
    assert position_bias is None, "tree attention knows no position bias"
    assert s_aux is None, "tree attention knows no attention sinks"
    assert dropout == 0, "tree attention knows no dropout"
    ends_RN, paths_RBC = attention_mask
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return tree_attention(query, key, value, ends_RN, paths_RBC, scale), None


AttentionInterface.register(NAME, _forward)
