"""What iterative masking costs, counted before anything loads (see experiments/costs.py)."""

from collections.abc import Sequence
from dataclasses import replace

from mathinterp.experiments.base import Shard
from mathinterp.experiments.costs import Cost, end_lengths, key_value_numbers, on_trees, pass_flops, scoring_flops
from mathinterp.experiments.iterative import Iterative
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt


def cost_of(scan: Iterative, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """For each step a sweep over the heads left, after a pass with those masked before, whichever they are."""
    heads = scan.candidates(shape)
    each = sum(shape.n_layers - layer for layer, _ in heads) / len(heads)
    left = {shard.key: len(heads) - int(shard.work["step"]) for shard in shards}
    layers, passes = sum(each * count + shape.n_layers for count in left.values()), sum(left.values())
    if not scan.only_end:
        return on_trees(scan, shape, prompts, layers, passes, left)
    clean, lengths = on_trees(scan, shape, prompts, 0, 0, left), end_lengths(prompts)
    rows = pass_flops(shape, lengths) / shape.n_layers * layers / sum(lengths) * len(prompts)
    scoring = scoring_flops(shape) * passes * len(prompts)
    return replace(
        clean,
        flops=clean.flops + 2 * pass_flops(shape, lengths) + rows + scoring,
        plain_flops=pass_flops(shape, lengths) * passes + scoring,
        kept=clean.kept + key_value_numbers(shape, lengths),
    )
