"""What a neuron scan costs, counted before anything loads (see experiments/costs.py)."""

from collections.abc import Sequence

from mathinterp.engine.lens.logsumexp import GPU_ELEMENTS
from mathinterp.experiments import neurons
from mathinterp.experiments.base import Shard
from mathinterp.experiments.costs import Cost, reading, scoring_flops
from mathinterp.experiments.neurons import Neurons
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt


def cost_of(scan: Neurons, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """A pass a condition; then per layer W_U times all values, and a sum over the vocabulary a (neuron, prompt)."""
    layers, count, conditions = scan.chosen(shape), len(prompts), scan.conditions
    scoring, heads = scoring_flops(shape), shape.n_heads
    flops, nodes, working, _ = reading(shape, prompts, passes=conditions)
    directions = scoring * shape.n_neurons * scan.models_held
    outputs = count * ((heads + 4) * scoring + 2.0 * heads * shape.d_head * shape.d_model)  # heads, wholes, two bases
    at_once = min(count, neurons.PROMPTS_A_SHARD)
    flops += len(layers) * (-(-count // at_once) * directions + conditions * outputs)
    kept = count * shape.n_layers * (shape.n_neurons + heads * shape.d_head + 4 * shape.d_model) * conditions
    shown = shape.n_neurons if scan.keep.everything else min(scan.keep.top, shape.n_neurons)

    def rows_of(shard: Shard) -> int:
        if shard.table == "neuron_targets":
            return count * conditions
        first, stop = shard.work["prompts"]
        operations = len({prompt.prompt.operation for prompt in prompts[first:stop]})
        return int(stop - first) * (shown + heads + 3) + shape.n_neurons * operations

    rows = {shard.key: rows_of(shard) for shard in shards}
    return Cost(
        flops,
        None,
        rows,
        nodes,
        kept,
        working,
        working_bytes=4 * ((shape.n_neurons + 4 * at_once) * shape.vocabulary + 3 * GPU_ELEMENTS),  # directions, logits
        terms=float(len(layers)) * shape.n_neurons * count * shape.vocabulary * conditions,
    )
