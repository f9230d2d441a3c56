"""What attribution costs, counted before anything loads (see experiments/costs.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mathinterp.engine.attribution.methods import passes_of
from mathinterp.engine.attribution.pairs import GPU_TOKENS
from mathinterp.experiments.costs import Cost, end_lengths, pass_flops

if TYPE_CHECKING:
    from mathinterp.experiments.attribution import Attribution
    from mathinterp.experiments.base import Shard
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt


def cost_of(
    scan: Attribution, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]
) -> Cost:
    """Forward passes up to END, and backward passes to activations, which cost as much; of two tokens' logits, nothing."""
    lengths = end_lengths(prompts)
    forwards, backwards = passes_of(scan.method, shape.n_layers, scan.steps)
    kept_by_layer = 6 * shape.d_model + 3 * shape.n_heads * shape.d_head + 4 * shape.n_neurons  # for the way back
    sites = shape.n_heads * shape.d_head + shape.d_model + (shape.n_neurons if scan.neurons else 0)
    batch = min(GPU_TOKENS, sum(lengths))
    return Cost(
        flops=(forwards + backwards) * pass_flops(shape, lengths),
        plain_flops=None,
        rows={shard.key: scan.nodes(shape) * scan.evaluations(shard, prompts) for shard in shards},
        nodes=2 * sum(lengths),
        kept=0,
        working=batch * shape.n_layers * (kept_by_layer + 3 * sites),
    )
