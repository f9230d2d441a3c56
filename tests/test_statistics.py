"""Intervals and p-values: the SQL macros against scipy, the twin against hand-made cases, and both by simulation.

The simulation is a fast version of benchmarks/coverage.py; docs/statistics.md has the definitions and its table.
"""

import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from mathinterp.store.catalog import catalog
from tests.statistics_twin import (
    Part,
    Unit,
    clustered_effect,
    effects_by_operation,
    part_of,
    score_interval,
    score_p_value,
    share_interval,
    share_of,
)


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage", Path(__file__).parents[1] / "benchmarks" / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["coverage"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


COVERAGE = benchmark()


@pytest.fixture(scope="module")
def sql() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute(catalog().functions)
    return connection


def value(sql: duckdb.DuckDBPyConnection, expression: str, *values: Any) -> Any:
    row = sql.execute(f"SELECT {expression}", values).fetchone()
    assert row is not None
    return row[0]


# ---- Student's t ----


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 11, 30, 99, 399, 1599, 20_000])
def test_student_is_scipys(sql: duckdb.DuckDBPyConnection, df: int) -> None:
    assert value(sql, "student_factor(?)", df + 1) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-9)
    for t in (1e-6, 0.01, 0.3, 1, 1.96, 2.2, 4, 8, 20, 40):
        expected = 2 * stats.t.sf(t, df)
        if expected > 1e-290:
            assert value(sql, "student_p(?::DOUBLE, ?::DOUBLE)", t, df) == pytest.approx(expected, rel=1e-9)


def test_one_number_alone_has_no_interval_and_no_p(sql: duckdb.DuckDBPyConnection) -> None:
    assert value(sql, "student_factor(1)") is None
    assert value(sql, "mean_p(0.5, NULL, 1)") is None
    assert value(sql, "mean_p(0, 0, 8)") == 1
    assert value(sql, "mean_p(0.5, 0, 8)") == 2**-7, "eight alike: what flipping signs gives"


def test_of_unlike_operations_the_smallest_counts(sql: duckdb.DuckDBPyConnection) -> None:
    assert value(sql, "mean_p(0.3, 0.01, 12)") == pytest.approx(2 * stats.t.sf(3, 11), rel=1e-9)


# ---- the score interval ----

PROMPTS = st.lists(
    st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))),
    min_size=1,
    max_size=20,
)


def of(prompts: Sequence[tuple[int, int, int]]) -> tuple[list[int], list[int], list[int]]:
    """fell, rose and n per prompt; not more units move than there are."""
    return [f for n, f, _ in prompts], [min(r, n - f) for n, f, r in prompts], [n for n, _, _ in prompts]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=4))
@example([[(1, 1, 0)] * 30, [(1, 1, 0)] * 30, [(1, 0, 0)] * 30])  # two operations at their limit
@example([[(1, 1, 0)] * 12, [(1, 1, 0)] * 12, [(1, 0, 1)] * 11 + [(1, 0, 0)]])  # one cannot follow as far as no drop
def test_interval_and_p_are_one_procedure_in_sql_and_twin(
    sql: duckdb.DuckDBPyConnection, operations: list[list[tuple[int, int, int]]]
) -> None:
    rows = [(o, f, r, n) for o, prompts in enumerate(operations) for f, r, n in zip(*of(prompts), strict=True)]
    listed = ", ".join(str(row) for row in rows)
    found = sql.execute(
        f"""SELECT drop, score_bound(drop, parts, -1), score_bound(drop, parts, 1), score_p(drop, parts) FROM (
                SELECT avg(part.drop) AS drop, list(part) AS parts FROM (
                    SELECT score_part(fell, rose, n) AS part
                    FROM (VALUES {listed}) AS t(o, fell, rose, n) GROUP BY o))"""
    ).fetchone()
    assert found is not None
    drop, low, high, p = found
    parts = [part_of(*of(prompts)) for prompts in operations]
    assert (low, high) == pytest.approx(score_interval(parts), abs=1e-8)
    assert p == pytest.approx(score_p_value(parts), rel=1e-7)
    assert low - 1e-9 <= drop <= high + 1e-9
    if abs(p - 0.05) > 1e-6:
        assert (p < 0.05) == (low > 0 or high < 0), "they never contradict each other"


