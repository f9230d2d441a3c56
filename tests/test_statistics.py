"""The estimators: against scipy, by hand, and by simulation."""

import itertools
import math

import numpy as np
import pytest
from mathinterp.store.statistics import (
    Effect,
    Unit,
    benjamini_hochberg,
    clustered_effect,
    effects_by_operation,
    macro_effect,
    spearman,
    top_k_overlap,
)
from scipy import stats


def simulated(random: np.random.Generator, loss: float, prompts: int = 150) -> list[Unit]:
    """Prompts of 1-3 tokens that share their luck; each token right with .7 before and .7 - ``loss`` after.

    A prompt's tokens are all as easy as each other (one uniform number decides them, before and after apart),
    so tokens are far from independent and only the clustered variance can be right.
    """
    units = []
    for number in range(prompts):
        shared = random.random()
        before, after = shared < 0.7, (shared + random.uniform(-0.2, 0.2)) % 1 < 0.7 - loss
        units += [Unit(f"{number}", i, "add", bool(before), bool(after)) for i in range(random.integers(1, 4))]
    return units


def test_interval_covers_the_truth_in_95_percent_of_experiments():
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        low, high = clustered_effect(simulated(random, loss=0.1)).interval
        covered += low <= 0.1 <= high
    assert 0.93 <= covered / 1000 <= 0.97


def test_p_value_is_not_anti_conservative_when_nothing_is_lost():
    random = np.random.default_rng(1)
    p_values = np.array([clustered_effect(simulated(random, loss=0.0)).p_value for _ in range(1000)])
    for level in (0.01, 0.05, 0.2):
        assert np.mean(p_values <= level) <= level + 3 * math.sqrt(level * (1 - level) / 1000)
    assert np.mean(p_values <= 0.2) > 0.1, "nor is it needlessly blunt"


def test_p_value_is_scipys_normal_tail():
    effect = clustered_effect(simulated(np.random.default_rng(2), loss=0.1))
    z = effect.drop / math.sqrt(effect.variance)
    assert effect.p_value == pytest.approx(2 * stats.norm.sf(abs(z)), rel=1e-12)
    low, high = effect.interval
    assert (low, high) == pytest.approx(stats.norm.interval(0.95, effect.drop, math.sqrt(effect.variance)), rel=1e-12)


def test_variance_of_one_token_per_prompt_is_the_paired_mean_variance():
    random = np.random.default_rng(3)
    units = [Unit(f"{i}", 0, "add", bool(random.random() < 0.8), bool(random.random() < 0.6)) for i in range(40)]
    lost = [unit.baseline_correct - unit.correct for unit in units]
    effect = clustered_effect(units)
    assert effect.drop == pytest.approx(np.mean(lost))
    assert effect.variance == pytest.approx(np.var(lost, ddof=1) / 40)


def test_scoring_chooses_the_unit():
    units = [Unit("a", 0, "add", True, True), Unit("a", 1, "add", True, False), Unit("b", 0, "add", True, True)]
    by_scoring = {name: clustered_effect(units, name) for name in ("token", "first_token", "exact_match")}
    assert [effect.n for effect in by_scoring.values()] == [3, 2, 2]
    assert [effect.drop for effect in by_scoring.values()] == pytest.approx([1 / 3, 0, 1 / 2])


def test_all_is_the_unweighted_mean_of_the_operations():
    few = [Unit("a", 0, "mul", True, False), Unit("b", 0, "mul", True, True)]
    many = [Unit(f"{i}", 0, "add", True, True) for i in range(98)]
    effects = effects_by_operation(few + many)
    assert list(effects) == ["add", "mul", "all"]
    assert effects["all"].drop == 0.25
    assert effects["all"].variance == pytest.approx((0 + 0.25) / 4)
    assert effects["all"].n == 100


def test_macro_effect_needs_all_variances():
    known, unknown = Effect(2, 1.0, 0.5, 0.5, 0.25, 0.0, 1), Effect(1, 1.0, 0.0, 1.0, None, 0.0, 1)
    assert macro_effect([known, unknown]).variance is None
    assert macro_effect([known, unknown]).p_value is None
    assert macro_effect([known, known]).variance == 0.125


def test_degenerate_effects():
    nothing = clustered_effect([Unit("a", 0, "add", False, False), Unit("b", 0, "add", False, False)])
    assert (nothing.p_value, nothing.relative_drop, nothing.interval) == (1.0, None, (0.0, 0.0))
    everything = clustered_effect([Unit("a", 0, "add", True, False), Unit("b", 0, "add", True, False)])
    assert (everything.p_value, everything.relative_drop, everything.variance) == (0.5, 1.0, 0.0)  # 2 sign flips of 4


@pytest.mark.parametrize("seed", range(5))
def test_benjamini_hochberg_is_scipys(seed):
    random = np.random.default_rng(seed)
    p_values = np.round(random.beta(0.5, 2, size=60), 2)  # rounded: ties, zeros
    p_values[:3] = 1.0
    assert benjamini_hochberg(p_values) == pytest.approx(stats.false_discovery_control(p_values), rel=1e-12)


def test_benjamini_hochberg_controls_false_discoveries():
    random = np.random.default_rng(7)
    shares = []
    for _ in range(300):
        p_values = np.concatenate([random.random(80), random.random(20) * 1e-4])
        called = np.array(benjamini_hochberg(p_values)) <= 0.1
        shares.append(called[:80].sum() / max(1, called.sum()))
    assert np.mean(shares) <= 0.1


@pytest.mark.parametrize("seed", range(3))
def test_spearman_is_scipys_with_ties(seed):
    random = np.random.default_rng(seed)
    x, y = random.integers(0, 8, 50), random.normal(size=50)
    assert spearman(x, y + x) == pytest.approx(stats.spearmanr(x, y + x).statistic, rel=1e-12)


def test_spearman_of_a_constant_and_of_unequal_lengths():
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    with pytest.raises(ValueError, match="one length"):
        spearman([1, 2], [1, 2, 3])


def test_top_k_overlap():
    assert top_k_overlap(["1.1", "0.3", "2.2"], ["0.3", "4.0", "1.1"], 2) == 0.5
    assert top_k_overlap([1, 2, 3], [3, 2, 1], 3) == 1.0
    with pytest.raises(ValueError, match="k = 4"):
        top_k_overlap([1, 2, 3], [3, 2, 1], 4)


def test_p_is_never_below_what_flipping_signs_can_give():
    """Few prompts that all move alike have no variance: the exact test's least p stands in for a normal p of 0."""
    for moved in (1, 3, 6):
        units = [Unit(f"p{i}", 0, "add", True, i >= moved) for i in range(8)]
        effect = clustered_effect(units)
        changes = np.array([1.0] * moved + [0.0] * (8 - moved))
        flips = np.array(list(itertools.product((-1, 1), repeat=8)))
        exact = np.mean(np.abs(flips @ changes) >= changes.sum())
        assert effect.p_value is not None
        assert effect.p_value >= exact - 1e-12
