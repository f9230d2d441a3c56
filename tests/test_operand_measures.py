"""What is said of operand maps: ranks, AUROCs and powers equal those of scipy and numpy, and planted maps are found."""

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu, rankdata

from mathinterp.errors import UserError
from mathinterp.experiments.operand_map.grid import Grid, grid_of, heuristics_of, sinusoids
from mathinterp.experiments.operand_map.measures import Measured, Measures, centred_ranks
from mathinterp.experiments.operand_map.rows import rounded
from mathinterp.experiments.operand_map.tables import FAMILIES, PERIODS, POWERS
from mathinterp.prompts.alignment import tokenize_prompts
from tests.operand_twin import full_grid, prompts_of, tiny_pairs
from tests.tiny import tiny_tokenizer

CPU = torch.device("cpu")
ADD, ORDERED = full_grid("add"), full_grid("sub", ordered=True)
RNG = np.random.default_rng(0)


def measured(grid: Grid, *maps: np.ndarray, dtype: torch.dtype = torch.float64) -> Measured:
    values_UP = torch.from_numpy(np.stack([np.asarray(values, float) for values in maps]))
    return Measures(grid, CPU, dtype, shuffles=2, seed=0).of(values_UP)


def heuristic(grid: Grid, found: Measured, unit: int) -> tuple[str, str]:
    own, best = heuristics_of(grid), found.best_U[unit]
    return FAMILIES[own.family_C[best]], own.labels[best]


# ---- against scipy and numpy ----