def score_in_sql(sql: duckdb.DuckDBPyConnection, rows: Sequence[tuple[int, int, int, int]]) -> Any:
    """(low, high, p) of rows of operation, fell, rose, n."""
    return sql.execute(
        f"""SELECT score_bound(drop, parts, -1), score_bound(drop, parts, 1), score_p(drop, parts) FROM (
                SELECT avg(part.drop) AS drop, list(part) AS parts FROM (
                    SELECT score_part(fell, rose, n) AS part
                    FROM (VALUES {", ".join(map(str, rows))}) AS t(o, fell, rose, n) GROUP BY o))"""
    ).fetchone()


def test_the_tokens_of_a_prompt_alone_are_not_taken_for_independent(sql: duckdb.DuckDBPyConnection) -> None:
    low, high, p = score_in_sql(sql, [(0, 1, 0, 3)])
    assert (low, high) == pytest.approx(score_interval([part_of([1], [0], [3])]), abs=1e-8)
    assert p == pytest.approx(score_p_value([part_of([1], [0], [3])]), rel=1e-7)


def test_no_interval_of_a_drop_goes_beyond_all_answers(sql: duckdb.DuckDBPyConnection) -> None:
    """With one prompt per operation: where one can go no further, the bound is the other's alone."""
    least, most, _ = score_in_sql(sql, [(0, 0, 0, 1)])
    assert -1 < least < -0.5
    assert most == pytest.approx(-least)
    low, high, _ = score_in_sql(sql, [(0, 0, 0, 1), (1, 0, 1, 1)])
    assert low == pytest.approx((least - 1) / 2)
    assert high <= 1
    assert score_in_sql(sql, [(0, 0, 0, 1), (1, 1, 0, 1)])[1] == pytest.approx((most + 1) / 2)


def test_of_accuracies_too_an_operation_that_is_all_right_stays_so(sql: duckdb.DuckDBPyConnection) -> None:
    """The upper end over all is then that of the others; it was too low by their share of the shift."""
    few, all_right = ([1] + [0] * 11, [1] * 12), ([1] * 12, [1] * 12)
    alone, together = shares_in_sql(sql, [few]), shares_in_sql(sql, [few, all_right, all_right, all_right])
    assert together[1] == pytest.approx((alone[1] + 3) / 4, abs=1e-3)  # 0.0201 less before
    mirrored = [([1 - hit for hit in hits], units) for hits, units in (few, all_right, all_right, all_right)]
    assert shares_in_sql(sql, mirrored) == pytest.approx((1 - together[1], 1 - together[0]))


def test_with_one_token_per_prompt_its_p_is_mcnemars() -> None:
    assert score_p_value([Part(44, 9 / 44, 1 / 44, 44)]) == pytest.approx(stats.chi2.sf((9 - 1) ** 2 / (9 + 1), 1))
    alone = score_interval([Part(44, 9 / 44, 1 / 44, 44)])
    wide = score_interval([part_of([1] * 9 + [0] * 35, [0] * 9 + [1] + [0] * 34, [1] * 44)])
    assert wide[0] < alone[0] < alone[1] < wide[1], "a few prompts that moved count for a little less"
    assert wide == pytest.approx(alone, abs=0.02)


def test_without_a_move_the_interval_says_what_few_prompts_cannot_show() -> None:
    for prompts, wide in ((8, 0.4), (12, 0.3), (50, 0.1), (400, 0.014)):
        low, high = score_interval([part_of([0] * prompts, [0] * prompts, [1] * prompts)])
        assert low == pytest.approx(-high, abs=1e-8)
        assert 0.6 * wide < high < wide
    assert score_p_value([part_of([0] * 8, [0] * 8, [2] * 8)]) == 1


def test_tokens_that_move_together_count_once() -> None:
    """Three tokens per prompt that all fall or none: the interval of the prompts, not of three times as many tokens."""
    fell = [1] * 10 + [0] * 30
    once = score_interval([part_of(fell, [0] * 40, [1] * 40)])
    together = score_interval([part_of([3 * f for f in fell], [0] * 40, [3] * 40)])
    assert together == pytest.approx(once, abs=1e-8)
    apart = score_interval([part_of([1] * 30 + [0] * 10, [0] * 40, [3] * 40)])
    assert apart[1] - apart[0] < 0.8 * (once[1] - once[0])


