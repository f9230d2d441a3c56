"""What an attention scan costs, counted before anything loads (see experiments/costs.py)."""

from collections.abc import Sequence

from mathinterp.engine.pairs import GPU_TOKENS as GPU_PAIR_TOKENS
from mathinterp.experiments.attention import Attention
from mathinterp.experiments.base import Shard
from mathinterp.experiments.costs import Cost, end_lengths, reading
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.prompts.token_types import type_names


def cost_of(scan: Attention, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """A pass that finds the right answers, and an eager one, whose attention matrices are formed layer by layer."""
    flops, nodes, working, logits = reading(shape, prompts, passes=2)
    matrices = GPU_PAIR_TOKENS * shape.n_heads * max(end_lengths(prompts))
    types = len(type_names(prompts, scan.scheme([item.prompt for item in prompts])))
    rows = {shard.key: len(shard.work["heads"]) * len(prompts) * types for shard in shards}
    return Cost(flops, None, rows, nodes, kept=0, working=working + matrices, working_bytes=logits + 4 * matrices)
