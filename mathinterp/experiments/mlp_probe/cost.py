"""What an MLP probe costs, counted before anything loads (see experiments/costs.py)."""

from collections.abc import Sequence

from mathinterp.engine.pairs import GPU_TOKENS as GPU_PAIR_TOKENS
from mathinterp.experiments.base import Shard
from mathinterp.experiments.costs import Cost, end_lengths, reading
from mathinterp.experiments.mlp_probe import MlpProbe
from mathinterp.experiments.mlp_probe.tables import TARGETS
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt


def cost_of(scan: MlpProbe, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """A pass that finds the right answers, and one whose vectors are compared."""
    flops, nodes, working, logits = reading(shape, prompts, passes=2)
    vectors = 8 * 4 * (GPU_PAIR_TOKENS // max(end_lengths(prompts))) * shape.n_layers * shape.d_model
    rows = {shard.key: len(shard.work["layers"]) * len(prompts) * len(TARGETS) for shard in shards}
    return Cost(flops, None, rows, nodes, kept=0, working=working, working_bytes=logits + vectors)