# ---- shares ----


def shares_in_sql(sql: duckdb.DuckDBPyConnection, operations: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Any:
    """(low, high) of operations' hits and n per prompt."""
    rows = [(o, h, n) for o, (hits, units) in enumerate(operations) for h, n in zip(hits, units, strict=True)]
    listed = ", ".join(str(row) for row in rows)
    return sql.execute(
        f"""SELECT share_bound(share, parts, -1), share_bound(share, parts, 1) FROM (
                SELECT avg(part.share) AS share, list(part) AS parts FROM (
                    SELECT share_part(hits, n) AS part FROM (VALUES {listed}) AS t(o, hits, n) GROUP BY o))"""
    ).fetchone()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=4))
def test_the_interval_of_an_accuracy_is_the_twins_and_mirrors_that_of_the_errors(
    sql: duckdb.DuckDBPyConnection, operations: list[list[tuple[int, int, int]]]
) -> None:
    right = [([hits for _, hits, _ in prompts], [n for n, _, _ in prompts]) for prompts in operations]
    wrong = [([n - h for h, n in zip(hits, units, strict=True)], units) for hits, units in right]
    low, high = shares_in_sql(sql, right)
    assert (low, high) == pytest.approx(share_interval([share_of(*prompts) for prompts in right]), abs=1e-8)
    assert shares_in_sql(sql, wrong) == pytest.approx((1 - high, 1 - low), abs=1e-8)
    seen = float(np.mean([sum(hits) / sum(units) for hits, units in right]))
    assert 0 <= low <= seen + 1e-9
    assert seen - 1e-9 <= high <= 1


def test_twelve_right_answers_of_twelve_say_what_the_binomial_says(sql: duckdb.DuckDBPyConnection) -> None:
    """Clopper and Pearson: [.735, 1], and [0, .265] where none is right; of 4 of 6 [.223, .957]."""
    low, high = shares_in_sql(sql, [([1] * 12, [1] * 12)])
    assert high == 1
    assert 0.69 < low < 0.735
    assert shares_in_sql(sql, [([0] * 12, [1] * 12)]) == pytest.approx((0, 1 - low), abs=1e-8)
    assert 0.2 < shares_in_sql(sql, [([1] * 4 + [0] * 2, [1] * 6)])[0] < 0.24, "4 of 6 right are not none"


@pytest.mark.parametrize("prompts", [12, 50])
def test_intervals_of_accuracies_hold_what_they_say_also_near_1(prompts: int) -> None:
    """One token per prompt: over all counts that can come up, weighted by how likely they are."""
    ends = [
        share_interval([share_of([1] * hits + [0] * (prompts - hits), [1] * prompts)]) for hits in range(prompts + 1)
    ]
    for right in (0.005, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995):
        chances = stats.binom.pmf(range(prompts + 1), prompts, right)
        held = sum(p for p, (low, high) in zip(chances, ends, strict=True) if low <= right <= high)
        assert held >= 0.95, right


# ---- units and operations ----


def test_scoring_chooses_the_unit() -> None:
    units = [Unit("a", 0, "add", True, True), Unit("a", 1, "add", True, False), Unit("b", 0, "add", True, True)]
    by_scoring = {name: clustered_effect(units, name) for name in ("token", "first_token", "exact_match")}
    assert [effect.n for effect in by_scoring.values()] == [3, 2, 2]
    assert [effect.drop for effect in by_scoring.values()] == pytest.approx([1 / 3, 0, 1 / 2])


def test_all_is_the_unweighted_mean_of_the_operations() -> None:
    few = [Unit("a", 0, "mul", True, False), Unit("b", 0, "mul", True, True)]
    many = [Unit(f"{i}", 0, "add", True, True) for i in range(98)]
    effects = effects_by_operation(few + many)
    assert list(effects) == ["add", "mul", "all"]
    assert (effects["all"].drop, effects["all"].n) == (0.25, 100)


