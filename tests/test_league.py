"""The league: measures against scipy and plain sets, the view against hand-made figures, and resuming."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.cluster import run as cluster_run
from mathinterp.errors import UserError
from mathinterp.experiments.league.measures import agreements
from mathinterp.store import Store
from tests.charts import table_of
from tests.statistics_twin import student_interval

RNG = np.random.default_rng(0)


def effects(nodes: int = 40, prompts: int = 12, noise: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Exact effects with some ties at 0, and an estimate of them."""
    exact = RNG.normal(size=(nodes, 1)) * 2 + RNG.normal(size=(nodes, prompts))
    exact[:4] = 0
    return exact, exact * 0.7 + noise * RNG.normal(size=exact.shape)


def values(exact: np.ndarray, other: np.ndarray, **asked) -> dict:
    return {(a.measure, a.k): (a.value, a.error) for a in agreements(exact, other, **asked)}


def test_measures_are_those_of_scipy_and_of_plain_sets() -> None:
    exact, other = effects()
    other[:2] = 0
    found = values(exact, other)
    one, two = exact.mean(1), other.mean(1)
    assert found["spearman", None][0] == pytest.approx(stats.spearmanr(one, two).statistic)
    assert found["kendall", None][0] == pytest.approx(stats.kendalltau(one, two).statistic)
    assert found["spearman_absolute", None][0] == pytest.approx(stats.spearmanr(abs(one), abs(two)).statistic)
    for k in (5, 10, 32):
        first = [set(sorted(range(40), key=lambda n, m=means: -abs(m[n]))[:k]) for means in (one, two)]
        assert found["overlap", k][0] == len(first[0] & first[1]) / k
    alone = [stats.pearsonr(exact[:, p], other[:, p]).statistic for p in range(12)]
    assert found["prompt_correlation", None][0] == pytest.approx(np.mean(alone))
    assert found["prompt_correlation", None][1] == pytest.approx(np.std(alone) / np.sqrt(12), rel=0.2)


def test_of_scores_without_signs_only_sizes_are_compared() -> None:
    exact, _ = effects()
    found = values(exact, np.abs(exact.mean(1)) - 5)  # an order, no unit
    assert set(found) == {("spearman_absolute", None), ("overlap", 5), ("overlap", 10), ("overlap", 32)}
    assert all(value == pytest.approx(1.0) for value, _ in found.values())


def test_ties_overlap_as_often_as_chance_would_have_it() -> None:
    exact, size = np.arange(8.0)[:, None] * np.ones(3), np.array([0, 0, 0, 0, 1, 1, 1, 5.0])
    found = values(exact, size, ks=(2, 3))  # exact: 7, 6, 5 first; the scores: 7, then two of 4, 5, 6
    assert found["overlap", 2][0] == pytest.approx((1 + 1 / 3) / 2)
    assert found["overlap", 3][0] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)


def test_one_prompt_has_no_error_and_constant_effects_no_correlation() -> None:
    exact, other = effects(prompts=1)
    assert all(error is None for _, error in values(exact, other).values())
    assert ("spearman", None) not in values(exact, np.zeros_like(exact))


def test_draws_without_a_measure_do_not_take_it_away() -> None:
    """Of two prompts one has no effects: a quarter of the draws hold it alone, and have no correlation."""
    exact, other = effects(prompts=2)
    exact[:, 0] = other[:, 0] = 0
    found = values(exact, other)
    assert found["spearman", None][0] == pytest.approx(stats.spearmanr(exact[:, 1], other[:, 1]).statistic)
    value, error = found["prompt_correlation", None]
    assert value == pytest.approx(np.corrcoef(exact[:, 1], other[:, 1])[0, 1])
    assert error == pytest.approx(0, abs=1e-12), "draws that hold no known prompt count as none, not as 0"


def test_intervals_hold_the_agreement_of_many_prompts() -> None:
    """In 60 draws of 24 prompts of 4,000: most intervals hold what all of them say."""
    rng = np.random.default_rng(1)
    truth = 2 * rng.normal(size=(40, 1))
    exact = truth + rng.normal(size=(40, 4000))
    other = exact + truth * rng.normal(size=(40, 1)) + 0.5 * rng.normal(size=exact.shape)
    whole, hits = values(exact, other, draws=2), dict.fromkeys([("spearman", None), ("kendall", None)], 0)
    for _ in range(60):
        chosen = rng.choice(4000, 24, replace=False)
        found = values(exact[:, chosen], other[:, chosen], draws=60)
        for key in hits:
            low, high = student_interval(found[key][0], found[key][1] ** 2, 24)
            hits[key] += low <= whole[key][0] <= high
    assert min(hits.values()) >= 54


