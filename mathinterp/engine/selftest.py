"""The identities of method.md on a user's own model: proof that its family entry and the engine fit it.

Each check compares two ways to the same number and gives the largest difference, in nats unless said otherwise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mathinterp.engine.alone import TOLERATED_DEVIATION, TOLERATED_HALF_DEVIATION
from mathinterp.engine.hooks import caught_input, caught_output, zeroed_columns
from mathinterp.engine.intervention import Value, intervention, no_op, zeroed
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import Scores
from mathinterp.engine.selftest_parts import (
    attention_difference,
    coefficient_difference,
    coefficients,
    lens_difference,
    look,
    neuron_sum_difference,
    stream_difference,
    worst,
    zeroed_value,
)
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head, Mlp, Neuron
from mathinterp.prompts.prompt import TokenizedPrompt

# What rounding explains of a part recomputed by hand, relative to its size; norms and activations work in float32.
RELATIVE = {torch.float64: 1e-5, torch.float32: 1e-4}
HALF_RELATIVE = 5e-2


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
    closest = RELATIVE.get(anatomy.dtype, HALF_RELATIVE)
    heads = sorted({int(h) for h in np.linspace(0, shape.n_heads - 1, num=heads_per_layer)})
    plain = PlainEngine(anatomy, prompts, batch_size=1)
    alone = plain.baseline()

    yield Check("answer logits = the model's own logits", _logit_difference(anatomy, prompts, alone), limit)
    yield Check("heads' outputs sum to the attention output (relative)", _head_sum(anatomy, prompts[0], layers), limit)
    yield Check("zeroed head = zeroed columns of o_proj", _zeroed_columns(plain, layers, heads), limit)
    yield from _family_checks(plain, layers, closest, limit)
    if not anatomy.family.tree_mask:
        return
    packed = PackedEngine(anatomy, prompts)
    yield Check("packed = one prompt at a time", packed.baseline().difference(alone), limit)
    nothing = worst([packed.run([no_op(anatomy, layer)]).difference(packed.baseline()) for layer in layers])
    yield Check("no-op intervention = clean", nothing, limit)
    replayed = []
    for layer in layers:
        value = Value.zero(anatomy, "head", layer)
        for interventions in (
            [intervention([Head(layer, head)], value) for head in heads],
            [zeroed(anatomy, [Mlp(layer)])],
        ):
            replayed.append(packed.run(interventions).difference(plain.run(interventions)))
    yield Check("replay from layer l = full forward with hooks", worst(replayed), limit)


def _family_checks(plain: PlainEngine, layers: Sequence[int], closest: float, limit: float) -> Iterator[Check]:
    """What families.py says of the model's parts, on the longest prompt; see selftest_parts.py."""
    anatomy = plain.anatomy
    fed = max((prompt.fed for prompt in plain.prompts), key=len)
    seen = look(anatomy, fed)
    attention = worst([attention_difference(anatomy, seen, fed, layer) for layer in layers])
    yield Check("attention by hand from q, k and v = o_proj's input (relative)", attention, closest)
    yield Check("residual stream by hand from norms and blocks (relative)", stream_difference(anatomy, seen), closest)
    yield Check("lens of the last layer = the model's logits", lens_difference(anatomy, seen), limit)
    if anatomy.shape.n_experts:
        return
    found = coefficients(anatomy, fed, layers)
    gates = worst([coefficient_difference(anatomy, seen, layer, found[layer]) for layer in layers])
    yield Check("coefficients by hand from gate and up = down_proj's input (relative)", gates, closest)
    sums = worst([neuron_sum_difference(anatomy, seen, layer, found[layer]) for layer in layers])
    yield Check("neurons' outputs sum to the MLP output (relative)", sums, closest)
    yield Check("zeroed coefficient = zeroed column of down_proj", _zeroed_values(plain, layers, found), limit)


def _zeroed_values(plain: PlainEngine, layers: Sequence[int], found: dict[int, torch.Tensor]) -> float:
    """Of each layer, the neuron that is strongest at the last token."""
    differences = []
    for layer in layers:
        neuron = int(found[layer][-1].abs().argmax())
        hooked = plain.run([zeroed(plain.anatomy, [Neuron(layer, neuron)])])
        with zeroed_value(plain.anatomy, layer, neuron):
            differences.append(hooked.difference(plain.baseline()))
    return worst(differences)


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
        for head in heads:
            hooked = plain.run([zeroed(plain.anatomy, [Head(layer, head)])])
            with zeroed_columns(plain.anatomy, layer, head):
                worst = max(worst, hooked.difference(plain.baseline()))
    return worst
