"""Sets of heads ablated together, in float64 against slow twins: packed, plain, cached; next tokens of a sentence."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from mathinterp.engine.choose import many_layers
from mathinterp.engine.hooks import zeroed_columns
from mathinterp.engine.intervention import Tokens, Value, intervention, zeroed
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine, next_token_probabilities
from mathinterp.engine.replay import PackedReplay
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head
from tests.exact import EXACT, PROMPTS, assert_same, one_at_a_time
from tests.head_sets import BASE, SETS, WITH_BASE, of_heads, resampled, zeros


def packed_engine(anatomy: Anatomy) -> PackedEngine:
    """Several groups, several batches; nodes from END on are each prompt's own."""
    return PackedEngine(anatomy, PROMPTS, private_from=[p.end for p in PROMPTS], max_tokens=300, edits_per_batch=2)


@pytest.mark.slow
def test_a_set_over_layers_equals_zeroed_columns_of_all_its_heads(anatomy: Anatomy) -> None:
    clean = one_at_a_time(anatomy, PROMPTS)
    packed = packed_engine(anatomy).replay.run(of_heads(SETS, zeros(anatomy)))
    for row, heads in enumerate(SETS):
        with ExitStack() as cut:
            for layer, head in heads:
                cut.enter_context(zeroed_columns(anatomy, layer, head))
            expected = one_at_a_time(anatomy, PROMPTS)
        np.testing.assert_allclose(packed.logprob_EA[row], expected, **EXACT)
        assert (np.abs(expected - clean).max() > 1e-6) == bool(heads), "a set of heads did nothing"


def test_a_set_in_one_layer_equals_the_engine_that_edits_one_layer(anatomy: Anatomy) -> None:
    engine = packed_engine(anatomy)
    for values in (zeros(anatomy), resampled(anatomy)):
        for layer in range(anatomy.shape.n_layers):
            sets = of_heads([[Head(layer, 0), Head(layer, 2)]], values)
            assert_same(engine.replay.run(sets), engine.run(sets))


def test_packed_sets_equal_plain_ones_and_no_head_is_clean(anatomy: Anatomy) -> None:
    engine = packed_engine(anatomy)
    packed, plain = many_layers(engine), many_layers(PlainEngine(anatomy, PROMPTS, batch_size=7))
    assert isinstance(packed, PackedReplay)
    assert isinstance(plain, PlainEngine)
    for values in (zeros(anatomy), resampled(anatomy)):
        scores = packed.run(of_heads(SETS, values))
        assert_same(scores, plain.run(of_heads(SETS, values)))
        row = SETS.index([])
        np.testing.assert_allclose(scores.logprob_EA[row], engine.baseline().logprob_EA[0], **EXACT)


def test_a_cached_base_changes_no_number(anatomy: Anatomy) -> None:
    engine = packed_engine(anatomy)
    residual = engine.residual_LPND.clone()
    for values in (zeros(anatomy), resampled(anatomy)):
        sets, (base,) = of_heads(WITH_BASE, values), of_heads([BASE], values)
        cached = engine.replay.run(sets, base)
        assert_same(cached, engine.replay.run(sets))
        assert_same(cached, PlainEngine(anatomy, PROMPTS).run(sets))
    assert torch.equal(engine.residual_LPND, residual), "the engine's own cache was overwritten"


def test_nothing_stays_hooked_and_nan_names_heads_and_prompt(anatomy: Anatomy) -> None:
    zero, nan = zeros(anatomy), torch.full((1, 4 * anatomy.shape.d_head), torch.nan, dtype=torch.float64)
    broken = Value(nan, Tokens(np.array([3]), np.array([PROMPTS[3].end])))
    heads = of_heads([[Head(0, 1), Head(1, 2)]], {**zero, 1: broken})
    with pytest.raises(FloatingPointError, match=r"heads 0\.1, 1\.2 edited: log-probability of prompt 3 is nan"):
        packed_engine(anatomy).replay.run(heads)
    for layer in range(anatomy.shape.n_layers):
        assert not anatomy.output_projection(layer)._forward_pre_hooks


def test_next_token_probabilities_are_the_models_own(anatomy: Anatomy) -> None:
    ids, heads = PROMPTS[0].fed, [Head(0, 1), Head(2, 0)]
    with zeroed_columns(anatomy, 0, 1), zeroed_columns(anatomy, 2, 0):
        expected = anatomy.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    found = next_token_probabilities(anatomy, ids, zeroed(anatomy, heads))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    end = Tokens(np.array([0]), np.array([len(ids) - 1]))
    changes = intervention(heads, lambda site, layer: Value.zero(anatomy, site, layer), end)
    at_end = next_token_probabilities(anatomy, ids, changes)
    assert (at_end - found).abs().max() > 1e-6
