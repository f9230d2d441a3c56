"""The kernel of tree_attention.py for CUDA: blocks of nodes against their own keys and one path of ancestors.

Each program holds one block of queries of one head, takes the block's own keys, then the path in chunks, with a running
maximum, and accumulates in float32. Needs Triton, which comes with CUDA builds of torch; tree_attention.blockwise is
the reference.
"""

import torch
import triton
import triton.language as tl

from mathinterp.engine.tree.attention import BLOCK, PATH_CHUNK

WARPS = 4


@triton.jit
def _tree_kernel(
    query, key, value, ends, paths, output,
    query_row, query_head, query_node, key_row, key_head, key_node, value_row, value_head, value_node,
    output_row, output_head, output_node,
    nodes, blocks, path_length, heads_per_group, width, scaling,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """output[row, node, head] = softmax over self and ancestors of (scaling * query . key), times value."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    group = head // heads_per_group
    node = block * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    inside = (node < nodes)[:, None] & (column < width)[None, :]
    inside_t = (node < nodes)[None, :] & (column < width)[:, None]

    queries = tl.load(
        query + row * query_row + head * query_head + node[:, None] * query_node + column[None, :],
        mask=inside,
        other=0.0,
    )
    key += row * key_row + group * key_head
    value += row * value_row + group * value_head
    keys = tl.load(key + node[None, :] * key_node + column[:, None], mask=inside_t, other=0.0)
    end = tl.load(ends + row * nodes + node, mask=node < nodes, other=nodes + BLOCK)
    sees = (node[None, :] <= node[:, None]) & (node[:, None] < end[None, :])
    scores = tl.where(sees, tl.dot(queries, keys, input_precision="ieee") * scaling, float("-inf"))
    most = tl.max(scores, axis=1)  # finite: every node sees itself
    weights = tl.exp(scores - most[:, None])
    total = tl.sum(weights, axis=1)
    values = tl.load(value + node[:, None] * value_node + column[None, :], mask=inside, other=0.0)
    mixed = tl.dot(weights.to(values.dtype), values, input_precision="ieee")

    for start in range(0, path_length, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        ancestor = tl.load(paths + (row * blocks + block) * path_length + slot)
        known = ancestor >= 0
        known_t = known[None, :] & (column < width)[:, None]
        path_keys = tl.load(key + ancestor[None, :] * key_node + column[:, None], mask=known_t, other=0.0)
        path_end = tl.load(ends + row * nodes + ancestor, mask=known, other=0)
        products = tl.dot(queries, path_keys, input_precision="ieee") * scaling
        path_scores = tl.where(node[:, None] < path_end[None, :], products, float("-inf"))
        higher = tl.maximum(most, tl.max(path_scores, axis=1))
        path_weights = tl.exp(path_scores - higher[:, None])
        shrunk = tl.exp(most - higher)
        total = total * shrunk + tl.sum(path_weights, axis=1)
        known_rows = known[:, None] & (column < width)[None, :]
        path_values = tl.load(value + ancestor[:, None] * value_node + column[None, :], mask=known_rows, other=0.0)
        mixed = mixed * shrunk[:, None] + tl.dot(path_weights.to(values.dtype), path_values, input_precision="ieee")
        most = higher

    places = output + row * output_row + head * output_head + node[:, None] * output_node + column[None, :]
    tl.store(places, (mixed / total[:, None]).to(output.dtype.element_ty), mask=inside)


def fused_tree_attention(
    query_RHNZ: torch.Tensor,
    key_RGNZ: torch.Tensor,
    value_RGNZ: torch.Tensor,
    ends_RN: torch.Tensor,
    paths_RBC: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """As ``tree_attention.blockwise``: R N H Z."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query_RHNZ, key_RGNZ, value_RGNZ))
    rows, heads, nodes, width = query.shape
    blocks, path_length = paths_RBC.shape[1:]
    assert value.shape[-1] == width
    assert path_length % PATH_CHUNK == 0
    assert nodes * max(x.stride(2) for x in (query, key, value)) < 2**31, "places in a row are 32-bit numbers"
    output = query.new_empty(rows, nodes, heads, width)
    with torch.cuda.device(query.device):  # Triton starts kernels on the current one
        _tree_kernel[(blocks, heads, rows)](
            query, key, value, ends_RN.contiguous(), paths_RBC.contiguous(), output,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            output.stride(0), output.stride(2), output.stride(1),
            nodes, blocks, path_length, heads // key.shape[1], width, scaling,
            BLOCK=BLOCK, CHUNK=PATH_CHUNK, WIDTH=max(16, triton.next_power_of_2(width)), num_warps=WARPS,
        )  # fmt: skip
    return output
