"""What a concept scan costs, counted before anything loads (see experiments/costs.py)."""

from collections.abc import Sequence

from mathinterp.experiments.base import Shard
from mathinterp.experiments.concepts import SIGNS, Concepts
from mathinterp.experiments.costs import Cost, scoring_flops
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt


def cost_of(scan: Concepts, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """Every vector times a value-output matrix and the unembedding; the random directions are as many as a layer's."""
    from mathinterp.engine.lens.concepts import GPU_LOGITS

    moved = scoring_flops(shape) + 2.0 * shape.d_model**2
    flops, rows = 0.0, {}
    for shard in shards:
        rows[shard.key] = len(SIGNS[scan.sign]) * len(shard.work["layers"]) * shape.n_neurons
        flops += rows[shard.key] * (scoring_flops(shape) if shard.work["attention_layer"] is None else moved)
    attention_layers = {shard.work["attention_layer"] for shard in shards} - {None}
    flops += len(attention_layers) * 2.0 * shape.d_model**2 * shape.n_groups * shape.d_head
    logits = min(GPU_LOGITS, shape.n_neurons * shape.vocabulary)
    kept = shape.d_model * (shape.d_model + shape.n_neurons)
    return Cost(flops, None, rows, nodes=0, kept=kept, working=0, working_bytes=8 * logits)
