"""What the scans do, counted: FLOPs, rows and memory of each kind, from shapes, prompts and shards alone.

Counts are of matrix products (as torch's FlopCounterMode counts them) and, for neurons, of terms of sums over the
vocabulary. Each kind of scan has one function here; a scan without one is counted as ablations that are replayed.

Shape legend: P prompt, L layer, H query head, G key/value group, D model width, K neurons, V vocabulary, T token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mathinterp.engine.lens.logsumexp import GPU_ELEMENTS
from mathinterp.engine.pairs import GPU_TOKENS as GPU_PAIR_TOKENS
from mathinterp.engine.paths.frozen import GPU_ROWS, MLP
from mathinterp.engine.scores import LOGITS_AT_ONCE
from mathinterp.engine.tree.forest import Planter, plant
from mathinterp.engine.tree.packing import GPU_TOKENS
from mathinterp.experiments.ablation import Ablation, private_from
from mathinterp.experiments.attention import Attention
from mathinterp.experiments.base import Experiment, Shard
from mathinterp.experiments.iterative import Iterative
from mathinterp.experiments.knockout import SHOWN_TOKENS, Knockout
from mathinterp.experiments.mlp_probe import TARGETS, MlpProbe
from mathinterp.experiments.neurons import PROMPTS_A_SHARD, Neurons
from mathinterp.experiments.paths import Paths
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.prompts.token_types import TOKEN_TYPES

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


def scan_cost(scan: Experiment, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """What ``scan`` costs on a model of ``shape``; ``shards`` are the scan's own."""
    for kind, cost in _COSTS.items():
        if isinstance(scan, kind):
            return cost(scan, shape, prompts, shards)
    return _replayed(scan, shape, prompts, shards)


# ---- sizes of a model ----


def layer_parameters(shape: ModelShape) -> int:
    """Weights of one layer's matrices: q, k, v, o and the MLP's two or three; norms and biases are left out."""
    attention = shape.d_model * shape.d_head * (2 * shape.n_heads + 2 * shape.n_groups)
    return attention + mlp_parameters(shape)


def mlp_parameters(shape: ModelShape) -> int:
    """Weights of one MLP's two or three matrices."""
    return (3 if shape.gated_mlp else 2) * shape.d_model * shape.n_neurons


def parameters(shape: ModelShape) -> int:
    """Weights of the model's matrices, with embedding and unembedding."""
    embeddings = (1 if shape.tied_unembedding else 2) * shape.vocabulary * shape.d_model
    return shape.n_layers * layer_parameters(shape) + embeddings


def layer_flops(shape: ModelShape, attended: int) -> float:
    """FLOPs of one layer for one token or tree node that attends to ``attended`` others (masked ones cost as much)."""
    return 2.0 * layer_parameters(shape) + 4.0 * attended * shape.n_heads * shape.d_head


def scoring_flops(shape: ModelShape) -> float:
    """FLOPs of the unembedding for one row."""
    return 2.0 * shape.d_model * shape.vocabulary


def pass_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """FLOPs of all layers over whole sentences of these lengths, padding left out."""
    return shape.n_layers * sum(length * layer_flops(shape, length) for length in lengths)


def _lengths(prompts: Sequence[TokenizedPrompt]) -> list[int]:
    """Tokens up to END: what scans read that look at END alone."""
    return [prompt.end + 1 for prompt in prompts]


def _key_value_numbers(shape: ModelShape, lengths: Sequence[int]) -> int:
    """Cached keys and values of all layers and tokens."""
    return sum(lengths) * shape.n_layers * 2 * shape.n_groups * shape.d_head


def _logit_bytes(shape: ModelShape, rows: int) -> int:
    """Logits of one batch, and as much again for their softmax, in float32."""
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


