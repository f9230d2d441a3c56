"""Mask and keep: tables by hand from stored rows, the neurons that a scan ranked, and the command itself."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.experiments.mask_keep import MaskKeepShown
from mathinterp.experiments.mask_keep.ranked import neurons_from
from mathinterp.experiments.mask_keep.summary import summarize
from mathinterp.experiments.neurons import Neurons
from mathinterp.experiments.neurons.stored import neuron_run
from mathinterp.experiments.results import Results
from mathinterp.models.anatomy import Anatomy
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from mathinterp.workflows.papers.queries import mask_keep
from tests.made_prompts import PROMPTS as MADE
from tests.neuron_store import stored_scan
from tests.small_store import FINGERPRINT, open_run
from tests.statistics_twin import Part, Unit, effects_by_operation, part_of, score_interval, student_interval
from tests.tiny import tiny_model

# ---- the views ----


KS, SEEDS = (3, 7), 2
Point = tuple[str, str, int, int]  # mode, ranking, seed, k
POINTS: list[Point] = [
    (mode, ranking, seed, k)
    for mode in ("mask", "keep")
    for ranking, seed in (("top", 0), *(("random", seed) for seed in range(SEEDS)))
    for k in KS
]


def small_store(folder: Path, **other_model: str) -> tuple[Store, str, str]:
    """A neuron run of a tiny model, and a mask/keep run whose answers are drawn: right in 80 %, then less often."""
    model, scan = Anatomy(tiny_model("llama")), Neurons("head:0.1", keep="topk:9")
    state = scan.prepare(Subject(model, MADE))
    parts: dict[str, list[pa.Table]] = {}
    for shard in scan.shards(model.shape, MADE):
        parts.setdefault(shard.table, []).append(scan.run(state, shard))
    store, rng = Store(folder), np.random.default_rng(1)
    # what a random model says is never right: let the head's ablation flip two prompts of three
    targets = pa.concat_tables(parts["neuron_targets"])
    correct = [row["condition"] == "original" or i % 3 == 0 for i, row in enumerate(targets.to_pylist())]
    parts["neuron_targets"] = [targets.set_column(targets.schema.names.index("correct"), "correct", pa.array(correct))]
    source = open_run(store, [f"{table}/00000" for table in parts], scan="neurons", parameters=scan.parameters())
    store.write_prompts(FINGERPRINT, MADE)
    for table, tables in parts.items():
        store.write_shard(source.run_id, table, 0, pa.concat_tables(tables), {})
    source.finish()

    def token_rows(right: float) -> list[dict[str, Any]]:
        return [
            {
                "prompt_id": p.prompt.prompt_id, "position": token.position, "correct": bool(rng.random() < right),
                "logprob": float(-rng.random()), "logit": 1.0, "predicted_id": 5,
            }
            for p in MADE
            for token in p.scored
        ]  # fmt: skip

    run = open_run(
        store, ["baseline/00000", "maskkeep_scan/00000"], scan="maskkeep",
        parameters={"neurons_from": source.run_id, "ks": list(KS)}, **other_model,
    )  # fmt: skip
    named = [
        {"mode": mode, "ranking": ranking, "seed": seed, "k": k, **row}
        for mode, ranking, seed, k in POINTS
        for row in token_rows(0.3 if ranking == "top" else 0.6)
    ]
    for table, rows in (("baseline", token_rows(0.8)), ("maskkeep_scan", named)):
        store.write_shard(run.run_id, table, 0, pa.Table.from_pylist(rows, catalog().tables[table].schema), {})
    run.finish()
    return store, run.run_id, source.run_id


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str, str]:
    return small_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def units(filled: tuple[Store, str, str]) -> dict[Point, list[Unit]]:
    """Every point's answer tokens."""
    rows = filled[0].rows(
        """SELECT mode, ranking, seed, k, prompt_id, position, operation, b.correct AS b, s.correct AS s,
               b.logprob AS bl, s.logprob AS sl
           FROM maskkeep_scan AS s JOIN baseline AS b USING (run_id, prompt_id, position)
           JOIN prompts USING (prompt_id)"""
    )
    found: dict[Point, list[Unit]] = {point: [] for point in POINTS}
    for r in rows:
        unit = Unit(r["prompt_id"], r["position"], r["operation"], r["b"], r["s"], r["bl"], r["sl"])
        found[r["mode"], r["ranking"], r["seed"], r["k"]].append(unit)
    return found


@pytest.fixture(scope="module")
def flips(filled: tuple[Store, str, str]) -> set[str]:
    rows = filled[0].rows("SELECT prompt_id FROM neuron_targets WHERE condition = 'intervened' AND NOT correct")
    return {row["prompt_id"] for row in rows}


