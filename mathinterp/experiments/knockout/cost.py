"""What a knock-out costs, counted before anything loads (see experiments/costs.py)."""

from collections.abc import Sequence

from mathinterp.experiments.base import Shard
from mathinterp.experiments.costs import Cost, on_trees
from mathinterp.experiments.knockout import Knockout
from mathinterp.experiments.knockout.tables import SHOWN_TOKENS
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt


def cost_of(scan: Knockout, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """Sets of heads: each point of a curve runs from the lowest layer of its heads."""
    answers = sum(len(prompt.scored) for prompt in prompts)
    sentences = len(scan.sentences) * SHOWN_TOKENS * (len(scan.chosen_ks(shape)) + 1)
    rows = {"baseline": answers, "knockout_heads": 0, "knockout_examples": sentences}
    layers, points, found = 0, 0, {}
    for shard in shards:
        work = shard.work
        for k in work.get("ks", []):
            heads = scan.heads_of(shape, work["ranking"], work["seed"], k)
            layers += shape.n_layers - min(layer for layer, _ in heads)
            points += 1
            rows["knockout_heads"] += k
        found[shard.key] = len(work["ks"]) * answers if "ks" in work else 0
    found |= {shard.key: rows[shard.table] for shard in shards if shard.table in rows}
    return on_trees(scan, shape, prompts, layers, points, found)
