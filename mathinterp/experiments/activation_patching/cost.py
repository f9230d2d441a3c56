"""What activation patching costs, counted before anything loads (see experiments/costs.py)."""

from collections.abc import Sequence

from mathinterp.experiments.activation_patching import ActivationPatching
from mathinterp.experiments.base import Shard
from mathinterp.experiments.costs import PACK_SIZE, Cost, layer_flops, pass_flops, scoring_flops
from mathinterp.models.anatomy import ModelShape
from mathinterp.prompts.pairs import first_digit
from mathinterp.prompts.prompt import TokenizedPrompt


def cost_of(
    scan: ActivationPatching, shape: ModelShape, prompts: Sequence[TokenizedPrompt], shards: Sequence[Shard]
) -> Cost:
    """All tokens of a pair, once for each of its tokens, from the patched layer on; all pairs are taken to be kept."""
    from mathinterp.engine.tree.forest import plant
    from mathinterp.engine.tree.packing import GPU_TOKENS

    sentences = [prompt.input_ids[: first_digit(prompt).index] for prompt in prompts]
    forest = plant(sentences, pack_size=PACK_SIZE, private_from=[0] * len(sentences))
    padded, longest = forest.n_packs * forest.pack_size, max(map(len, sentences))
    patched = [layer for shard in shards for layer in shard.work.get("layers", [])]
    replayed = longest * sum(shape.n_layers - layer for layer in patched)
    clean = shape.n_layers * (4 + 4 * longest)  # both sides of all and of kept pairs; baselines and the noise floor
    scorings = longest * (len(patched) + 4) * len(sentences)
    whole = pass_flops(shape, list(map(len, sentences))) * longest * len(patched)
    scoring = scoring_flops(shape) * scorings
    return Cost(
        flops=layer_flops(shape, forest.pack_size) * padded * (replayed + clean) + scoring,
        plain_flops=whole + scoring,
        rows={shard.key: int(shard.work["tokens"]) * len(shard.work.get("layers", [None])) for shard in shards},
        nodes=2 * sum(map(len, sentences)),
        kept=2 * padded * (shape.n_layers * shape.d_model + forest.pack_size),  # residuals and the trees' masks
        working=GPU_TOKENS * (4 * shape.d_model + 3 * shape.n_neurons),
    )
