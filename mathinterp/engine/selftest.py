"""The identities of method.md on a user's own model: proof that its family entry and the engine fit it.

Each check compares two ways to the same number and gives the largest difference, in nats unless said otherwise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mathinterp.engine.alone import TOLERATED_DEVIATION, TOLERATED_HALF_DEVIATION
from mathinterp.engine.edits import Edit, Replacement
from mathinterp.engine.hooks import caught_input, caught_output, zeroed_columns
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import Scores
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class Check:
    """One identity: the largest difference found and the most that rounding explains."""

    identity: str
    difference: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within the limit (NaN is not)."""
        return self.difference <= self.limit


def selftest(anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], heads_per_layer: int = 2) -> Iterator[Check]:
    """Check every identity on ``prompts``, over the first, middle and last layer.

    Args:
        heads_per_layer: heads of each of these layers that are ablated both ways.
    """
    limit = TOLERATED_DEVIATION.get(anatomy.dtype, TOLERATED_HALF_DEVIATION)
    shape = anatomy.shape
    layers = sorted({0, shape.n_layers // 2, shape.n_layers - 1})
    heads = sorted({int(h) for h in np.linspace(0, shape.n_heads - 1, num=heads_per_layer)})
    plain = PlainEngine(anatomy, prompts, batch_size=1)
    alone = plain.baseline()

    yield Check("answer logits = the model's own logits", _logit_difference(anatomy, prompts, alone), limit)
    yield Check("heads' outputs sum to the attention output (relative)", _head_sum(anatomy, prompts[0], layers), limit)
    yield Check("zeroed head = zeroed columns of o_proj", _zeroed_columns(plain, layers, heads), limit)
    if not anatomy.family.tree_mask:
        return
    packed = PackedEngine(anatomy, prompts)
    yield Check("packed = one prompt at a time", packed.baseline().difference(alone), limit)
    no_op = max(
        packed.run_edits(layer, [Edit.heads_of(layer, ())], Replacement.zero(anatomy, "head", layer)).difference(
            packed.baseline()
        )
        for layer in layers
    )
    yield Check("no-op intervention = clean", no_op, limit)
    replayed = 0.0
    for layer in layers:
        for site, edits in (
            ("head", [Edit.heads_of(layer, [head]) for head in heads]),
            ("mlp", [Edit.mlp_of(layer)]),
        ):
            zero = Replacement.zero(anatomy, site, layer)
            replayed = max(
                replayed, packed.run_edits(layer, edits, zero).difference(plain.run_edits(layer, edits, zero))
            )
    yield Check("replay from layer l = full forward with hooks", replayed, limit)


@torch.inference_mode()
def _logit_difference(anatomy: Anatomy, prompts: Sequence[TokenizedPrompt], alone: Scores) -> float:
    expected = []
    for prompt in prompts:
        logits = anatomy.model(torch.tensor([prompt.fed], device=anatomy.device), use_cache=False).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        logprobs = wide.log_softmax(-1)
        expected += [float(logprobs[token.index - 1, token.token_id]) for token in prompt.scored]
    return float(np.abs(alone.logprob_EA[0] - np.array(expected)).max())


@torch.inference_mode()
def _head_sum(anatomy: Anatomy, prompt: TokenizedPrompt, layers: Sequence[int]) -> float:
    worst = 0.0
    for layer in layers:
        projection = anatomy.output_projection(layer)
        with caught_input(projection) as inputs, caught_output(projection) as outputs:
            anatomy.decoder(input_ids=torch.tensor([prompt.fed], device=anatomy.device), use_cache=False)
        weight, output = anatomy.output_weight(layer), outputs[0]
        total = torch.zeros_like(output, dtype=torch.float64)
        for head in range(anatomy.shape.n_heads):
            columns = anatomy.head_slice(head)
            total += inputs[0][..., columns].double() @ weight[columns].double()
        bias = getattr(projection, "bias", None)
        total = total if bias is None else total + bias.double()
        worst = float(np.maximum(worst, float((total - output.double()).norm() / output.double().norm())))  # keeps NaN
    return worst


def _zeroed_columns(plain: PlainEngine, layers: Sequence[int], heads: Sequence[int]) -> float:
    worst = 0.0
    for layer in layers:
        zero = Replacement.zero(plain.anatomy, "head", layer)
        for head in heads:
            hooked = plain.run_edits(layer, [Edit.heads_of(layer, [head])], zero)
            with zeroed_columns(plain.anatomy, layer, head):
                worst = max(worst, hooked.difference(plain.baseline()))
    return worst
