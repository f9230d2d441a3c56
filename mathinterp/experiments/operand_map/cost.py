"""What operand maps cost, counted before anything loads (see experiments/costs.py)."""

from collections.abc import Sequence

from mathinterp.engine.tree.packing import GPU_TOKENS
from mathinterp.experiments.base import Shard
from mathinterp.experiments.costs import PACK_SIZE, Cost, end_lengths, layer_flops, pass_flops, scoring_flops
from mathinterp.experiments.operand_map import OperandMap
from mathinterp.experiments.operand_map.grid import grid_of, heuristics_of
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt


def cost_of(scan: OperandMap, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """A clean pass on trees, two more to read units, a sample's backward pass, and the choices of neurons."""
    from mathinterp.engine.tree.forest import count_nodes

    pairs, mapped, deep = len(prompts), len(scan.chosen(shape)), scan.deep(shape)
    lengths = end_lengths(prompts)
    nodes = count_nodes([item.input_ids[: item.end + 1] for item in prompts])
    choices = 1 + 2 * len(scan.chosen_ks(shape))
    replayed = choices * (shape.n_layers - min(deep))
    passes = layer_flops(shape, PACK_SIZE) * nodes * (shape.n_layers + 2 * mapped + len(deep) + replayed)
    sampled = sum(sorted(lengths)[-min(scan.sample, pairs) :])
    heuristics = len(heuristics_of(grid_of(prompts)).labels)
    units = mapped * (2 * shape.n_heads + shape.n_neurons)
    statistics = 2.0 * units * pairs * (2 + scan.shuffles) * heuristics
    heads = 2.0 * mapped * shape.n_heads * pairs * shape.d_head * shape.d_model
    scoring = scoring_flops(shape) * pairs * (choices + 1)
    rows = {shard.key: 2 * shape.n_heads + shape.n_neurons for shard in shards if shard.table == "operand_unit_maps"}
    other = {"operand_pairs": pairs, "baseline": pairs, "operand_keep_scan": choices * pairs}
    rows |= {shard.key: other[shard.table] for shard in shards if shard.table in other}
    return Cost(
        flops=passes + 3 * pass_flops(shape, [max(lengths)]) * sampled / max(lengths) + statistics + heads + scoring,
        plain_flops=None,
        rows=rows,
        nodes=nodes,
        kept=nodes * (shape.n_layers * shape.d_model + PACK_SIZE) + 2 * scan.sample * shape.n_layers * shape.n_neurons,
        working=GPU_TOKENS * (4 * shape.d_model + 3 * shape.n_neurons) + nodes * shape.n_neurons,
        working_bytes=2048 * pairs * 8 * 6,  # of the statistics of 2048 units
    )
