"""Head sets edited at END alone, on END rows: equal to plain passes in float64 for every family; masking by them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mathinterp.engine.edits import Replacement
from mathinterp.engine.end_rows import EndHeadSets
from mathinterp.engine.head_sets import NO_HEADS, HeadSet, PlainHeadSets
from mathinterp.engine.scores import Scores
from mathinterp.experiments.iterative import Iterative
from mathinterp.models.anatomy import Anatomy
from tests import test_scans
from tests.exact import PROMPTS, assert_same
from tests.head_sets import SETS, resampled, zeros

BASE: HeadSet = frozenset({(0, 1), (1, 2)})
WITH_BASE: list[HeadSet] = [BASE | {(layer, head)} for layer in (2, 0, 1) for head in (0, 3)] + [BASE]


def plain_first(anatomy: Anatomy, sets: list[HeadSet], replacements: dict[int, Replacement]) -> Scores:
    """Scores of first answer tokens by full passes over padded prompts."""
    twin = PlainHeadSets(anatomy, PROMPTS)
    return twin.run_sets(sets, replacements).at(np.flatnonzero(twin.answers.position_A == 0))


def test_end_rows_equal_plain_passes(anatomy: Anatomy) -> None:
    runner, replacements = EndHeadSets(anatomy, PROMPTS, max_rows=30), resampled(anatomy)
    assert len(runner.groups) > 2, "prompts of several lengths"
    found = runner.run_sets(WITH_BASE, replacements, BASE)
    assert_same(found, plain_first(anatomy, WITH_BASE, replacements))
    assert_same(runner.run_sets(SETS, replacements), plain_first(anatomy, SETS, replacements))  # without a base again
    assert not np.allclose(found.logprob_EA[0], found.logprob_EA[-1])
    for layer in range(anatomy.shape.n_layers):
        assert not anatomy.output_projection(layer)._forward_pre_hooks


def test_a_base_of_other_values_is_computed_again() -> None:
    anatomy = Anatomy(test_scans.tiny_model("llama"))
    runner, first = EndHeadSets(anatomy, PROMPTS), resampled(anatomy)
    other = {layer: replace(item, values=2 * item.values) for layer, item in first.items()}
    for replacements in (first, other):
        found = runner.run_sets(WITH_BASE, replacements, BASE)
        assert_same(found, plain_first(anatomy, WITH_BASE, replacements))


def test_an_edit_of_every_token_is_refused_and_nan_names_heads_and_prompt() -> None:
    anatomy = Anatomy(test_scans.tiny_model("llama"))
    runner, replacements = EndHeadSets(anatomy, PROMPTS), resampled(anatomy)
    with pytest.raises(AssertionError, match="for every token"):
        runner.run_sets([frozenset({(0, 1)})], zeros(anatomy))
    item = replacements[1]
    assert item.token_n is not None
    with pytest.raises(AssertionError, match="other tokens than END"):
        runner.run_sets([frozenset({(1, 1)})], {1: replace(item, token_n=item.token_n - 1)})
    values = item.values.clone()
    values[3] = torch.nan
    with pytest.raises(FloatingPointError, match=r"heads 1\.2 edited: log-probability of prompt 3 is nan"):
        runner.run_sets([frozenset({(1, 2)})], {1: replace(item, values=values)})
    with pytest.raises(AssertionError, match="no replacement for layers"):
        runner.run_sets([frozenset({(2, 1)})], {0: item})
    assert np.isfinite(runner.run_sets([NO_HEADS], {}).logprob_EA).all()


@pytest.mark.parametrize("ablation", ["mean", "resample", "zero"])
def test_iterative_masking_is_the_same_on_end_rows(ablation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on = test_scans.subject(test_scans.tiny_model("llama"))
    scan = Iterative(ablation, "end", steps=3, rank_by="logprob")
    assert scan.only_end
    assert not Iterative(ablation, "end", scoring="token").only_end
    assert not Iterative("zero").only_end
    tables = []
    for only_end in (True, False):
        monkeypatch.setattr(Iterative, "only_end", property(lambda _, chosen=only_end: chosen))
        state = scan.prepare(on)
        assert isinstance(state.runner, EndHeadSets) == only_end
        assert scan.notes(state)["no_head_deviation"] < 1e-9
        tables.append([scan.run(state, shard).to_pandas() for shard in scan.shards(on.anatomy.shape, on.prompts)])
    for rows, expected in zip(*tables, strict=True):
        assert list(rows.columns) == list(expected.columns)
        np.testing.assert_allclose(rows.to_numpy(float), expected.to_numpy(float), rtol=1e-5, atol=1e-6)
        assert rows.masked.sum() == 1
