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


def cost_of(scan: Attribution, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """The passes of the method, and a row for each node and prompt."""
    sites = shape.n_heads * shape.d_head + shape.d_model + (shape.n_neurons if scan.neurons else 0)
    rows = {shard.key: scan.nodes(shape) * scan.evaluations(shard, prompts) for shard in shards}
    return passes_cost(shape, prompts, sum(passes_of(scan.method, shape.n_layers, scan.steps)), rows, sites)


def passes_cost(
    shape: ModelShape, prompts: Sequence[TokenizedPrompt], passes: float, rows: dict[str, int], sites: int
) -> Cost:
    """Passes up to END; backward ones to activations cost as much as forward ones, two tokens' logits nothing.

    Args:
        passes: over each prompt, forward and backward.
        sites: numbers per token and layer that are kept three times over.
    """
    lengths = end_lengths(prompts)
    for_backward = 6 * shape.d_model + 3 * shape.n_heads * shape.d_head + 4 * shape.n_neurons
    return Cost(
        flops=passes * pass_flops(shape, lengths),
        plain_flops=None,
        rows=rows,
        nodes=2 * sum(lengths),
        kept=0,
        working=min(GPU_TOKENS, sum(lengths)) * shape.n_layers * (for_backward + 3 * sites),
    )