def test_ranks_are_scipys_with_and_without_ties() -> None:
    values = np.stack([RNG.normal(size=300), RNG.integers(0, 7, 300), np.zeros(300), np.arange(300) % 2])
    expected = np.stack([rankdata(row) for row in values]) - 301 / 2
    np.testing.assert_array_equal(centred_ranks(torch.from_numpy(values)).numpy(), expected)
    half = torch.from_numpy(RNG.normal(size=(3, 500))).bfloat16()  # full of ties
    assert len(np.unique(half[0].float().numpy())) < 500
    expected = np.stack([rankdata(row) for row in half.float().numpy()]) - 501 / 2
    np.testing.assert_array_equal(centred_ranks(half).numpy(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [ADD, ORDERED], ids=["add", "ordered sub"])
def test_aurocs_are_those_of_mann_whitney(grid: Grid) -> None:
    values = [RNG.normal(size=len(grid)) + grid.a_P % 10, RNG.integers(-2, 3, len(grid)) + grid.b_P // 30]
    found, own = measured(grid, *values), heuristics_of(grid)
    for unit, row in enumerate(values):
        aurocs = np.array([_auroc(row, holds_P) for holds_P in own.holds_CP])
        strength = np.maximum(aurocs, 1 - aurocs)
        assert found.columns["auroc"][unit] == pytest.approx(strength.max(), abs=1e-12)
        assert strength[found.best_U[unit]] == pytest.approx(strength.max(), abs=1e-12)
        assert found.columns["high"][unit] == (aurocs[found.best_U[unit]] > 0.5)
        for number, family in enumerate(FAMILIES):
            expected = strength[own.family_C == number].max()
            assert found.columns[f"auroc_{family}"][unit] == pytest.approx(expected, abs=1e-12), family


def _auroc(values: np.ndarray, holds_P: np.ndarray) -> float:
    statistic = mannwhitneyu(values[holds_P], values[~holds_P]).statistic
    return float(statistic / (holds_P.sum() * (~holds_P).sum()))


@pytest.mark.slow
def test_the_control_is_the_best_heuristic_of_shuffled_pairs() -> None:
    values = RNG.normal(size=len(ADD)) + 3 * (ADD.result_P % 10 == 3)
    found, own = measured(ADD, values), heuristics_of(ADD)
    rng, best = np.random.default_rng(0), []
    for _ in range(2):
        holds_CP = own.holds_CP[:, rng.permutation(len(ADD))]
        aurocs = np.array([_auroc(values, holds_P) for holds_P in holds_CP])
        best.append(np.maximum(aurocs, 1 - aurocs).max())
    assert found.columns["shuffled"][0] == pytest.approx(np.mean(best), abs=1e-12)


def test_powers_are_those_of_the_two_dimensional_fourier_transform() -> None:
    values = RNG.normal(size=(100, 100)) + np.cos(2 * np.pi * np.add.outer(np.arange(100), np.arange(100)) / 10)
    found = measured(ADD, values.ravel()).columns
    power = np.abs(np.fft.fft2(values)) ** 2
    power[0, 0] = 0
    step = {"a": (1, 0), "b": (0, 1), "sum": (1, 1), "difference": (1, -1)}
    for direction, period in POWERS:
        k = 100 // period
        places = {tuple(sign * k * part % 100 for part in step[direction]) for sign in (1, -1)}
        share = sum(power[place] for place in places) / power.sum()
        assert found[f"power_{direction}_{period}"][0] == pytest.approx(share, rel=1e-9), (direction, period)
    for period in PERIODS:
        parts = sum(found[f"power_{direction}_{own}"][0] for direction, own in POWERS if own == period)
        assert found[f"power_{period}"][0] == pytest.approx(parts, rel=1e-9)


def test_where_pairs_are_missing_powers_are_shares_of_variance_that_least_squares_explain() -> None:
    values = RNG.normal(size=len(ORDERED)) + np.sin(2 * np.pi * ORDERED.b_P / 5)
    found = measured(ORDERED, values).columns
    angle_P = 2 * np.pi * np.stack([ORDERED.a_P, ORDERED.b_P, ORDERED.a_P + ORDERED.b_P, ORDERED.a_P - ORDERED.b_P]) / 5
    design = np.concatenate([np.ones((1, len(values))), np.cos(angle_P), np.sin(angle_P)]).T
    fitted = design @ np.linalg.lstsq(design, values, rcond=None)[0]
    assert found["power_5"][0] == pytest.approx(fitted.var() / values.var(), rel=1e-9)
    assert found["power_5"][0] > 0.3 > found["power_2"][0]


def test_sinusoids_are_orthonormal() -> None:
    for name, rows_RP in sinusoids(ORDERED).items():
        np.testing.assert_allclose(rows_RP @ rows_RP.T, np.eye(len(rows_RP)), atol=1e-12, err_msg=name)
        np.testing.assert_allclose(rows_RP.sum(1), 0, atol=1e-9)


# ---- planted maps ----

PLANTED = {
    "result_mod_10": RNG.permutation(10)[ADD.result_P % 10] * 1.0,
    "result_mod_2": ADD.result_P % 2,
    "a_mod_5": RNG.normal(size=5)[ADD.a_P % 5],
    "b_mod_10": (ADD.b_P % 10 == 7) + 0.0,
    "a_tens": ADD.a_P // 10,  # the upper half has an AUROC of 1, too
    "b_tens": RNG.permutation(10)[ADD.b_P // 10],
    "a_range": ADD.a_P >= 50,
    "carry": (ADD.a_P % 10 + ADD.b_P % 10 > 9) * 2.5,
    "equal": ADD.a_P == ADD.b_P,
}


@pytest.mark.slow
def test_a_map_that_is_a_function_of_one_heuristic_is_told_to_be() -> None:
    found = measured(ADD, *PLANTED.values())
    for unit, family in enumerate(PLANTED):
        assert heuristic(ADD, found, unit)[0] == family
        assert found.columns["auroc"][unit] == pytest.approx(1, abs=1e-12)
        assert found.columns["explained"][unit] == pytest.approx(1, abs=1e-9)
        assert found.columns["shuffled"][unit] < 0.65
    carry = list(PLANTED).index("carry")
    assert (heuristic(ADD, found, carry)[1], found.columns["high"][carry]) == ("units carry", True)
    assert heuristic(ADD, found, list(PLANTED).index("b_mod_10"))[1] == "b mod 10 = 7"


def test_a_carry_into_the_hundreds_is_a_heuristic_of_sums_alone() -> None:
    found = measured(ADD, ADD.a_P + ADD.b_P > 99)
    assert heuristic(ADD, found, 0) == ("carry", "carry into the hundreds")
    assert found.columns["auroc_carry"][0] == 1
    assert not any("hundreds" in label for label in heuristics_of(ORDERED).labels)


def test_a_borrow_is_that_of_the_units_and_a_product_has_none() -> None:
    found = measured(ORDERED, ORDERED.a_P % 10 < ORDERED.b_P % 10)
    assert heuristic(ORDERED, found, 0) == ("carry", "units borrow")
    product = full_grid("mul")
    found = measured(product, RNG.normal(size=len(product)))
    assert np.isnan(found.columns["auroc_carry"]).all()
    assert not np.isnan(found.columns["auroc_equal"]).any()


@pytest.mark.slow
def test_a_random_map_is_explained_no_better_than_a_shuffled_one() -> None:
    found = measured(ADD, *RNG.normal(size=(200, len(ADD)))).columns
    assert abs((found["auroc"] - found["shuffled"]).mean()) < 0.003
    assert (found["auroc"] - found["shuffled"]).max() < 0.05
    assert max(found[f"power_{period}"].max() for period in PERIODS) < 0.005


def test_a_map_that_varies_by_rounding_alone_is_constant() -> None:
    noise = 17 + 1e-6 * (ADD.b_P % 10 == 0)
    found = measured(ADD, noise, np.zeros(len(ADD)), noise * 1e3, dtype=torch.float32)
    assert list(found.best_U) == [-1, -1, -1]
    assert np.isnan(found.columns["auroc"]).all()
    assert np.isnan(found.columns["power_10"]).all()
    exact = measured(ADD, noise)
    assert heuristic(ADD, exact, 0) == ("b_mod_10", "b mod 10 = 0")


def test_one_large_value_does_not_make_a_map_constant() -> None:
    values = torch.from_numpy((ADD.b_P % 10 == 7) - 0.5 + 0.1 * RNG.normal(size=len(ADD)))
    values[4321] = 100
    found = Measures(ADD, CPU, torch.bfloat16, shuffles=1, seed=0).of(values.bfloat16()[None])
    assert heuristic(ADD, found, 0) == ("b_mod_10", "b mod 10 = 7")
    assert found.columns["auroc"][0] > 0.99


def test_what_is_summed_of_many_numbers_has_a_smaller_rounding() -> None:
    values_UP = torch.from_numpy(1 + 0.02 * (ADD.b_P % 10 == 7))[None]
    measures = Measures(ADD, CPU, torch.bfloat16, shuffles=1, seed=0)
    assert measures.of(values_UP).best_U[0] == -1
    assert heuristic(ADD, measures.of(values_UP, 64), 0) == ("b_mod_10", "b mod 10 = 7")
    assert measures.of(values_UP, 9).best_U[0] == -1  # spread .006, floor 4 * 2^-7 / 3


def test_pairs_of_classes_that_are_too_few_are_one_class_more_of_what_is_explained() -> None:
    chosen_P = (ADD.a_P < 90) | ((ADD.a_P == 95) & (ADD.b_P < 5))
    grid = Grid("add", np.arange(chosen_P.sum()), ADD.a_P[chosen_P], ADD.b_P[chosen_P], ADD.result_P[chosen_P])
    assert "tens digit of a = 9" not in heuristics_of(grid).labels
    values = 10.0 * (grid.a_P // 10 == 4) + 20 * (grid.a_P // 10 == 9)
    noisy = values + RNG.normal(size=len(grid))
    found = measured(grid, values, noisy)
    assert heuristic(grid, found, 0) == ("a_tens", "tens digit of a = 4")
    assert found.columns["explained"][0] == pytest.approx(1, abs=1e-9)
    assert heuristic(grid, found, 1)[1] == "tens digit of a = 4"
    fitted = np.array([noisy[grid.a_P // 10 == digit].mean() for digit in range(10)])[grid.a_P // 10]
    assert found.columns["explained"][1] == pytest.approx(fitted.var() / noisy.var(), rel=1e-9)


def test_the_order_of_maps_is_that_of_sorted_pairs() -> None:
    items = tiny_pairs(120)
    grid = grid_of(items)
    pairs = [(int(items[i].prompt.operand_a), int(items[i].prompt.operand_b)) for i in grid.order_P]
    assert pairs == sorted(pairs) == list(zip(grid.a_P, grid.b_P, strict=True))
    assert not grid.complete
    assert full_grid().complete


def test_every_heuristic_holds_for_some_pairs_and_is_named_once() -> None:
    own = heuristics_of(ADD)
    assert len(set(own.labels)) == len(own.labels)
    assert own.holds_CP.sum(1).min() >= 10
    by_label = dict(zip(own.labels, own.holds_CP, strict=True))
    np.testing.assert_array_equal(by_label["tens digit of result = 0"], ADD.result_P // 10 % 10 == 0)
    np.testing.assert_array_equal(by_label["result from 99 to 198"], ADD.result_P >= 99)
    for partition in np.unique(own.partition_C):  # classes of a partition never overlap
        assert own.holds_CP[own.partition_C == partition].sum(0).max() == 1


def test_stored_maps_are_off_by_half_of_their_last_bit() -> None:
    values = (RNG.normal(size=5000) * 10.0 ** RNG.integers(-30, 30, 5000)).astype(np.float32)
    found = rounded(values)
    assert (np.abs(found.astype(float) - values) <= np.abs(values) * 2.0**-12).all()
    assert (found.view(np.int32) & 0xFFF == 0).all()  # 11 stored bits of 23
    np.testing.assert_array_equal(rounded(np.array([0, -0.0, 1, -3, 4095], np.float32)), [0, 0, 1, -3, 4095])


# ---- prompts that are no grid ----


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (prompts_of([(a, b) for a in range(9) for b in range(11)]), "needs 100 pairs or more, and the prompts are 99"),
        (prompts_of([(a, 2) for a in range(100)]) + prompts_of([(3, 2)], "sub"), "are of add .symbols., sub .symbols."),
        (prompts_of([(a, 2) for a in range(101)]), "operand_a '100' is no number from 0 to 99"),
    ],
)
def test_prompts_that_are_no_grid_are_refused_in_one_line(given, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        grid_of(tokenize_prompts(given, tiny_tokenizer()))
    assert "\n" not in str(error.value)


def test_a_pair_asked_twice_and_an_answer_in_words_are_refused() -> None:
    from dataclasses import replace

    given = prompts_of([(a, 2) for a in range(100)])
    twice = [*given, replace(given[3], prompt_id="again")]
    with pytest.raises(UserError, match=r"prompts '3\+2' and 'again' both ask for 3 and 2"):
        grid_of(tokenize_prompts(twice, tiny_tokenizer()))
    with pytest.raises(UserError, match="the answer 'seven' is no whole number"):
        grid_of(tokenize_prompts([*given[:-1], replace(given[-1], answer="seven")], tiny_tokenizer()))
