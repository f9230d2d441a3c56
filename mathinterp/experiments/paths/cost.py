"""What path patching costs, counted before anything loads (see experiments/costs.py)."""

from collections.abc import Sequence

from mathinterp.engine.paths.frozen import GPU_ROWS
from mathinterp.engine.paths.nodes import Node
from mathinterp.experiments.base import Shard
from mathinterp.experiments.costs import (
    Cost,
    end_lengths,
    key_value_numbers,
    layer_flops,
    logit_bytes,
    mlp_parameters,
    pass_flops,
    scoring_flops,
)
from mathinterp.experiments.paths import Paths
from mathinterp.models.anatomy import ModelShape
from mathinterp.models.units import Head, Mlp
from mathinterp.prompts.prompt import TokenizedPrompt


def cost_of(scan: Paths, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """One END row for each (node, pair), through what is not frozen; all pairs are taken to be kept."""
    pairs, lengths = len(prompts), end_lengths(prompts)
    mlp, scoring = 2.0 * mlp_parameters(shape, used=True), scoring_flops(shape)
    end_layer = sum(layer_flops(shape, length) for length in lengths) / pairs
    whole = pass_flops(shape, lengths) / pairs + scoring

    def row(node: Node) -> float:
        """FLOPs of one (node, pair)."""
        later, head = shape.n_layers - node.layer, 2.0 * shape.d_head * shape.d_model if isinstance(node, Head) else 0.0
        if scan.positions == "all":
            return 2 * whole - scoring  # the counterfactual pass and the patched one
        through = {"heads": mlp * later, "all": mlp if scan.receiver else 0.0, "none": end_layer * later}
        return through[scan.freeze] + head + scoring

    nodes = [node for members in scan.nodes(shape).values() for node in members]
    checked = [
        node for layer in {0, shape.n_layers // 2, shape.n_layers - 1} for node in (Head(layer, 0), Mlp(layer))
    ]  # noise floor
    checked = [] if scan.positions == "all" else checked
    clean = 2 * (whole + scoring) + shape.n_layers * mlp + (whole if scan.freeze == "none" else 0.0)
    attribution = 3 * (shape.n_layers * (end_layer if scan.freeze == "none" else mlp) + scoring)
    flops = pairs * (clean + sum(row(node) for node in [*nodes, *checked]) + (attribution if scan.attributes else 0.0))
    if any(item.distractor is not None for item in prompts):  # scored by passes of their own
        flops *= 2
    rows = {shard.key: pairs * int(shard.work.get("nodes", 1)) for shard in shards}
    rows |= {shard.key: pairs * len(nodes) for shard in shards if shard.table == "attribution_scan"}
    wide = shape.n_heads * shape.d_head + 2 * shape.d_model  # heads, attention and MLP of one layer
    return Cost(
        flops=flops,
        plain_flops=pairs * whole * len(nodes),
        rows=rows,
        nodes=sum(lengths),
        kept=pairs * (2 * (shape.n_layers * wide + 2 * shape.d_model) + (shape.n_layers + 1) * shape.d_model)
        + (key_value_numbers(shape, lengths) if scan.freeze == "none" or scan.receiver else 0),
        working=GPU_ROWS * (4 * shape.d_model + 3 * shape.n_neurons),
        working_bytes=logit_bytes(shape, GPU_ROWS),
    )
