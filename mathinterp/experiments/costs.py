"""What experiments cost, counted: FLOPs, rows and memory, from shapes, prompts and shards alone.

Counts are of matrix products (as torch's FlopCounterMode counts them) and, for neurons, of terms of sums over the
vocabulary. Sizes of a model, and the costs that several experiments share, are here; each experiment has its own.

Shape legend: P prompt, L layer, H query head, G key/value group, D model width, K neurons, V vocabulary, T token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mathinterp.experiments.base import Experiment, Shard
    from mathinterp.models.anatomy import ModelShape
    from mathinterp.prompts.prompt import TokenizedPrompt

PACK_SIZE = 512  # nodes of a typical tree pack


@dataclass(frozen=True)
class Cost:
    """Costs of a scan; memory is of one replica, on a GPU, beside the weights.

    rows: shard key -> rows, the most there can be (prompts that a scan leaves out have none).
    plain_flops: the same by full forward passes with hooks; None where the scan does no more than a few passes.
    kept, working: numbers in the model's dtype, of what stays (clean passes) and of one batch in flight.
    working_bytes: float32 beside these.
    terms: of the sums over the vocabulary, one sum a (neuron, prompt): the work of neuron scans.
    """

    flops: float
    plain_flops: float | None
    rows: dict[str, int]
    nodes: int  # token positions that a clean pass runs over
    kept: int
    working: int
    working_bytes: int = 0
    terms: float = 0.0


# ---- sizes of a model ----


def layer_parameters(shape: ModelShape) -> int:
    """Weights of one layer's matrices: q, k, v, o and the MLP's; norms and biases are left out."""
    return attention_parameters(shape) + mlp_parameters(shape)


def attention_parameters(shape: ModelShape) -> int:
    """Weights of q, k, v and o."""
    return shape.d_model * shape.d_head * (2 * shape.n_heads + 2 * shape.n_groups)


def mlp_parameters(shape: ModelShape, *, used: bool = False) -> int:
    """Weights of one MLP's two or three matrices; of a mixture of experts, the router's and those of all experts.

    Args:
        used: count of the experts those alone that one token goes through.
    """
    one = (3 if shape.gated_mlp else 2) * shape.d_model * shape.n_neurons
    if not shape.n_experts:
        return one
    return shape.d_model * shape.n_experts + one * (shape.experts_per_token if used else shape.n_experts)


def parameters(shape: ModelShape) -> int:
    """Weights of the model's matrices, with embedding and unembedding."""
    embeddings = (1 if shape.tied_unembedding else 2) * shape.vocabulary * shape.d_model
    return shape.n_layers * layer_parameters(shape) + embeddings


def layer_flops(shape: ModelShape, attended: int) -> float:
    """FLOPs of one layer for one token or tree node that attends to ``attended`` others (masked ones cost as much)."""
    return (
        2.0 * (attention_parameters(shape) + mlp_parameters(shape, used=True))
        + 4.0 * attended * shape.n_heads * shape.d_head
    )


def scoring_flops(shape: ModelShape) -> float:
    """FLOPs of the unembedding for one row."""
    return 2.0 * shape.d_model * shape.vocabulary


def pass_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """FLOPs of all layers over whole sentences of these lengths, padding left out."""
    return shape.n_layers * sum(length * layer_flops(shape, length) for length in lengths)


def end_lengths(prompts: Sequence[TokenizedPrompt]) -> list[int]:
    """Tokens up to END: what scans read that look at END alone."""
    return [prompt.end + 1 for prompt in prompts]


def key_value_numbers(shape: ModelShape, lengths: Sequence[int]) -> int:
    """Cached keys and values of all layers and tokens."""
    return sum(lengths) * shape.n_layers * 2 * shape.n_groups * shape.d_head


def logit_bytes(shape: ModelShape, rows: int) -> int:
    """Logits of one batch, and as much again for their softmax, in float32."""
    from mathinterp.engine.scores import LOGITS_AT_ONCE

    return 8 * min(rows * shape.vocabulary, max(LOGITS_AT_ONCE, shape.vocabulary))


# ---- ablations: trees of shared prefixes, layers replayed ----


def replayed_layers(shard: Shard, shape: ModelShape, interventions: float) -> float:
    """Layers that a shard replays, summed over its interventions: L - l for one in layer l.

    A shard that does not name layers counts (L + 1) / 2 for each intervention, the mean over all layers.
    """
    named = [layer for layer, _ in shard.work.get("heads", [])] + list(shard.work.get("layers", []))
    if named:
        return float(sum(shape.n_layers - layer for layer in named))
    return interventions * (shape.n_layers + 1) / 2


def replayed(scan: Experiment, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """Interventions one at a time, each from its own layer on: head and MLP scans."""
    interventions = {shard.key: scan.evaluations(shard, prompts) / len(prompts) for shard in shards}
    layers = sum(replayed_layers(shard, shape, interventions[shard.key]) for shard in shards)
    answers = sum(len(prompt.scored) for prompt in prompts)
    rows = {key: round(count * answers) for key, count in interventions.items()}
    return on_trees(scan, shape, prompts, layers, sum(interventions.values()), rows)


def on_trees(
    scan: Experiment,
    shape: ModelShape,
    prompts: Sequence[TokenizedPrompt],
    layers: float,
    passes: float,
    rows: dict[str, int],
) -> Cost:
    """``layers`` layers replayed over the trees of all prompts, and ``passes`` scorings of all answers."""
    from mathinterp.engine.tree.forest import Planter, plant
    from mathinterp.engine.tree.packing import GPU_TOKENS
    from mathinterp.experiments.ablated import private_from
    from mathinterp.experiments.ablation import Ablation

    sequences = [prompt.fed for prompt in prompts]
    private = private_from(scan, prompts) if isinstance(scan, Ablation) else None
    forest = plant(sequences, pack_size=PACK_SIZE, private_from=private)
    padded = forest.n_packs * forest.pack_size
    clean = shape.n_layers * (2 if scan.needs_counterfactuals else 1)
    scoring = scoring_flops(shape) * sum(len(prompt.scored) for prompt in prompts) * passes
    tokens, longest = sum(map(len, sequences)), max(map(len, sequences))
    return Cost(
        flops=layer_flops(shape, forest.pack_size) * padded * (layers + clean) + scoring,
        plain_flops=layer_flops(shape, longest) * tokens * shape.n_layers * passes + scoring,
        rows=rows,
        nodes=Planter(sequences, private).build(tokens).n_nodes,
        kept=padded * (shape.n_layers * shape.d_model + forest.pack_size),  # residuals and the trees' masks
        working=GPU_TOKENS * (4 * shape.d_model + 3 * shape.n_neurons),
    )


# ---- experiments that only read: a few passes ----


def reading(shape: ModelShape, prompts: Sequence[TokenizedPrompt], passes: int) -> tuple[float, int, int, int]:
    """FLOPs of passes up to END, with one scoring, token positions, numbers of a batch in flight, and logit bytes."""
    from mathinterp.engine.pairs import GPU_TOKENS as GPU_PAIR_TOKENS

    lengths = end_lengths(prompts)
    flops = passes * pass_flops(shape, lengths) + scoring_flops(shape) * len(prompts)
    working = GPU_PAIR_TOKENS * (4 * shape.d_model + 3 * shape.n_neurons)
    return flops, sum(lengths), working, logit_bytes(shape, GPU_PAIR_TOKENS // max(lengths))