@pytest.fixture(scope="module")
def effects(filled: tuple[Store, str, str]) -> list[dict[str, Any]]:
    return filled[0].rows("FROM maskkeep_effects")


def of_prompts(found: Sequence[Unit], scoring: str) -> dict[str, tuple[str, int, int, int]]:
    """Prompt -> operation, units, units right before, units right after."""
    prompts: dict[str, list[Unit]] = {}
    for unit in found:
        if scoring != "first_token" or unit.position == 0:
            prompts.setdefault(unit.prompt_id, []).append(unit)
    whole = scoring == "exact_match"
    count = all if whole else sum
    return {
        name: (
            tokens[0].operation,
            1 if whole else len(tokens),
            int(count(t.baseline_correct for t in tokens)),
            int(count(t.correct for t in tokens)),
        )
        for name, tokens in prompts.items()
    }


def slow_decrease(prompts: dict[str, tuple[str, int, int, float]]) -> tuple[float, float | None]:
    """Relative decrease of the mean accuracies over operations, and its variance, prompt by prompt."""
    operations = sorted({operation for operation, *_ in prompts.values()})
    groups = [[p for p in prompts.values() if p[0] == operation] for operation in operations]
    before = np.mean([sum(h for _, _, h, _ in group) / sum(n for _, n, _, _ in group) for group in groups])
    after = np.mean([sum(a for _, _, _, a in group) / sum(n for _, n, _, _ in group) for group in groups])
    decrease, variance = (before - after) / before, 0.0
    for group in groups:
        total, u = sum(n for _, n, _, _ in group), [h - a - decrease * h for _, _, h, a in group]
        rest = [ui - sum(u) / total * n for ui, (_, n, _, _) in zip(u, group, strict=True)]
        if len(group) < 2:
            return decrease, None
        variance += len(group) / (len(group) - 1) * sum(r * r for r in rest) / total**2
    return decrease, variance / (len(groups) * before) ** 2


def slow_interval(
    prompts: dict[str, tuple[str, int, int, float]], decrease: float, variance: float | None
) -> tuple[float, float]:
    """The wider of Student's t and the score interval of the drop, over the baseline accuracy."""
    groups = [[p for p in prompts.values() if p[0] == name] for name in sorted({name for name, *_ in prompts.values()})]
    before = float(np.mean([sum(h for _, _, h, _ in group) / sum(n for _, n, _, _ in group) for group in groups]))
    parts: list[Part] = []
    for group in groups:
        lost = [h - a for _, _, h, a in group]
        parts.append(part_of([max(x, 0) for x in lost], [max(-x, 0) for x in lost], [n for _, n, _, _ in group]))
    low, high = (bound / before for bound in score_interval(parts))
    if variance is None:
        return low, high
    wide = student_interval(decrease, variance, min(len(group) for group in groups))
    return min(low, wide[0]), max(high, wide[1])


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["token", "first_token", "exact_match"])
@pytest.mark.parametrize("cases", ["correct", "flipped", "all"])
def test_decreases_and_intervals_by_hand(
    units: dict[Point, list[Unit]], effects: list[dict], flips: set[str], cases: str, scoring: str
) -> None:
    chosen = [row for row in effects if (row["cases"], row["scoring"]) == (cases, scoring)]
    found = {(r["mode"], r["ranking"], r["seed"], r["k"], r["operation"]): r for r in chosen}
    assert len(found) == len(chosen) == 3 * (len(POINTS) + 2 * 2 * len(KS))  # add, sub, all; random and excess
    counted = {}
    for point in POINTS:
        prompts = of_prompts(units[point], scoring)
        if cases != "all":
            prompts = {name: p for name, p in prompts.items() if p[1] == p[2] and (cases == "correct" or name in flips)}
        counted[point] = prompts
    for mode in ("mask", "keep"):
        for k in KS:
            top, draws = counted[mode, "top", 0, k], [counted[mode, "random", seed, k] for seed in range(SEEDS)]
            lost = {name: np.mean([draw[name][2] - draw[name][3] for draw in draws]) for name in top}
            curves: dict[Any, dict[str, tuple[str, int, int, float]]] = {
                ("top", 0): top,
                **{("random", seed): draw for seed, draw in enumerate(draws)},
                ("random", None): {name: (o, n, h, h - lost[name]) for name, (o, n, h, _) in top.items()},
                ("excess", None): {name: (o, n, h, a + lost[name]) for name, (o, n, h, a) in top.items()},
            }
            for (ranking, seed), prompts in curves.items():
                for operation in ("add", "sub", "all"):
                    part = {name: p for name, p in prompts.items() if operation in (p[0], "all")}
                    row = found[mode, ranking, seed, k, operation]
                    decrease, variance = slow_decrease(part)
                    low, high = slow_interval(part, decrease, variance)
                    high = high if ranking == "excess" else min(high, 1.0)  # no more than all of the accuracy
                    assert (row["prompts"], row["n"]) == (len(part), sum(n for _, n, _, _ in part.values()))
                    assert row["decrease"] == pytest.approx(decrease, abs=1e-12)
                    assert (row["low"], row["high"]) == pytest.approx((low, high), abs=1e-8)
                    assert (row["accuracy"] is None) == (ranking == "excess")


