"""Decisions of adaptive scans: against a slow twin in exact fractions, over all orders, and by simulation."""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mathinterp.experiments.adaptive.betting import BETS_B, Block, Draws, FloatArray, log_e
from mathinterp.experiments.adaptive.judge import (
    ABOVE,
    NOT_ABOVE,
    OPEN,
    Rule,
    Verdicts,
    accuracy_weights,
    discoveries,
    judge,
    prompt_order,
)
from mathinterp.experiments.adaptive.looks import first_decision, looks
from tests import judge_twin

THRESHOLDS = [Fraction(1, 50), Fraction(1, 10), Fraction(1, 4), Fraction(1, 2)]
RATES = [Fraction(1, 20), Fraction(1, 2), Fraction(9, 10)]
SHARES_OF_TOKENS = [Fraction(k, n) for n in (1, 2, 3) for k in range(-n, n + 1)]


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Nodes of unlike leaning, in any order: also ones that no random order gives."""
    prompts, nodes = draw(st.integers(1, 24)), draw(st.integers(1, 5))
    leanings = (SHARES_OF_TOKENS, [Fraction(0)], [Fraction(1), Fraction(0)], [Fraction(1)], [Fraction(-1), Fraction(1)])
    lists = [st.lists(st.sampled_from(leaning), min_size=prompts, max_size=prompts) for leaning in leanings]
    weights = st.sampled_from([Fraction(1), Fraction(2), Fraction(3, 2)])
    ends = draw(st.sets(st.integers(1, prompts), max_size=6)) | {prompts}
    return {
        "threshold": draw(st.sampled_from(THRESHOLDS)),
        "fdr": draw(st.sampled_from(RATES)),
        "values": [draw(st.one_of(lists)) for _ in range(nodes)],
        "looks": sorted(ends),
        "weights": draw(st.lists(weights, min_size=prompts, max_size=prompts)),
    }  # fmt: skip


def judged(case: dict[str, Any], seen: int | None = None, values: FloatArray | None = None) -> Verdicts:
    return judge(
        Rule(float(case["threshold"]), float(case["fdr"])),
        np.array(case["values"], float) if values is None else values,
        case["looks"],
        len(case["looks"]) if seen is None else seen,
        np.array(case["weights"], float),
    )


def number(e: Fraction | None) -> float:
    return math.inf if e is None else float(e)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(cases(), st.data())
def test_agrees_with_the_twin(case: dict[str, Any], data: Any) -> None:
    seen = data.draw(st.integers(0, len(case["looks"])))
    found = judged(case, seen)
    for node, twin in enumerate(judge_twin.judge(**case, seen=seen)):
        assert found.decision_N[node] == twin.decision, node
        assert found.exact_N[node] == twin.exact
        assert found.used_N[node] == twin.used
        assert found.e_above_N[node] == pytest.approx(number(twin.e_above), rel=1e-6)
        assert found.e_below_N[node] == pytest.approx(number(twin.e_below), rel=1e-6)
        if twin.estimate is not None:
            assert found.estimate_N[node] == pytest.approx(float(twin.estimate), abs=1e-12)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(cases(), st.data())
def test_ends_of_intervals_are_where_the_twin_begins_to_refuse(case: dict[str, Any], data: Any) -> None:
    seen = data.draw(st.integers(1, len(case["looks"])))
    found, enough = judged(case, seen), 2 / case["fdr"]
    for node, values in enumerate(case["values"]):
        drawn = values[: found.used_N[node]]
        for side, end in ((1, found.low_N[node]), (-1, found.high_N[node])):
            if len(drawn) == len(values):
                assert end == found.estimate_N[node]
                continue
            inside = end + side * 1e-4  # rounding of the ends is less
            if side * (found.estimate_N[node] - inside) > 0:
                e = judge_twin.e_value(drawn, case["weights"], Fraction(inside), side)
                assert e is not judge_twin.INFINITE
                assert e < enough
            outside = Fraction(end - side * 1e-9)
            rest = case["weights"][len(drawn) :]
            so_far = sum(weight * value for weight, value in zip(case["weights"], drawn, strict=False))
            bound = (so_far - side * sum(rest)) / sum(case["weights"])  # if all prompts to come were -1, or 1
            if side * (outside - bound) >= 0 and end != found.estimate_N[node]:
                e = judge_twin.e_value(drawn, case["weights"], outside, side)
                assert e is judge_twin.INFINITE or e >= enough * Fraction(999, 1000)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(cases(), st.data())
def test_order_of_nodes_is_irrelevant(case: dict[str, Any], data: Any) -> None:
    order = np.array(data.draw(st.permutations(range(len(case["values"])))))
    found, mixed = judged(case), judged(case, values=np.array(case["values"], float)[order])
    for name in ("decision_N", "exact_N", "used_N", "e_above_N", "e_below_N", "estimate_N", "low_N", "high_N"):
        np.testing.assert_allclose(getattr(mixed, name), getattr(found, name)[order], rtol=1e-9)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(cases())
def test_no_decision_changes_afterwards_nor_needs_rows_after_it(case: dict[str, Any]) -> None:
    values, last = np.array(case["values"], float), judged(case)
    cut = np.where(np.arange(values.shape[1]) < last.used_N[:, None], values, np.nan)
    assert (judged(case, values=cut).decision_N == last.decision_N).all()
    for seen in range(len(case["looks"])):
        before = judged(case, seen, values=cut)
        done = before.decision_N != OPEN
        assert (last.decision_N[done] == before.decision_N[done]).all()
        for name in ("used_N", "e_above_N", "e_below_N", "low_N", "high_N"):
            assert (getattr(last, name)[done] == getattr(before, name)[done]).all()
        assert (before.used_N[~done] == (case["looks"][seen - 1] if seen else 0)).all()
    assert (last.decision_N != OPEN).all()


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(cases(), st.data())
def test_decision_estimate_and_interval_never_contradict(case: dict[str, Any], data: Any) -> None:
    found, threshold = judged(case, data.draw(st.integers(1, len(case["looks"])))), float(case["threshold"])
    assert (found.low_N <= found.estimate_N + 1e-12).all()
    assert (found.estimate_N <= found.high_N + 1e-12).all()
    above, not_above = found.decision_N == ABOVE, found.decision_N == NOT_ABOVE
    assert (found.high_N[above] >= threshold).all()
    assert (found.low_N[not_above] <= threshold + 1e-9).all()
    agrees = np.sign(found.estimate_N - threshold) == found.decision_N
    assert (found.low_N[above & agrees] >= threshold).all()
    assert (found.high_N[not_above & agrees] <= threshold).all()


def test_all_prompts_are_the_exact_answer() -> None:
    random = np.random.default_rng(1)
    values, weights = random.integers(-2, 3, (200, 40)) / 2, random.integers(1, 4, 40).astype(float)
    mean = values @ weights / weights.sum()
    found = judge(Rule(0.05, 0.05), values, [40], 1, weights)
    assert found.exact_N.all()
    for each in (found.estimate_N, found.low_N, found.high_N):
        np.testing.assert_allclose(each, mean, atol=1e-12)
    assert (found.decision_N == np.where(mean > 0.05 + 1e-9, ABOVE, NOT_ABOVE)).all()
    at_threshold = np.zeros((1, 40))
    at_threshold[0, :2] = 1  # 2 of 40 is 5 points exactly: not above
    assert judge(Rule(0.05, 0.05), at_threshold, [40], 1).decision_N == NOT_ABOVE


def test_what_cannot_change_any_more_is_certain_before_the_end() -> None:
    values = np.zeros((2, 100))
    values[0, :70] = 1
    found = judge(Rule(0.2, 1e-100), values, [50, 90, 100], 3)
    assert found.exact_N.all()
    assert found.decision_N.tolist() == [ABOVE, NOT_ABOVE]
    assert found.used_N.tolist() == [90, 90]
    assert found.e_above_N[0] == math.inf == found.e_below_N[1]
    assert found.low_N[0] >= 0.2
    assert 0 < found.high_N[1] <= 0.1 + 1e-9


def test_faults_of_the_program_are_caught() -> None:
    values = np.zeros((2, 10))
    for broken in (np.full((2, 10), np.nan), values + 1.5):
        with pytest.raises(AssertionError):
            judge(Rule(0.1, 0.05), broken, [5, 10], 1)
    for ends, seen in (([5, 9], 1), ([5, 5, 10], 1), ([5, 10], 3)):
        with pytest.raises(AssertionError):
            judge(Rule(0.1, 0.05), values, ends, seen)
    for rule in ((0.0, 0.05), (1.0, 0.05), (0.1, 0.0), (0.1, 1.0)):
        with pytest.raises(AssertionError):
            Rule(*rule)


@pytest.mark.parametrize("sign", [1.0, 0.0])
def test_a_node_alone_needs_an_e_value_of_two_over_the_rate(sign: float) -> None:
    values, side = np.full((1, 400), sign), "e_above_N" if sign else "e_below_N"
    found = [judge(Rule(0.05, 0.05), values, [look, 400], 1) for look in range(1, 120)]
    e = np.array([getattr(each, side)[0] for each in found])
    assert ((e > 20) & (e < 40)).any()
    assert ([each.decision_N[0] != OPEN for each in found] == (e >= 40)).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, 19.9, 20.1, 26.0, 27.0, 39.0, 41.0, 59.0, 61.0, 79.0, 81.0, 1e9]), min_size=1))
def test_e_bh_agrees_with_the_twin(e_values: list[float]) -> None:
    with np.errstate(divide="ignore"):
        found = discoveries(np.log(np.array(e_values)), 0.05)
    assert set(np.flatnonzero(found)) == judge_twin.e_bh([Fraction(e) for e in e_values], Fraction(1, 20))


# ---- do they promise what they say? ----


@pytest.mark.parametrize("side", ["e_above_N", "e_below_N"])
@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (1, 2, 3, 1, 2)])
def test_over_all_orders_an_e_value_is_1_on_average(side: str, weights: tuple[int, ...]) -> None:
    """Where the mean is at the threshold: exactly, over every order of five prompts with its chance of being drawn."""
    values, weight = np.array([1, -1, 0.5, 0, 0.5]), np.array(weights, float)
    threshold = float(values @ weight / weight.sum())
    assert 0 < threshold < 1
    expected = np.zeros(3)
    for order in itertools.permutations(range(5)):
        drawn = weight[list(order)]
        chance = np.prod(drawn / np.cumsum(drawn[::-1])[::-1])
        for seen in (1, 2, 3):
            found = judge(Rule(threshold, 1e-12), values[None, list(order)], [1, 2, 3, 5], seen, drawn)
            expected[seen - 1] += chance * getattr(found, side)[0]
    np.testing.assert_allclose(expected[:2], 1, rtol=1e-9)  # two draws never settle it, a third may
    assert expected[2] <= 1 + 1e-9


def highest_e(values_OP: FloatArray, m: float, against_less: bool) -> FloatArray:
    """The largest e-value on the way, of each order (O) of one population."""
    draws = Draws.of(np.ones(values_OP.shape[1]))
    capital, so_far = np.zeros((len(values_OP), len(BETS_B))), np.zeros(len(values_OP))
    highest = np.zeros(len(values_OP))
    for start in range(values_OP.shape[1] - 1):
        x = (values_OP[:, start : start + 1] + 1) / 2
        capital += Block.of(x, so_far, draws, start).log_capital(np.full(len(x), (m + 1) / 2), against_less)
        so_far += x[:, 0]
        highest = np.maximum(highest, log_e(capital))
    return np.exp(highest)


@pytest.mark.parametrize("against_less", [True, False])
@pytest.mark.parametrize(
    "population", [{1: 10, 0: 190}, {1: 30, -1: 20, 0: 150}, {1: 100, 0: 100}, {0.5: 40, 1: 10, -0.5: 20, 0: 130}]
)
def test_the_largest_e_value_on_the_way_is_rarely_large(population: dict[float, int], against_less: bool) -> None:
    """Looking after every prompt, a true "at most" or "at least" reaches 1 / level in at most ``level`` of orders."""
    values = np.repeat(list(population), list(population.values())).astype(float)
    orders = np.random.default_rng(0).permuted(np.tile(values, (2000, 1)), axis=1)
    highest = highest_e(orders, float(values.mean()), against_less)
    for level in (0.025, 0.1, 0.3):
        assert (highest >= 1 / level).mean() <= level + 3 * math.sqrt(level * (1 - level) / len(orders))
    assert (highest >= 2).mean() > 0.1  # it does move


@pytest.mark.slow
def test_false_discoveries_where_many_nodes_are_at_the_threshold() -> None:
    """The hardest case: 40 nodes cost just the threshold, 5 more, 15 nothing; a look after every 10 prompts."""
    random = np.random.default_rng(3)
    prompts, rule = 200, Rule(0.1, 0.2)
    truth = np.array([0.1] * 40 + [0.3] * 5 + [0.0] * 15)
    moved = [random.permutation(np.arange(prompts) < round(share * prompts)) for share in truth]
    values = np.array(moved, float)
    shares, missed, covered = [], [], []
    for _ in range(100):
        mixed = values[:, random.permutation(prompts)]
        found = judge(rule, mixed, range(10, prompts + 1, 10), 12)
        called, refused = found.decision_N == ABOVE, found.decision_N == NOT_ABOVE
        shares.append((called & (truth <= 0.1)).sum() / max(called.sum(), 1))
        missed.append((refused & (truth > 0.1)).sum() / max(refused.sum(), 1))
        covered.append(((found.low_N <= truth + 1e-9) & (truth <= found.high_N + 1e-9)).mean())
    assert np.mean(shares) <= rule.fdr / 2 + 3 * np.std(shares) / math.sqrt(len(shares))
    assert np.mean(missed) <= rule.fdr / 2
    assert np.mean(covered) >= 1 - rule.fdr
    assert called[40:45].all()


# ---- orders, weights, looks ----


def test_heavier_prompts_are_drawn_sooner() -> None:
    weights = np.array([1.0, 2.0, 5.0, 2.0])
    first = np.bincount([prompt_order(weights, seed)[0] for seed in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(first, weights / weights.sum(), atol=0.03)
    assert (prompt_order(weights, 7) == prompt_order(weights, 7)).all()
    equal = [tuple(prompt_order(np.ones(3), seed)) for seed in range(3000)]
    for order in itertools.permutations(range(3)):
        assert equal.count(order) == pytest.approx(500, abs=90)


def test_weights_give_the_accuracy_of_the_views() -> None:
    units, operations = [1, 2, 3, 2, 2], ["sub", "sub", "add", "add", "add"]
    fell = np.array([1, 0, 2, 1, 0])
    weights = accuracy_weights(units, operations)
    drop = (weights * fell / np.array(units)).sum() / weights.sum()
    assert drop == pytest.approx((1 / 3 + 3 / 7) / 2)


@pytest.mark.parametrize("population", [1, 2, 15, 40, 100, 400, 1600, 6000])
@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.5, 0.99])
def test_looks_begin_when_something_can_be_decided(population: int, threshold: float) -> None:
    rule = Rule(threshold, 0.05)
    ends, first = looks(population, rule), first_decision(population, rule)
    assert ends[-1] == population
    assert list(ends) == sorted(set(ends))
    assert ends[0] >= first
    assert len(ends) <= 24
    nothing = np.zeros((1, population))
    assert judge(rule, nothing, (first, population)[: 2 if first < population else 1], 1).decision_N == NOT_ABOVE
    if first > 1:
        assert judge(rule, nothing, (first - 1, population), 1).decision_N == OPEN
