"""The identities of method.md, in float64, on tiny random models of every family."""

import numpy as np
import pytest
import torch

from mathinterp.engine.hooks import caught_input, caught_output, edited_input, edited_output, zeroed_columns
from mathinterp.engine.intervention import Tokens, Value, intervention, no_op, zeroed
from mathinterp.engine.layers import record
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head, Mlp
from tests.exact import EXACT, PROMPTS, assert_same, one_at_a_time, random_prompts


def test_packed_equals_one_prompt_at_a_time(anatomy: Anatomy) -> None:
    expected = one_at_a_time(anatomy, PROMPTS)
    packed = PackedEngine(anatomy, PROMPTS)
    np.testing.assert_allclose(packed.baseline().logprob_EA[0], expected, **EXACT)
    assert packed.forest.n_nodes < sum(len(p.fed) for p in PROMPTS), "nothing was shared: the test shows nothing"
    np.testing.assert_allclose(PlainEngine(anatomy, PROMPTS).baseline().logprob_EA[0], expected, **EXACT)


def test_replay_equals_full_forward_with_hooks_for_every_head(anatomy: Anatomy) -> None:
    packed = PackedEngine(anatomy, PROMPTS, max_tokens=300, edits_per_batch=2)  # several groups, several batches
    plain = PlainEngine(anatomy, PROMPTS, batch_size=5)
    baseline = plain.baseline()
    for layer in range(anatomy.shape.n_layers):
        zero = Value.zero(anatomy, "head", layer)
        heads = [intervention([Head(layer, head)], zero) for head in range(anatomy.shape.n_heads)]
        ablated = packed.run(heads)
        assert_same(ablated, plain.run(heads))
        assert (np.abs(ablated.logprob_EA - baseline.logprob_EA).max(axis=1) > 1e-6).all(), "an ablation did nothing"


def test_zero_ablation_equals_zeroed_output_projection_columns(anatomy: Anatomy) -> None:
    packed = PackedEngine(anatomy, PROMPTS)
    clean = one_at_a_time(anatomy, PROMPTS)
    for layer, head in ((0, 1), (anatomy.shape.n_layers - 1, 3)):
        ablated = packed.run([zeroed(anatomy, [Head(layer, head)])])
        with zeroed_columns(anatomy, layer, head):
            np.testing.assert_allclose(ablated.logprob_EA[0], one_at_a_time(anatomy, PROMPTS), **EXACT)
    np.testing.assert_array_equal(one_at_a_time(anatomy, PROMPTS), clean)  # the weights are back


def test_per_head_outputs_sum_to_the_attention_output(anatomy: Anatomy) -> None:
    shape = anatomy.shape
    for layer in range(shape.n_layers):
        projection = anatomy.output_projection(layer)
        with caught_input(projection) as inputs, caught_output(projection) as outputs:
            anatomy.model(torch.tensor([PROMPTS[0].fed]))
        weight = anatomy.output_weight(layer)
        slices = [anatomy.head_slice(head) for head in range(shape.n_heads)]
        total = sum(inputs[0][..., s] @ weight[s] for s in slices)
        bias = getattr(projection, "bias", None)
        torch.testing.assert_close(total if bias is None else total + bias, outputs[0], rtol=1e-11, atol=1e-12)


def test_no_op_edit_returns_the_clean_scores(anatomy: Anatomy) -> None:
    for engine in (PackedEngine(anatomy, PROMPTS), PlainEngine(anatomy, PROMPTS)):
        baseline = engine.baseline()
        for layer in range(anatomy.shape.n_layers):
            assert_same(engine.run([no_op(anatomy, layer)]), baseline)


