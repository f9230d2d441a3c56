"""Sets of heads ablated together, in float64 against slow twins: packed, plain, cached; next tokens of a sentence."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from mathinterp.engine.edits import Edit, Replacement
from mathinterp.engine.head_sets import (
    NO_HEADS,
    HeadSet,
    PackedHeadSets,
    PlainHeadSets,
    head_sets,
    next_token_probabilities,
)
from mathinterp.engine.hooks import zeroed_columns
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.models.anatomy import Anatomy
from tests.exact import EXACT, PROMPTS, assert_same, one_at_a_time
from tests.head_sets import SETS, resampled, zeros


def packed_engine(anatomy: Anatomy) -> PackedEngine:
    """Several groups, several batches; nodes from END on are each prompt's own."""
    return PackedEngine(anatomy, PROMPTS, private_from=[p.end for p in PROMPTS], max_tokens=300, edits_per_batch=2)


def test_a_set_over_layers_equals_zeroed_columns_of_all_its_heads(anatomy: Anatomy) -> None:
    clean = one_at_a_time(anatomy, PROMPTS)
    packed = PackedHeadSets(packed_engine(anatomy)).run_sets(SETS, zeros(anatomy))
    for row, heads in enumerate(SETS):
        with ExitStack() as zeroed:
            for layer, head in heads:
                zeroed.enter_context(zeroed_columns(anatomy, layer, head))
            expected = one_at_a_time(anatomy, PROMPTS)
        np.testing.assert_allclose(packed.logprob_EA[row], expected, **EXACT)
        assert (np.abs(expected - clean).max() > 1e-6) == bool(heads), "a set of heads did nothing"


def test_a_set_in_one_layer_equals_the_engine_that_edits_one_layer(anatomy: Anatomy) -> None:
    engine = packed_engine(anatomy)
    for replacements in (zeros(anatomy), resampled(anatomy)):
        for layer in range(anatomy.shape.n_layers):
            edit = Edit.heads_of(layer, [0, 2])
            expected = engine.run_edits(layer, [edit], replacements[layer])
            heads: HeadSet = frozenset({(layer, 0), (layer, 2)})
            assert_same(PackedHeadSets(engine).run_sets([heads], replacements), expected)


def test_packed_sets_equal_plain_ones_and_no_head_is_clean(anatomy: Anatomy) -> None:
    engine = packed_engine(anatomy)
    packed, plain = head_sets(engine), head_sets(PlainEngine(anatomy, PROMPTS, batch_size=7))
    assert isinstance(packed, PackedHeadSets)
    assert isinstance(plain, PlainHeadSets)
    for replacements in (zeros(anatomy), resampled(anatomy)):
        scores = packed.run_sets(SETS, replacements)
        assert_same(scores, plain.run_sets(SETS, replacements))
        row = SETS.index(NO_HEADS)
        np.testing.assert_allclose(scores.logprob_EA[row], engine.baseline().logprob_EA[0], **EXACT)


def test_a_cached_base_changes_no_number(anatomy: Anatomy) -> None:
    base: HeadSet = frozenset({(0, 1), (1, 2)})
    sets: list[HeadSet] = [base | {(layer, head)} for layer in (2, 0, 1) for head in (0, 3)] + [base]
    engine = packed_engine(anatomy)
    runner = PackedHeadSets(engine)
    residual = engine.residual_LPND.clone()
    for replacements in (zeros(anatomy), resampled(anatomy)):
        cached = runner.run_sets(sets, replacements, base)
        assert_same(cached, runner.run_sets(sets, replacements))
        assert_same(cached, PlainHeadSets(anatomy, PROMPTS).run_sets(sets, replacements))
    assert torch.equal(engine.residual_LPND, residual), "the engine's own cache was overwritten"


def test_nothing_stays_hooked_and_nan_names_heads_and_prompt(anatomy: Anatomy) -> None:
    zero = zeros(anatomy)
    prompt_n = np.array([3])
    broken = Replacement(torch.full_like(zero[1].values, torch.nan)[None], prompt_n, np.array([PROMPTS[3].end]))
    runner = PackedHeadSets(packed_engine(anatomy))
    with pytest.raises(FloatingPointError, match=r"heads 0\.1, 1\.2 edited: log-probability of prompt 3 is nan"):
        runner.run_sets([frozenset({(0, 1), (1, 2)})], {**zero, 1: broken})
    for layer in range(anatomy.shape.n_layers):
        assert not anatomy.output_projection(layer)._forward_pre_hooks
    with pytest.raises(AssertionError, match="no replacement for layers"):
        runner.run_sets([frozenset({(2, 1)})], {0: zero[0]})


def test_next_token_probabilities_are_the_models_own(anatomy: Anatomy) -> None:
    ids, heads = PROMPTS[0].fed, frozenset({(0, 1), (2, 0)})
    zero = {layer: torch.zeros(4 * anatomy.shape.d_head, dtype=torch.float64) for layer in range(3)}
    with zeroed_columns(anatomy, 0, 1), zeroed_columns(anatomy, 2, 0):
        expected = anatomy.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    found = next_token_probabilities(anatomy, ids, heads, zero, end_only=False)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    at_end = next_token_probabilities(anatomy, ids, heads, zero, end_only=True)
    assert (at_end - found).abs().max() > 1e-6