# ---- by simulation (benchmarks/coverage.py is the whole of it) ----


def test_the_simulation_counts_as_the_twin_does() -> None:
    random = np.random.default_rng(0)
    fell_RP, n_P = random.integers(0, 2, (5, 14)).astype(float), np.array([1.0, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2])
    rose_RP = np.where(fell_RP == 0, random.integers(0, 2, (5, 14)), 0).astype(float)
    drawn = COVERAGE.summarized(fell_RP, rose_RP, n_P)
    p_R = COVERAGE.score_p([drawn])
    for row in range(5):
        part = part_of(fell_RP[row], rose_RP[row], n_P)
        assert (drawn.drop_R[row], drawn.units_R[row]) == pytest.approx((part.drop, part.units))
        assert p_R[row] == pytest.approx(score_p_value([part]), rel=1e-8)
        for drop in (-0.3, 0.0, 0.2):
            low, high = score_interval([part])
            assert bool(COVERAGE.score_holds([drawn], drop)[row]) == (low - 1e-6 <= drop <= high + 1e-6)


DRAWS = 700
NOISE = 3 * math.sqrt(0.07 * 0.93 / DRAWS)  # of the worst of many cases, three standard errors


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [8, 12, 20, 100])
def test_score_intervals_hold_what_they_say(prompts: int) -> None:
    before, score = COVERAGE.coverage(prompts, DRAWS)
    assert score["coverage"] > 0.95
    assert score["worst coverage"] > 0.93 - NOISE
    assert score["worst false alarms"] < 0.055 + NOISE
    assert before["worst coverage"] < 0.7, "the definition before fails the same simulation, so it can fail"


@pytest.mark.parametrize("prompts", [12, 30, 100])
def test_intervals_of_accuracy_hold_where_other_operations_are_all_right(
    sql: duckdb.DuckDBPyConnection, prompts: int
) -> None:
    ends = sql.execute(
        f"""SELECT right_ones, score_bound(accuracy, parts, -1), score_bound(accuracy, parts, 1) FROM (
                SELECT right_ones, avg(part.drop) AS accuracy, list(part ORDER BY operation) AS parts FROM (
                    SELECT right_ones, operation,
                           score_part((operation < 3 OR prompt < right_ones)::INTEGER, 0, 1) AS part
                    FROM range({prompts + 1}) AS a(right_ones), range(4) AS o(operation), range({prompts}) AS p(prompt)
                    GROUP BY right_ones, operation)
                GROUP BY right_ones) ORDER BY right_ones"""
    ).fetchall()
    for accuracy in np.linspace(0.005, 0.95, 190):  # of the fourth operation; above, a Wilson interval misses as well
        truth = (3 + accuracy) / 4
        held = [right_ones for right_ones, low, high in ends if low - 1e-9 <= truth <= high + 1e-9]
        assert stats.binom.pmf(held, prompts, accuracy).sum() > 0.93, f"{accuracy:.3f} right"


@pytest.mark.parametrize("prompts", [4, 12])
def test_score_intervals_of_the_mean_hold_what_they_say(prompts: int) -> None:
    before, score = COVERAGE.coverage_of_all(prompts, DRAWS)
    assert score["worst coverage"] > 0.93 - NOISE
    assert score["worst false alarms"] < 0.055 + NOISE
    assert before["worst coverage"] < 0.85


def test_false_discoveries_among_heads_stay_under_their_rate_and_true_ones_are_found() -> None:
    rows = [row for row in COVERAGE.discoveries(12, 60) if row["procedure"] == "score"]
    assert all(row["false discoveries"] < 0.055 + 0.05 for row in rows)
    assert rows[0]["power"] > 0.85


@pytest.mark.parametrize(("pairs", "operations"), [(4, 4), (12, 1), (12, 4)])
def test_path_effects_keep_their_false_discovery_rate(pairs: int, operations: int) -> None:
    rows = {row["procedure"]: row for row in COVERAGE.mean_discoveries(pairs, operations, 200)}
    assert rows["student"]["worst false alarms"] < 0.055
    assert rows["student"]["worst false discoveries"] < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
    assert rows["normal (before)"]["worst false discoveries"] > 0.2