@pytest.mark.bundled
def test_the_view_says_what_stored_effects_say_and_a_second_call_computes_nothing(tmp_path: Path) -> None:
    model, prompts = mi.load("bundled", device="cpu"), mi.prompts("operand_pairs", limit=4)
    told: list[tuple[str, int]] = []
    tell = lambda title, run: told.append((title, run.done))  # noqa: E731
    asked = {"methods": ["atp", "relp"], "store": str(tmp_path), "told": tell}
    found = mi.league(model, prompts, **asked)
    stages = ["heads", "mlps", "atp", "relp"]
    assert [title for title, _ in told] == [*stages, "circuits of exact", "circuits of atp", "circuits of relp"]
    table = found.table.set_index("method")
    assert set(table.index) == {"exact", "atp", "relp"}
    assert table.loc["exact", "spearman"] == pytest.approx(1)
    assert table.loc["exact", ["forwards", "backwards"]].tolist() == [76, 0]
    assert table.loc["atp", ["forwards", "backwards"]].tolist() == [2, 1]
    assert (table["seconds"] > 0).all()
    for method, row in table.iterrows():
        circuits = found.store.sql(
            "SELECT * FROM circuit_scores WHERE run_id = $run", run=found.runs[f"circuits of {method}"]
        )
        for name in ("cpr", "cpr_low", "cpr_high", "cmd", "cmd_low", "cmd_high"):
            assert row[name] == pytest.approx(circuits[name].item(), rel=1e-12)
        assert circuits["method"].item() == method
    store = mi.open_store(tmp_path)
    means = [
        store.sql(
            f"""SELECT avg(effect::DOUBLE) AS mean FROM {view} WHERE run_id IN ({runs})
                GROUP BY node, layer, head ORDER BY node, layer, head"""
        )["mean"]
        for view, runs in (
            ("exact_node_effects", f"'{found.runs['heads']}', '{found.runs['mlps']}'"),
            ("node_attributions", f"'{found.runs['relp']}'"),
        )
    ]
    assert table.loc["relp", "kendall"] == pytest.approx(stats.kendalltau(*means).statistic)
    low, value, high = (table.loc["relp", f"spearman{end}"] for end in ("_low", "", "_high"))
    assert -1 <= low <= value <= high <= 1
    assert value == pytest.approx(stats.spearmanr(*means).statistic)
    (relp,) = store.rows(
        "SELECT value, error, prompts FROM league_scores WHERE method = 'relp' AND measure = 'spearman'"
    )
    unbiased = relp["error"] * np.sqrt(
        relp["prompts"] / (relp["prompts"] - 1)
    )  # a bootstrap's variance is (n - 1) / n of it
    factor = stats.t.ppf(0.975, relp["prompts"] - 1)
    assert low == pytest.approx(max(-1, relp["value"] - factor * unbiased), rel=1e-6)

    halves = mi.load("bundled", dtype="bfloat16")  # circuits of another dtype in the same store are not the league's
    mi.run(mi.experiments.Circuit((found.runs["atp"],)), halves, prompts, store=str(tmp_path))
    after = mi.open_store(tmp_path).sql("SELECT * FROM method_league").set_index("method")
    assert after["cpr"].sort_index().tolist() == table["cpr"].sort_index().tolist()
    with pytest.raises(UserError, match=r"exact.* have scores that do not compare"):
        mi.run(mi.experiments.Circuit((found.runs["heads"], found.runs["atp"])), model, prompts, store=str(tmp_path))
    assert "relp" in str(found.summary)
    drawn = table_of(found.figure(), "measure")
    assert len(set(drawn["measure"])) == 9
    best = drawn[drawn["measure"] == "Spearman, of sizes"].set_index("method")["value"]
    assert best.to_dict() == pytest.approx(table.loc[best.index, "spearman_absolute"].to_dict(), rel=1e-3)
    told.clear()
    again = mi.league(model, prompts, **asked)
    assert again.id == found.id
    assert all(done == 0 for _, done in told)


@pytest.mark.bundled
def test_mistakes_of_a_league_are_told_before_anything_runs(tmp_path: Path) -> None:
    model = mi.load("bundled", device="cpu")
    with pytest.raises(UserError, match="has no distractor"):
        mi.league(model, mi.prompts("pairs", limit=4), store=str(tmp_path / "a"))
    with pytest.raises(UserError, match="no `methods`"):
        mi.league(model, mi.prompts("operand_pairs", limit=4), methods=[], store=str(tmp_path / "a"))
    with pytest.raises(UserError, match="`method` 'best' is not known"):
        mi.league(model, mi.prompts("operand_pairs", limit=4), methods=["best"], store=str(tmp_path / "a"))
    assert not (tmp_path / "a" / "runs").exists()


@pytest.mark.bundled
def test_the_command_prints_the_table_and_draws_it(tmp_path: Path, monkeypatch) -> None:
    place = cluster_run.place_of
    monkeypatch.setattr(cluster_run, "place_of", lambda model, stack, *_: place(model, stack, None, None, None))
    monkeypatch.setattr("mathinterp.cluster.ray_cluster.connection", lambda *_: nullcontext())
    given = [
        "league",
        "--limit",
        "4",
        "--methods",
        "atp,relp",
        "--store",
        str(tmp_path / "s"),
        "--out",
        str(tmp_path / "new"),
    ]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, result.output
    assert "Agreement with exact patching over 72 nodes, 4 prompts" in result.output
    assert len(list(tmp_path.glob("new/league-*.png"))) == 1


def test_bounds_of_what_is_not_known_are_not_known(tmp_path: Path) -> None:
    """A learned mask has no signs: its rank correlation is null, and was given an interval of -1 to 1."""
    (found,) = Store(tmp_path).rows(
        "SELECT within(NULL, -1, 1) AS none, within(1.2, -1, 1) AS high, within(-3, 0, 1) AS low"
    )
    assert found == {"none": None, "high": 1, "low": 0}