def test_decrease_of_correct_cases_is_the_drop_of_the_ablation_scans(
    units: dict[Point, list[Unit]], effects: list[dict]
) -> None:
    """Their accuracy is 1, so the relative decrease, its interval (at least) and the mean are those of a drop."""
    for point, every in units.items():
        right = {name for name, (_, n, before, _) in of_prompts(every, "token").items() if n == before}
        expected = effects_by_operation([unit for unit in every if unit.prompt_id in right])
        which = ("correct", "token", *point)
        rows = [
            r for r in effects if tuple(r[c] for c in ("cases", "scoring", "mode", "ranking", "seed", "k")) == which
        ]
        assert len(rows) == 3
        for row in rows:
            effect = expected[row["operation"]]
            assert row["decrease"] == pytest.approx(effect.drop, abs=1e-9)
            low, high = effect.interval
            assert row["low"] < low + 1e-8
            assert row["high"] > high - 1e-8
            assert row["logprob_change"] == pytest.approx(effect.logprob_change)


@pytest.mark.slow
def test_coef_is_the_mean_shrinking_of_the_first_neurons_coefficients(
    filled: tuple[Store, str, str], effects: list[dict]
) -> None:
    store, run, source = filled
    connected = store.connect("neuron_changes", "maskkeep_cases", "paper_a_table5")

    def rows(sql: str) -> list[dict[str, Any]]:
        return connected.sql(sql).to_arrow_table().to_pylist()

    changes = rows(f"FROM neuron_changes WHERE run_id = '{source}'")
    every_case = rows(f"FROM maskkeep_cases WHERE run_id = '{run}'")
    table = rows(f"FROM paper_a_table5 WHERE run_id = '{run}'")
    assert len(table) == 3 * 3 * 3 * len(KS)  # cases, scorings, operations
    for row in table:
        at = {name: row[name] for name in ("cases", "scoring")}
        counted, means = {c["prompt_id"] for c in every_case if at.items() <= c.items()}, []
        for operation in ("add", "sub"):
            pairs = [
                (r["coefficient"], r["intervened_coefficient"])
                for r in changes
                if r["rank"] <= row["k"] and r["prompt_id"] in counted and r["operation"] == operation
            ]
            c, changed = np.array(pairs, np.float64).T
            if row["operation"] in (operation, "all"):
                means.append(np.mean((c - changed) * np.sign(c)) / np.mean(np.abs(c)))
        assert row["coef"] == pytest.approx(np.mean(means), rel=1e-6)
        at |= {"k": row["k"], "operation": row["operation"]}
        for mode in ("mask", "keep"):
            for ranking, column in (("top", mode), ("random", f"{mode}_random")):
                wanted = {**at, "mode": mode, "ranking": ranking, "seed": 0 if ranking == "top" else None}
                (effect,) = [effect for effect in effects if wanted.items() <= effect.items()]
                assert row[column] == pytest.approx(effect["decrease"])


@pytest.mark.slow
def test_in_the_tuned_model_the_other_side_is_the_original(tmp_path: Path) -> None:
    store, run, _ = small_store(tmp_path, model_fingerprint="tuned")
    counted = "SELECT count(*) FROM maskkeep_cases WHERE cases = 'flipped'"  # the original is never wrong here
    assert store.rows(f"SELECT other_side, ({counted}) AS n FROM maskkeep_runs") == [{"other_side": "original", "n": 0}]
    assert summarize(Results(store, run), MaskKeepShown("flipped")).data["verdict"].startswith("No prompt counts")


@pytest.mark.slow
def test_summary_shows_the_table_and_says_what_random_neurons_cost(
    filled: tuple[Store, str, str], effects: list[dict]
) -> None:
    store, run, _ = filled
    found = summarize(Results(store, run), MaskKeepShown())
    assert [row["k"] for row in found.data["table"]] == [7, 3]
    shown = {"cases": "correct", "scoring": "token", "operation": "all", "mode": "mask"}
    rows = {(r["ranking"], r["seed"], r["k"]): r["decrease"] for r in effects if shown.items() <= r.items()}
    draws = [rows["random", seed, 7] for seed in range(SEEDS)]
    assert found.data["table"][0]["mask random"] == pytest.approx(np.mean(draws))
    assert [found.data["table"][0][f"mask {end}"] for end in ("least", "most")] == [min(draws), max(draws)]
    assert f"Zeroing each prompt's first 3 neurons costs {100 * rows['top', 0, 3]:.1f} %" in found.data["verdict"]
    assert store.rows(found.queries[0]), "the query that is shown gives nothing"