def test_mlp_edits_agree_and_zero_keeps_the_bias(anatomy: Anatomy) -> None:
    packed, plain = PackedEngine(anatomy, PROMPTS), PlainEngine(anatomy, PROMPTS)
    for layer in range(anatomy.shape.n_layers):
        zero = zeroed(anatomy, [Mlp(layer)])
        ablated = packed.run([zero])
        assert_same(ablated, plain.run([zero]))
        if anatomy.shape.n_experts:
            all_zero = edited_output(anatomy.mlp(layer), torch.zeros_like)
        else:
            all_zero = edited_input(anatomy.down_projection(layer), torch.zeros_like)
        with all_zero:
            np.testing.assert_allclose(ablated.logprob_EA[0], one_at_a_time(anatomy, PROMPTS), **EXACT)


@pytest.mark.parametrize("site", ["head", "mlp"])
def test_replacing_named_tokens_agrees(anatomy: Anatomy, site: str) -> None:
    """Values of another prompt at END (resample) and of another prompt at every token, per prompt."""
    others = random_prompts(seed=0)[::-1]
    ends, other_ends = Tokens.ends(PROMPTS), Tokens.ends(others)
    packed = PackedEngine(anatomy, PROMPTS, private_from=ends.token_n.tolist(), max_tokens=200)
    plain = PlainEngine(anatomy, PROMPTS, batch_size=7)
    source = PlainEngine(anatomy, others)
    packed_source = PackedEngine(anatomy, others)
    for layer in (0, anatomy.shape.n_layers - 1):
        rows = source.activations(site, layer, other_ends)
        torch.testing.assert_close(rows, packed_source.activations(site, layer, other_ends), **EXACT)
        units = [Head(layer, head) for head in range(4)] if site == "head" else [Mlp(layer)]
        value = Value(rows, ends)
        interventions = [intervention([unit], value) for unit in units]
        changed = packed.run(interventions)
        assert_same(changed, plain.run(interventions))
        assert np.abs(changed.logprob_EA - packed.baseline().logprob_EA).max() > 1e-6


def test_own_values_put_back_change_nothing(anatomy: Anatomy) -> None:
    """Resampling from X_c = X_r is a no-op, at every token of private trees."""
    packed = PackedEngine(anatomy, PROMPTS, private_from=[0] * len(PROMPTS))
    tokens = Tokens.every(PROMPTS)
    baseline = packed.baseline()
    for layer in range(anatomy.shape.n_layers):
        own = Value(packed.activations("head", layer, tokens), tokens)
        assert_same(packed.run([intervention([Head(layer, 0)], own)]), baseline)


def test_several_heads_at_once(anatomy: Anatomy) -> None:
    packed, plain = PackedEngine(anatomy, PROMPTS), PlainEngine(anatomy, PROMPTS)
    zero = Value.zero(anatomy, "head", 1)
    sets = [intervention([Head(1, head) for head in heads], zero) for heads in ((0, 2), (1, 2, 3))]
    assert_same(packed.run(sets), plain.run(sets))


def test_calls_recorded_without_computing_layers_are_those_of_the_whole_pass(anatomy: Anatomy) -> None:
    forest = PackedEngine(anatomy, PROMPTS).forest
    packs, before = np.arange(forest.n_packs), anatomy.model(torch.tensor([PROMPTS[0].fed])).logits
    seen: list[int] = []
    whole = record(anatomy, forest, packs, lambda layer, _: seen.append(layer))
    assert seen == list(range(anatomy.shape.n_layers))
    with pytest.raises(AssertionError, match="never fired"), caught_output(anatomy.attention(1)):
        idle = record(anatomy, forest, packs)
    torch.testing.assert_close(idle.embedded_PND, whole.embedded_PND, rtol=0, atol=0)
    for mine, expected in zip([*idle.layer, *idle.attention], [*whole.layer, *whole.attention], strict=True):
        torch.testing.assert_close(
            (mine.args, dict(mine.kwargs)), (expected.args, dict(expected.kwargs)), rtol=0, atol=0
        )
    assert not any(module._forward_pre_hooks for module in anatomy.model.modules())
    torch.testing.assert_close(anatomy.model(torch.tensor([PROMPTS[0].fed])).logits, before, rtol=0, atol=0)
