"""What circuits cost, counted before anything loads (see experiments/costs.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mathinterp.experiments.attribution.cost import passes_cost
from mathinterp.experiments.circuit.ranking import ORDERINGS
from mathinterp.experiments.circuit.tables import FRACTIONS
from mathinterp.experiments.costs import Cost

if TYPE_CHECKING:
    from mathinterp.experiments.base import Shard
    from mathinterp.experiments.circuit import Circuit
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt


def cost_of(scan: Circuit, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """A forward pass for each different circuit, and one over the counterfactual."""
    rows = {}
    for shard in shards:
        start, stop = shard.work["prompts"]
        rows[shard.key] = (stop - start) * (2 + len(ORDERINGS) * len(FRACTIONS))
    neurons = shape.n_neurons if scan.level == "neuron" else 0
    sites = shape.n_heads * shape.d_head + shape.d_model + neurons
    return passes_cost(shape, prompts, scan.different() + 1, rows, sites)