@pytest.mark.slow
def test_each_prompts_neurons_come_in_its_rankings_order(filled: tuple[Store, str, str]) -> None:
    store, _, source = filled
    prompts, run = [MADE[5].prompt, MADE[2].prompt], neuron_run(store, source)
    found = neurons_from(store, run, prompts, 6)
    assert found.prompt_ids == ("p5", "p2")
    ranks = store.rows("SELECT prompt_id, layer, neuron FROM neuron_changes WHERE rank <= 6 ORDER BY rank")
    for row, prompt_id in enumerate(found.prompt_ids):
        expected = [(r["layer"], r["neuron"]) for r in ranks if r["prompt_id"] == prompt_id]
        assert list(zip(found.layer_PR[row].tolist(), found.neuron_PR[row].tolist(), strict=True)) == expected
    with pytest.raises(UserError, match="ranks 9 neurons of a prompt, and 10 are asked"):
        neurons_from(store, run, prompts, 10)
    with pytest.raises(UserError, match=r"without prompt 'p5' \('other'\)"):
        neurons_from(store, run, [replace(MADE[5].prompt, text="other")], 6)


# ---- the command ----


def command(*words: str | int | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


@pytest.mark.slow
def test_mistakes_are_one_line(filled: tuple[Store, str, str]) -> None:
    store, run, source = filled
    for words, message in (
        (["--from", "nosuch"], "no run 'nosuch'"),
        (["--from", run], "is a scan of maskkeep, which ranks no neurons; take one of 'neurons'"),
        (["--from", source], f"run {source} ranked the neurons of m, not of bundled"),
        (["--from", source, "--ks", "5,x"], "--ks '5,x' cannot be read"),
        (
            ["--from", source, "--cases", "some"],
            "'--cases': 'some' is not one of 'correct', 'flipped', 'all'",
        ),
        (["--from", source, "--scoring", "some"], "'--scoring': 'some' is not one of"),
        (["--from", source, "--deep-layers", "x"], "cannot be read"),
    ):
        result = command("maskkeep", "--store", store.url, *words)
        assert result.exit_code == 2, result.output
        assert len(result.stderr.strip().splitlines()) == 1
        assert message in result.stderr


@pytest.mark.ray
def test_command_runs_once_and_refuses_other_prompts(tmp_path: Path) -> None:
    made = stored_scan(tmp_path)
    words = ["maskkeep", "--from", made.run_id, "--model", made.folder, "--store", made.store.url, "--json"]
    words += ["--cases", "all", "--control-seeds", "1", "--replicas", "1"]
    first = command(*words, "--ks", "9,4", "--limit", 8)
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert (found["shards_done"], found["failed"]) == (6, [])  # baseline, neurons, two modes x (top, random)
    assert [row["k"] for row in found["table"]] == [9, 4]
    again = json.loads(command(*words, "--ks", "4,9", "--limit", 8).stdout)
    assert (again["run_id"], again["shards_reused"], again["shards_done"]) == (found["run_id"], 6, 0)
    for row, before in zip(again["table"], found["table"], strict=True):  # sums in SQL may differ in the last digit
        assert row == pytest.approx(before)
    stored = made.store.rows(
        "SELECT layer, neuron FROM maskkeep_neurons WHERE ranking = 'top' ORDER BY prompt_id, place"
    )
    ranked_first = made.store.rows(
        "SELECT layer, neuron FROM neuron_changes WHERE rank <= 9"
        " AND prompt_id IN (SELECT prompt_id FROM maskkeep_scan) ORDER BY prompt_id, rank"
    )
    assert stored == ranked_first
    assert len(stored) == 8 * 9
    for wrong, message in (
        (["--ks", "21", "--limit", 8], "and 21 are asked for; give smaller --ks, or scan neurons with --keep topk:21"),
        (["--ks", "4", "--limit", 16], "give its --prompts, --limit and --seed, or a smaller --limit"),
    ):
        result = command(*words, *wrong)
        assert result.exit_code == 2, result.output
        assert message in result.stderr


def test_a_reproduction_counts_the_prompts_of_the_smallest_operation(filled):
    store, run, _ = filled
    counts = Counter(item.prompt.operation for item in MADE)
    rows = store.rows(mask_keep("run", "all"), {"run": run})
    assert len(rows) == 5 * len(KS)
    assert {row["n"] for row in rows} == {min(counts.values())}
    assert min(counts.values()) < len(MADE)