def _replayed(scan: Experiment, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """Interventions one at a time, each from its own layer on: head and MLP scans."""
    interventions = {shard.key: scan.evaluations(shard, prompts) / len(prompts) for shard in shards}
    layers = sum(replayed_layers(shard, shape, interventions[shard.key]) for shard in shards)
    answers = sum(len(prompt.scored) for prompt in prompts)
    rows = {key: round(count * answers) for key, count in interventions.items()}
    return _on_trees(scan, shape, prompts, layers, sum(interventions.values()), rows)


def _on_trees(
    scan: Experiment,
    shape: ModelShape,
    prompts: Sequence[TokenizedPrompt],
    layers: float,
    passes: float,
    rows: dict[str, int],
) -> Cost:
    """``layers`` layers replayed over the trees of all prompts, and ``passes`` scorings of all answers."""
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


def _knockout(scan: Knockout, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
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
    return _on_trees(scan, shape, prompts, layers, points, found)


def _iterative(scan: Iterative, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """For each step a sweep over the heads left, after a pass with those masked before, whichever they are."""
    heads = scan.candidates(shape)
    each = sum(shape.n_layers - layer for layer, _ in heads) / len(heads)
    left = {shard.key: len(heads) - int(shard.work["step"]) for shard in shards}
    layers, passes = sum(each * count + shape.n_layers for count in left.values()), sum(left.values())
    if not scan.only_end:
        return _on_trees(scan, shape, prompts, layers, passes, left)
    clean, lengths = _on_trees(scan, shape, prompts, 0, 0, left), _lengths(prompts)
    rows = pass_flops(shape, lengths) / shape.n_layers * layers / sum(lengths) * len(prompts)
    scoring = scoring_flops(shape) * passes * len(prompts)
    return replace(
        clean,
        flops=clean.flops + 2 * pass_flops(shape, lengths) + rows + scoring,
        plain_flops=pass_flops(shape, lengths) * passes + scoring,
        kept=clean.kept + _key_value_numbers(shape, lengths),
    )


# ---- path patching: END rows ----


def _paths(scan: Paths, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """One END row for each (node, pair), through what is not frozen; all pairs are taken to be kept."""
    pairs, lengths = len(prompts), _lengths(prompts)
    mlp, scoring = 2.0 * mlp_parameters(shape), scoring_flops(shape)
    end_layer = sum(layer_flops(shape, length) for length in lengths) / pairs
    whole = pass_flops(shape, lengths) / pairs + scoring

    def row(layer: int, node: int) -> float:
        """FLOPs of one (node, pair)."""
        later, head = shape.n_layers - layer, 0.0 if node == MLP else 2.0 * shape.d_head * shape.d_model
        if scan.positions == "all":
            return 2 * whole - scoring  # the counterfactual pass and the patched one
        through = {"heads": mlp * later, "all": mlp if scan.receiver else 0.0, "none": end_layer * later}
        return through[scan.freeze] + head + scoring

    nodes = [(layer, node) for layer, members in scan.nodes(shape).items() for node in members]
    checked = [
        (layer, node) for layer in {0, shape.n_layers // 2, shape.n_layers - 1} for node in (0, MLP)
    ]  # noise floor
    checked = [] if scan.positions == "all" else checked
    clean = 2 * (whole + scoring) + shape.n_layers * mlp + (whole if scan.freeze == "none" else 0.0)
    attribution = 3 * (shape.n_layers * (end_layer if scan.freeze == "none" else mlp) + scoring)
    flops = pairs * (clean + sum(row(*node) for node in [*nodes, *checked]) + (attribution if scan.attributes else 0.0))
    rows = {shard.key: pairs * int(shard.work.get("nodes", 1)) for shard in shards}
    rows |= {shard.key: pairs * len(nodes) for shard in shards if shard.table == "attribution_scan"}
    wide = shape.n_heads * shape.d_head + 2 * shape.d_model  # heads, attention and MLP of one layer
    return Cost(
        flops=flops,
        plain_flops=pairs * whole * len(nodes),
        rows=rows,
        nodes=sum(lengths),
        kept=pairs * (2 * (shape.n_layers * wide + 2 * shape.d_model) + (shape.n_layers + 1) * shape.d_model)
        + (_key_value_numbers(shape, lengths) if scan.freeze == "none" or scan.receiver else 0),
        working=GPU_ROWS * (4 * shape.d_model + 3 * shape.n_neurons),
        working_bytes=_logit_bytes(shape, GPU_ROWS),
    )


# ---- scans that only read: a few passes ----


def _reading(shape: ModelShape, prompts: Sequence[TokenizedPrompt], passes: int) -> tuple[float, int, int, int]:
    """FLOPs of passes up to END, with one scoring, token positions, numbers of a batch in flight, and logit bytes."""
    lengths = _lengths(prompts)
    flops = passes * pass_flops(shape, lengths) + scoring_flops(shape) * len(prompts)
    working = GPU_PAIR_TOKENS * (4 * shape.d_model + 3 * shape.n_neurons)
    return flops, sum(lengths), working, _logit_bytes(shape, GPU_PAIR_TOKENS // max(lengths))


def _attention(scan: Attention, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """A pass that finds the right answers, and an eager one, whose attention matrices are formed layer by layer."""
    flops, nodes, working, logits = _reading(shape, prompts, passes=2)
    matrices = GPU_PAIR_TOKENS * shape.n_heads * max(_lengths(prompts))
    rows = {shard.key: len(shard.work["heads"]) * len(prompts) * len(TOKEN_TYPES) for shard in shards}
    return Cost(flops, None, rows, nodes, kept=0, working=working + matrices, working_bytes=logits + 4 * matrices)


def _probe(scan: MlpProbe, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """A pass that finds the right answers, and one whose vectors are compared."""
    flops, nodes, working, logits = _reading(shape, prompts, passes=2)
    vectors = 8 * 4 * (GPU_PAIR_TOKENS // max(_lengths(prompts))) * shape.n_layers * shape.d_model
    rows = {shard.key: len(shard.work["layers"]) * len(prompts) * len(TARGETS) for shard in shards}
    return Cost(flops, None, rows, nodes, kept=0, working=working, working_bytes=logits + vectors)


def _neurons(scan: Neurons, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]) -> Cost:
    """A pass a condition; then per layer W_U times all values, and a sum over the vocabulary a (neuron, prompt)."""
    layers, count, conditions = scan.chosen(shape), len(prompts), 1 if scan.against is None else 2
    scoring, heads = scoring_flops(shape), shape.n_heads
    flops, nodes, working, _ = _reading(shape, prompts, passes=conditions)
    directions = scoring * shape.n_neurons * (2 if scan.other is not None else 1)
    outputs = count * ((heads + 4) * scoring + 2.0 * heads * shape.d_head * shape.d_model)  # heads, wholes, two bases
    at_once = min(count, PROMPTS_A_SHARD)
    flops += len(layers) * (-(-count // at_once) * directions + conditions * outputs)
    kept = count * shape.n_layers * (shape.n_neurons + heads * shape.d_head + 4 * shape.d_model) * conditions
    shown = shape.n_neurons if scan.keep_all else min(scan.top, shape.n_neurons)

    def rows_of(shard: Shard) -> int:
        if shard.table == "neuron_targets":
            return count * conditions
        first, stop = shard.work["prompts"]
        operations = len({prompt.prompt.operation for prompt in prompts[first:stop]})
        return (stop - first) * (shown + heads + 3) + shape.n_neurons * operations

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


_COSTS: dict[type[Experiment], Callable[..., Cost]] = {
    Knockout: _knockout,
    Iterative: _iterative,
    Paths: _paths,
    Attention: _attention,
    MlpProbe: _probe,
    Neurons: _neurons,
}
