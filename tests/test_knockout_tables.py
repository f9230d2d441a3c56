"""A knock-out's curve, its summary and rankings of heads from earlier runs: the SQL, by hand."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.cluster.run import RunSummary
from mathinterp.errors import UserError
from mathinterp.experiments.base import Context
from mathinterp.experiments.finished_run import key_heads_from, ranking_from
from mathinterp.experiments.knockout import Knockout
from mathinterp.experiments.knockout.summary import _verdict, summarize
from mathinterp.experiments.knockout.tables import KNOCKOUT_HEADS
from mathinterp.experiments.results import Results
from mathinterp.store import Store
from tests.small_store import FINGERPRINT, fill, open_run, prompt, scores
from tests.statistics_twin import share_interval, share_of


def curve_store(
    folder: Path, scoring: str = "token", more: tuple[str, ...] = (), **parameters: str
) -> tuple[Store, str]:
    """Two operations; the ranking takes 8 units to 5 and 2, one random draw keeps 8, one falls to 6."""
    prompts = [prompt("a", "add", ("memorize",) * 3), prompt("b", "add"), prompt("c", "sub", ("memorize",) * 4)]
    units = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1), ("c", 2), ("c", 3)]
    right = {
        ("effect", 0, 1): [1, 1, 0, 1, 1, 1, 0, 0],
        ("effect", 0, 4): [0, 0, 0, 1, 1, 0, 0, 0],
        ("random", 0, 1): [1] * 8,
        ("random", 0, 4): [1] * 8,
        ("random", 1, 1): [1] * 8,
        ("random", 1, 4): [1, 1, 1, 1, 1, 1, 0, 0],
    }
    baseline = [{"prompt_id": p, "position": i, "logprob": -1.0} for p, i in units]
    rows = [
        {
            "ranking": ranking,
            "seed": seed,
            "k": k,
            "prompt_id": p,
            "position": i,
            "correct": bool(correct),
            "logprob": -3.0,
        }
        for (ranking, seed, k), values in right.items()
        for (p, i), correct in zip(units, values, strict=True)
    ]
    store = Store(folder)
    asked = {"ablation": "zero", "positions": "all", "ranking": ["0.1", "0.2"], "scoring": scoring, **parameters}
    run = open_run(store, ["baseline/00000", "knockout_scan/00000", *more], scan="knockout", parameters=asked)
    store.write_prompts(FINGERPRINT, prompts)
    store.write_shard(run.run_id, "baseline", 0, scores("baseline", baseline), {})
    store.write_shard(run.run_id, "knockout_scan", 0, scores("knockout_scan", rows), {})
    assert run.finish() == list(more)
    return store, run.run_id


def test_knockout_curve_by_hand(tmp_path: Path) -> None:
    store, run = curve_store(tmp_path)

    rows = store.rows(f"SELECT * FROM knockout_curve WHERE run_id = '{run}'")
    points = {(row["k"], row["operation"], row["ranking"], row["seed"]): row for row in rows}
    assert len(points) == len(rows) == 3 * 3 * 3

    def point(k: int, operation: str, ranking: str = "effect", seed: int = 0) -> dict[str, Any]:
        return points[k, operation, ranking, seed]

    assert [point(k, "add")["accuracy"] for k in (0, 1, 4)] == [1.0, 0.75, 0.25]
    assert [point(k, "sub")["accuracy"] for k in (0, 1, 4)] == [1.0, 0.5, 0.25]
    assert [point(k, "all")["accuracy"] for k in (0, 1, 4)] == [1.0, 0.625, 0.25]
    assert point(4, "all", "random", 1)["accuracy"] == 0.75
    assert (point(1, "add")["n"], point(1, "all")["n"], point(1, "add")["logprob"]) == (4, 8, -3.0)
    ends = share_interval([share_of([2, 1], [3, 1])])  # prompts a, b: n = 3, 1; hits 2, 1
    assert (point(1, "add")["low"], point(1, "add")["high"]) == pytest.approx(ends, abs=1e-9)
    assert point(0, "add")["low"] < 0.7, "two prompts, all right, do not prove that all are"
    assert point(0, "add")["high"] == 1
    assert point(1, "sub")["low"] == 0, "one prompt says nothing"


@pytest.mark.slow
def test_knockout_summary_by_hand(tmp_path: Path) -> None:
    store, _ = curve_store(tmp_path)
    rows = {row["operation"]: row for row in store.rows("SELECT * FROM knockout_summary")}
    assert {operation: row["halved_at"] for operation, row in rows.items()} == {"add": 4, "sub": 1, "all": 4}
    assert {row["control_halved_at"] for row in rows.values()} == {None}
    # gaps of 'all' at k = 0, 1, 4: 0, 1 - .625, .875 - .25
    area = 1 * (0 + 0.375) / 2 + 3 * (0.375 + 0.625) / 2
    assert rows["all"]["area_between"] == pytest.approx(area, abs=1e-12)
    assert rows["all"]["mean_gap"] == pytest.approx(area / 4, abs=1e-12)
    assert (rows["all"]["control"], rows["all"]["last_k"]) == ("random", 4)
    (band,) = store.rows("SELECT * FROM knockout_bands WHERE ranking = 'random' AND operation = 'all' AND k = 4")
    assert (band["seeds"], band["accuracy"], band["lowest"], band["highest"]) == (2, 0.875, 0.75, 1.0)


@pytest.mark.slow
def test_whole_answers_and_first_tokens_count_as_the_run_says(tmp_path: Path) -> None:
    for scoring, expected in (("exact_match", [0.5, 0.0]), ("first_token", [1.0, 1.0])):
        store, run = curve_store(tmp_path / scoring, scoring)
        rows = store.rows(
            f"""SELECT operation, accuracy FROM knockout_curve WHERE run_id = '{run}' AND ranking = 'effect' AND k = 1
                AND operation <> 'all' ORDER BY operation"""
        )
        assert [row["accuracy"] for row in rows] == expected


@pytest.mark.slow
def test_head_operations_shows_heads_that_serve_one_operation(tmp_path: Path) -> None:
    prompts = [prompt(f"{op}{i}", op) for op in ("add", "mul") for i in range(20)]
    ids = [p.prompt.prompt_id for p in prompts]
    wrong = {
        0: {"add0", "add1"},
        1: {"add0", "add1", "mul0", "mul1", "mul2"},
        2: {"add0"},
    }  # 5 points are not more than 5
    heads = [
        {"layer": 0, "head": head, "prompt_id": name, "correct": name not in names}
        for head, names in wrong.items()
        for name in ids
    ]
    store = Store(tmp_path)
    run = fill(store, prompts, [{"prompt_id": name} for name in ids], heads)
    rows = store.rows("SELECT * FROM head_operations ORDER BY head")
    assert [row["serves"] for row in rows] == ["add", None, None]
    assert [[round(row[c], 9) for c in ("add", "mul", "all")] for row in rows] == [
        [0.1, 0, 0.05],
        [0.1, 0.15, 0.125],
        [0.05, 0, 0.025],
    ]
    assert [row["sub"] for row in rows] == [None] * 3
    (effect,) = store.rows("SELECT q_value FROM head_effects WHERE head = 0 AND operation = 'add'")
    assert rows[0]["serves_q"] == effect["q_value"]
    assert ranking_from(store, run) == ((0, 1), (0, 0), (0, 2))
    assert ranking_from(store, run, "add")[:2] == ((0, 0), (0, 1)), "ties go to the lower head"
    assert ranking_from(store, run, "mul")[0] == (0, 1)
    assert key_heads_from(store, run) == ((0, 1),), "12.5 points over all operations; 5 are not more than 5"
    assert key_heads_from(store, run, "add") == ((0, 0), (0, 1))
    assert key_heads_from(store, run, "mul") == ((0, 1),)


@pytest.mark.slow
def test_a_head_that_only_one_operation_needs_is_a_key_head_if_that_is_sure(tmp_path: Path) -> None:
    prompts = [prompt(f"{op}{i}", op) for op in ("add", "sub", "mul", "div") for i in range(100)]
    ids = [p.prompt.prompt_id for p in prompts]
    wrong = {0: {f"mul{i}" for i in range(16)}, 1: {f"div{i}" for i in range(4)}, 2: set()}
    heads = [
        {"layer": 0, "head": head, "prompt_id": name, "correct": name not in names}
        for head, names in wrong.items()
        for name in ids
    ]
    store = Store(tmp_path)
    run = fill(store, prompts, [{"prompt_id": name} for name in ids], heads)
    (row,) = store.rows("SELECT drop FROM head_effects WHERE head = 0 AND operation = 'all'")
    assert row["drop"] < 0.05
    assert key_heads_from(store, run) == ((0, 0),)


def test_a_run_that_ranks_no_heads(tmp_path: Path) -> None:
    store, run = curve_store(tmp_path)
    for wanted, operation, message in (
        ("none", "all", "no run 'none'"),
        (run, "all", "ranks no heads"),
        (open_run(store).run_id, "all", "0 of 2 shards"),
    ):
        with pytest.raises(UserError, match=message):
            ranking_from(store, wanted, operation)


@pytest.mark.slow
def test_a_path_scan_ranks_by_the_most_negative_effect_of_its_heads(tmp_path: Path) -> None:
    effects = {("head", 0, 1): -0.2, ("head", 1, 0): -0.6, ("head", 1, 1): 0.3, ("mlp", 1, None): -0.9}
    measures = ("logit_original", "logit_patched", "probability_change", "centred_change")
    rows = [
        {"node": node, "layer": layer, "head": head, "prompt_id": name, "effect": effect, "logprob_change": 0.0}
        | dict.fromkeys(measures, 1.0)
        for (node, layer, head), effect in effects.items()
        for name in ("a", "b")
    ]
    store = Store(tmp_path)
    run = open_run(store, ["path_scan/00000"], scan="paths")
    store.write_prompts(FINGERPRINT, [prompt("a", "add"), prompt("b", "sub")])
    store.write_shard(run.run_id, "path_scan", 0, scores("path_scan", rows), {})
    assert run.finish() == []
    assert ranking_from(store, run.run_id) == ((1, 0), (0, 1), (1, 1))
    assert key_heads_from(store, run.run_id) == ((0, 1), (1, 0))
    with pytest.raises(UserError, match="no effects of heads for operation 'div'"):
        ranking_from(store, run.run_id, "div")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["heads", "rank_from"])
def test_named_and_key_heads_are_kept_out_of_the_controls(source: str, tmp_path: Path) -> None:
    ids = [f"add{i}" for i in range(20)]
    heads = [
        {"layer": 0, "head": head, "prompt_id": name, "correct": number >= wrong}
        for head, wrong in enumerate((3, 9, 0, 1))  # of 20
        for number, name in enumerate(ids)
    ]
    store = Store(tmp_path)
    run = fill(store, [prompt(name, "add") for name in ids], [{"prompt_id": name} for name in ids], heads)
    asked = Knockout(rank_from=run, ks=(1,)) if source == "rank_from" else Knockout(heads="0.1,0.0,0.3", ks="1")
    bound = asked.bind(Context(None, (), store))
    assert bound.ranking[:2] == ((0, 1), (0, 0))
    assert sorted(bound.key_heads) == ([(0, 0), (0, 1)] if source == "rank_from" else [(0, 0), (0, 1), (0, 3)])
    assert bound.bind(Context(None, (), store)) == bound


@pytest.mark.slow
def test_layer_matched_heads_of_other_layers_are_told(tmp_path: Path) -> None:
    store, run = curve_store(tmp_path, more=("knockout_heads/00000",))
    rows = [("effect", 1, [(0, 0)]), ("random_layer", 1, [(0, 1)]), ("effect", 2, [(0, 0), (0, 2)])]
    rows.append(("random_layer", 2, [(0, 1), (1, 0)]))
    table = [
        {"ranking": ranking, "seed": 0, "k": k, "place": place, "layer": layer, "head": head}
        for ranking, k, heads in rows
        for place, (layer, head) in enumerate(heads, start=1)
    ]
    store.write_shard(run, "knockout_heads", 0, pa.Table.from_pylist(table, KNOCKOUT_HEADS), {})
    told = "random_layer: 1 of 2 heads come from other layers, because too few non-key heads are left in their own"
    assert told in summarize(Results(Store(tmp_path), run)).warnings


@pytest.mark.slow
@pytest.mark.parametrize("ablation", ["mean", "zero"])
def test_the_command_warns_of_means_over_few_prompts(
    ablation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run_id = curve_store(tmp_path, ablation=ablation, positions="end")  # two sums and one difference
    done = RunSummary(run_id, store.url, 2, 2, 0, 0, 0, 0.1, None, 0, 0, 0.0, 0)
    monkeypatch.setattr("mathinterp.cli.experiment.run_chosen", lambda chosen, **options: done)
    words = ["knockout", "--heads", "0.1,0.2", "--ablation", ablation, "--store", store.url]
    shown, told = (CliRunner().invoke(main, [*words, *json_flag]) for json_flag in ([], ["--json"]))
    assert (shown.exit_code, told.exit_code) == (0, 0), shown.output
    lines = [line for line in shown.stderr.splitlines() if line.startswith("warning: mean ablation: 3 of 3 prompts")]
    warnings = json.loads(told.stdout)["warnings"]
    assert any(line.startswith("rough figures: under 12 prompts") for line in warnings)
    assert len(lines) == len(warnings) - 1 == (ablation == "mean")


def test_the_verdict_says_on_which_side_random_heads_are():
    row = {"operation": "all", "control": "random", "halved_at": 2, "control_halved_at": None, "up to k": 4}
    for gap, said in ((-0.019, "1.9 points below it"), (0.2, "20.0 points above it")):
        assert said in _verdict([{"k": 4}], [{**row, "mean gap": gap}])
