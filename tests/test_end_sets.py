"""Head sets edited at END alone, on END rows: equal to plain passes in float64 for every family; masking by them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mathinterp.engine.end_rows import EndRows
from mathinterp.engine.intervention import CLEAN, Intervention, Tokens, Value
from mathinterp.engine.plain import PlainEngine
from mathinterp.engine.scores import Scores
from mathinterp.experiments.iterative import Iterative
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head
from tests import ablation_twin
from tests.exact import PROMPTS, assert_same
from tests.head_sets import BASE, SETS, WITH_BASE, of_heads, resampled, zeros


def plain_first(anatomy: Anatomy, interventions: list[Intervention]) -> Scores:
    """Scores of first answer tokens by full passes over padded prompts."""
    twin = PlainEngine(anatomy, PROMPTS)
    return twin.run(interventions).at(np.flatnonzero(twin.answers.position_A == 0))


def test_end_rows_equal_plain_passes(anatomy: Anatomy) -> None:
    engine, values = EndRows(anatomy, PROMPTS, max_rows=30), resampled(anatomy)
    assert len(engine.groups) > 2, "prompts of several lengths"
    sets, (base,) = of_heads(WITH_BASE, values), of_heads([BASE], values)
    found = engine.run(sets, base)
    assert_same(found, plain_first(anatomy, sets))
    sets = of_heads(SETS, values)
    assert_same(engine.run(sets), plain_first(anatomy, sets))  # without a base again
    assert not np.allclose(found.logprob_EA[0], found.logprob_EA[-1])
    for layer in range(anatomy.shape.n_layers):
        assert not anatomy.output_projection(layer)._forward_pre_hooks


def test_a_base_of_other_values_is_computed_again() -> None:
    anatomy = Anatomy(ablation_twin.tiny_model("llama"))
    engine, first = EndRows(anatomy, PROMPTS), resampled(anatomy)
    other = {layer: replace(item, rows=2 * item.rows) for layer, item in first.items() if item.rows is not None}
    for values in (first, other):
        sets, (base,) = of_heads(WITH_BASE, values), of_heads([BASE], values)
        assert_same(engine.run(sets, base), plain_first(anatomy, sets))


def test_an_edit_of_every_token_is_refused_and_nan_names_heads_and_prompt() -> None:
    anatomy = Anatomy(ablation_twin.tiny_model("llama"))
    engine, item = EndRows(anatomy, PROMPTS), resampled(anatomy)[1]
    with pytest.raises(AssertionError, match="every token"):
        engine.run(of_heads([[Head(0, 1)]], zeros(anatomy)))
    assert item.tokens is not None
    assert item.rows is not None
    before = Tokens(item.tokens.prompt_n, item.tokens.token_n - 1)
    with pytest.raises(AssertionError, match="other tokens than END"):
        engine.run(of_heads([[Head(1, 1)]], {1: Value(item.rows, before)}))
    rows = item.rows.clone()
    rows[3] = torch.nan
    with pytest.raises(FloatingPointError, match=r"head 1\.2 edited: log-probability of prompt 3 is nan"):
        engine.run(of_heads([[Head(1, 2)]], {1: Value(rows, item.tokens)}))
    assert np.isfinite(engine.run([CLEAN]).logprob_EA).all()


@pytest.mark.parametrize("ablation", ["mean", "resample", "zero"])
def test_iterative_masking_is_the_same_on_end_rows(ablation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on = ablation_twin.subject(ablation_twin.tiny_model("llama"))
    scan = Iterative(ablation, "end", steps=3, rank_by="logprob")
    assert scan.only_end
    assert not Iterative(ablation, "end", scoring="token").only_end
    assert not Iterative("zero").only_end
    tables = []
    for only_end in (True, False):
        monkeypatch.setattr(Iterative, "only_end", property(lambda _, chosen=only_end: chosen))
        state = scan.prepare(on)
        assert isinstance(state.engine, EndRows) == only_end
        assert scan.notes(state)["no_head_deviation"] < 1e-9
        tables.append([scan.run(state, shard).to_pandas() for shard in scan.shards(on.anatomy.shape, on.prompts)])
    for rows, expected in zip(*tables, strict=True):
        assert list(rows.columns) == list(expected.columns)
        np.testing.assert_allclose(rows.to_numpy(float), expected.to_numpy(float), rtol=1e-5, atol=1e-6)
        assert rows.masked.sum() == 1
