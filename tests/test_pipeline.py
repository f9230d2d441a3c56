"""The pipeline: rankings compared by hand, every stage run and resumed without Ray, mistakes named before any work."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from mathinterp.cli.main import main
from mathinterp.cluster.dispatch import Outcome
from mathinterp.cluster.places import Here
from mathinterp.cluster.run import Work
from mathinterp.cluster.run import dispatch as dispatch_shards
from mathinterp.models.units import Head
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from mathinterp.workflows.pipeline_answer import described_heads
from tests.small_store import FINGERPRINT, fill, open_run, prompt

HEADS: list[Head] = [(layer, head) for layer in range(2) for head in range(6)]


# ---- rankings, by hand ----


def ablation_run(
    store: Store, lost: dict[Head, float], wrong: Sequence[Head] = (), ablation: str = "zero", **changes: Any
) -> str:
    """A head scan of one prompt: nats lost under each head, and the heads that make it wrong."""
    rows = [
        {"layer": layer, "head": head, "prompt_id": "a", "logprob": -0.5 - nats, "correct": (layer, head) not in wrong}
        for (layer, head), nats in lost.items()
    ]
    own = {"scoring": "token", "ablation": ablation}
    return fill(store, [prompt("a")], [{"prompt_id": "a"}], rows, parameters=own, **changes)


def table_run(store: Store, scan: str, tables: dict[str, list[dict[str, Any]]], **changes: Any) -> str:
    """A finished run of any scan with these rows; columns not given are 0."""
    run = open_run(store, [f"{name}/00000" for name in tables], scan=scan, **{"parameters": {"of": scan}, **changes})
    store.write_prompts(FINGERPRINT, [prompt("a")])
    for name, rows in tables.items():
        schema = catalog().tables[name].schema
        columns = {field.name: pa.array([row.get(field.name, 0) for row in rows]).cast(field.type) for field in schema}
        store.write_shard(run.run_id, name, 0, pa.table(columns, schema=schema), {})
    assert run.finish() == []
    return run.run_id


def path_run(store: Store, effects: dict[Head, float], first_order: dict[Head, float], **changes: Any) -> str:
    """A path scan of one pair, with an MLP that no ranking of heads may count."""
    same = {"node": "head", "prompt_id": "a"}
    scan = [{**same, "layer": x, "head": y, "effect": e, "logprob_change": 2 * e} for (x, y), e in effects.items()]
    scan = [{**row, "logit_original": 1.0} for row in scan]
    scan.append({**scan[0], "node": "mlp", "head": None, "effect": -9.0})
    estimates = [{**same, "layer": x, "head": y, "first_order": e} for (x, y), e in first_order.items()]
    return table_run(store, "paths", {"path_scan": scan, "attribution_scan": estimates}, **changes)


def agreement(store: Store, run: str, method: str, other: str, other_method: str) -> dict[str, Any]:
    rows = store.rows(
        f"""SELECT * FROM ranking_agreement WHERE run_id = '{run}' AND method = '{method}' AND other_run_id = '{other}'
            AND other_method = '{other_method}' AND operation = 'all'"""
    )
    assert len(rows) == 1
    return rows[0]


def mean_ranks(values: Sequence[float]) -> np.ndarray:
    """1 = largest; equal values share the mean of their places."""
    return np.array([np.mean([i + 1 for i, w in enumerate(sorted(values, reverse=True)) if w == v]) for v in values])


@pytest.mark.slow
def test_six_heads_by_hand(tmp_path: Path) -> None:
    store, six = Store(tmp_path), HEADS[:6]
    lost = ablation_run(store, dict(zip(six, (6.0, 5.0, 4.0, 3.0, 2.0, 1.0), strict=True)))
    paths = path_run(
        store,
        dict(zip(six, (-0.5, -0.6, -0.4, -0.3, 0.1, -0.2), strict=True)),
        dict(zip(six, (3.0, 2.0, 1.0, -1.0, -2.0, -3.0), strict=True)),
    )
    found = agreement(store, lost, "zero ablation, log-probability", paths, "path patching")
    assert found["heads"] == 6
    assert found["spearman"] == pytest.approx(1 - 6 * 4 / (6 * 35))  # ranks 1..6 against 2, 1, 3, 4, 6, 5
    assert (found["overlap_5"], found["chance_5"]) == (4, pytest.approx(25 / 6))
    assert (found["overlap_10"], found["chance_20"]) == (None, None)  # there are no ten heads
    back = agreement(store, paths, "path patching", lost, "zero ablation, log-probability")
    assert {k: v for k, v in found.items() if "run_id" not in k and "method" not in k} == {
        k: v for k, v in back.items() if "run_id" not in k and "method" not in k
    }
    within = agreement(store, paths, "path patching", paths, "first-order attribution")
    assert within["spearman"] == pytest.approx(1 - 6 * 66 / (6 * 35))  # 2, 1, 3, 4, 6, 5 against 6, ..., 1
    assert agreement(store, paths, "path patching", paths, "path patching, log-probability")["spearman"] == 1
    nothing = agreement(store, lost, "zero ablation", paths, "path patching")
    assert (nothing["spearman"], nothing["overlap_5"]) == (None, 4)  # every drop is 0: nats break the ties


@pytest.mark.slow
def test_equal_scores_share_their_rank_and_places_follow_the_tie_break(tmp_path: Path) -> None:
    store, rng = Store(tmp_path), np.random.default_rng(0)
    nats = dict(zip(HEADS, rng.permutation(12).astype(float), strict=True))
    wrong = HEADS[3:7]
    effects = dict(zip(HEADS, rng.permutation(12) - 20.0, strict=True))
    zero, paths = ablation_run(store, nats, wrong), path_run(store, effects, effects)
    found = agreement(store, zero, "zero ablation", paths, "path patching")
    drops = [float(head in wrong) for head in HEADS]
    ranks = mean_ranks(drops), mean_ranks([-effects[head] for head in HEADS])
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    by_drop = sorted(HEADS, key=lambda head: (head not in wrong, -nats[head]))
    by_effect = sorted(HEADS, key=lambda head: effects[head])
    for k in (5, 10):
        assert found[f"overlap_{k}"] == len({*by_drop[:k]} & {*by_effect[:k]})
        assert found[f"chance_{k}"] == pytest.approx(k * k / 12)


@pytest.mark.slow
def test_iterative_masking_orders_only_what_it_masked(tmp_path: Path) -> None:
    store = Store(tmp_path)
    steps = [HEADS[i] for i in (4, 0, 7, 2, 9)]
    rows = [
        {"step": step, "layer": layer, "head": head, "masked": (layer, head) == steps[step]}
        for step in range(5)
        for layer, head in HEADS
        if (layer, head) not in steps[:step]
    ]
    masking = table_run(store, "iterative", {"iterative_scan": rows})
    nats = ablation_run(store, {head: 20.0 - i for i, head in enumerate(HEADS)})
    found = agreement(store, masking, "iterative masking", nats, "zero ablation, log-probability")
    assert (found["heads"], found["spearman"], found["overlap_10"]) == (12, None, None)
    assert found["overlap_5"] == 3  # heads 4, 0 and 2 of the first five
    order = store.rows("SELECT layer, head FROM head_rankings WHERE method = 'iterative masking' AND score IS NOT NULL"
                       " ORDER BY score DESC")  # fmt: skip
    assert [(row["layer"], row["head"]) for row in order] == steps


@pytest.mark.slow
@pytest.mark.parametrize("effect", ["logit", "logprob"])
def test_a_path_scan_ranks_by_its_measure_and_by_log_probability_once(effect: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = path_run(store, dict.fromkeys(HEADS, 0.1), {}, parameters={"effect": effect})
    rows = store.rows(f"SELECT method, count(*) AS n FROM head_rankings WHERE run_id = '{run}' GROUP BY 1 ORDER BY 1")
    methods = ["path patching", "path patching, log-probability"][: 1 if effect == "logprob" else 2]
    assert rows == [{"method": method, "n": 2 * len(HEADS)} for method in methods]  # an operation, and all


@pytest.mark.slow
def test_only_runs_of_one_model_and_only_heads_of_both_are_compared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    some, rising = HEADS[2:9], {head: float(i) for i, head in enumerate(HEADS)}
    whole, part = ablation_run(store, rising), path_run(store, {head: rising[head] for head in some}, {})
    other = ablation_run(store, rising, ablation="mean", model_fingerprint="weights-2")
    found = agreement(store, whole, "zero ablation, log-probability", part, "path patching")
    assert (found["heads"], found["spearman"]) == (7, -1)  # ranked anew among the seven
    rows = store.rows("SELECT DISTINCT run_id, other_run_id FROM ranking_agreement")
    assert {frozenset((row["run_id"], row["other_run_id"])) for row in rows} == {
        frozenset((whole, part)),
        *(frozenset((run,)) for run in (whole, part, other)),
    }


@pytest.mark.slow
def test_described_heads_are_key_heads_of_any_operation_then_the_next(tmp_path: Path) -> None:
    effects = {head: 0.01 * i for i, head in enumerate(HEADS)} | {(1, 5): -0.2, (0, 3): -0.06, (1, 0): -0.04}
    store = Store(tmp_path)
    run = path_run(store, effects, effects)
    assert described_heads(store, run, 4) == ((1, 5), (0, 3), (1, 0), (0, 0))
    assert described_heads(store, run, 1) == ((1, 5), (0, 3))


# ---- every stage, in this process ----


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Shards run here, as a replica would run them; the scans that were, in order."""
    ran: list[str] = []

    def dispatch(work: Work, *arguments: Any) -> Outcome:
        ran.append(work.scan.name)
        return dispatch_shards(work, *arguments)

    monkeypatch.setattr("mathinterp.cluster.run.dispatch", dispatch)
    monkeypatch.setattr("mathinterp.cluster.run.place_of", lambda model, *_: Here(model))
    monkeypatch.setattr("mathinterp.cluster.ray_cluster.connection", lambda *_: nullcontext())
    return ran


def command(*words: object) -> Result:
    return CliRunner().invoke(main, ["pipeline", *map(str, words)])


@pytest.mark.bundled
def test_the_pipeline_runs_every_stage_once_and_answers_from_the_store(tmp_path: Path, without_ray: list[str]) -> None:
    words = ["--store", tmp_path, "--limit", "8", "--ks", "1,2", "--control-seeds", "1", "--top", "3"]
    first = command(*words)
    assert first.exit_code == 0, first.output
    assert without_ray == ["heads", "paths", "knockout", "knockout", "attention", "probe"]
    for part in ("of 64 heads (", "rank correlation", "they look at", "pairs: 100.0 % right", "rationals: ",
                 "closest to the answer's first token", "FROM ranking_agreement"):  # fmt: skip
        assert part in first.output
    again = command(*words, "--json")
    assert again.exit_code == 0, again.exception
    assert len(without_ray) == 6, "a finished stage was computed again"
    found = json.loads(again.stdout)
    store = Store(tmp_path)
    assert store.rows("SELECT DISTINCT status FROM runs") == [{"status": "finished"}]
    assert set(found["runs"]) == {"heads", "paths", "knockout pairs", "knockout rationals", "attention", "probe"}
    which, rankings, looks, holds, mlps = (next(iter(s["tables"].values())) for s in found["answer"])

    # Each number is that of the view it comes from.
    paths = store.rows(f"SELECT * FROM path_effects WHERE run_id = '{found['runs']['paths']}' AND node = 'head'")
    effects = {(f"{r['layer']}.{r['head']}", r["operation"]): r for r in paths}
    heads = store.rows(f"SELECT * FROM head_effects WHERE run_id = '{found['runs']['heads']}'")
    drops = {(f"{r['layer']}.{r['head']}", r["operation"]): r["drop"] for r in heads}
    assert len(which) >= 3
    for row in which:
        keys = [op for op in ("all", "add", "div", "mul", "sub") if effects[row["head"], op]["key"]]
        assert all(effects[row["head"], op]["mean"] < -0.05 for op in keys)
        assert row["key for"] == (", ".join(keys) or "-")
        for op in ("all", "add", "mul"):
            assert row[f"effect {op}"] == pytest.approx(effects[row["head"], op]["mean"])
            assert row[f"drop {op}"] == pytest.approx(drops[row["head"], op])
    assert [row["head"] for row in looks] == [row["head"] for row in which]
    for row in looks:
        kinds = ("bos", "operand_a", "operator", "operand_b", "equals", "other")
        assert sum(row[kind] or 0 for kind in kinds) == pytest.approx(1, abs=0.0001)
    assert [row["path patching against"] for row in rankings] == [
        "zero ablation", "zero ablation, log-probability", "first-order attribution", "path patching, log-probability"
    ]  # fmt: skip
    assert [(row["prompts"], row["k"]) for row in holds] == [
        (prompts, k) for prompts in ("pairs", "rationals") for k in (1, 2)
    ]
    out = store.rows(
        f"SELECT layer, head FROM knockout_heads WHERE run_id = '{found['runs']['knockout rationals']}'"
        " AND ranking = 'effect' AND k = 2 ORDER BY place"
    )
    ranked = sorted((r for r in paths if r["operation"] == "all"), key=lambda r: r["mean"])
    assert [(row["layer"], row["head"]) for row in out] == [(r["layer"], r["head"]) for r in ranked[:2]]
    assert [row["layer"] for row in mlps] == list(range(8))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--ks", "1,65"], ["cannot knock out 65 heads", "has 64"]),
        (["--transfer", "year_spans"], ["add-war_lasted-000", "none of the operators"]),
        (["--transfer", "no_such_set"], ["'no_such_set'"]),
        (["--ablation", "half"], ["--ablation", "'half' is not one of"]),
        (["--effect", "size"], ["--effect", "'size' is not one of"]),
        (["--control-seeds", "-1"], ["--control-seeds", "-1"]),
    ],
)
def test_mistakes_are_named_before_any_work(
    tmp_path: Path, without_ray: list[str], words: list[str], parts: list[str]
) -> None:
    assert_one_line(command("--store", tmp_path / "store", "--limit", "8", *words), *parts)
    assert without_ray == []
    assert not (tmp_path / "store").exists()


SUM = {"text": "3 plus 5 is", "answer": "8", "operation": "add", "operand_a": "3", "operand_b": "5"}


@pytest.mark.parametrize(
    ("words", "fields", "parts"),
    [
        (["scan", "paths"], {"counterfactual": "3 nothing 5 equals to"}, ["prompt '1'", "tokens"]),
        (["scan", "paths"], {"text": "3 and 5 is"}, ["prompt '1'", "none of the operators", "3 and 5 is"]),
        (["scan", "paths"], {"distractor": "8"}, ["prompt '1'", "'8' differs from the answer '8' in no token"]),
        (["pipeline", "--transfer", ""], {"distractor": "8"}, ["prompt '1'", "in no token that is scored"]),
        (["pipeline", "--transfer", ""], {"operand_b": "6"}, ["prompt '1'", "operand_b '6'"]),
        (["scan", "paths", "--receiver", "1.0.v", "--layers", "2"], {}, ["layer 2 is not before the receiver 1.0.v"]),
        (["scan", "paths", "--receiver", "1.9.q"], {}, ["head 1.9 does not exist", "0 to 7"]),
        (["scan", "attention", "--heads", "0.8"], {}, ["head 0.8 does not exist", "0 to 7"]),
        (["scan", "probe", "--layers", "8"], {}, ["layer 8 does not exist", "0 to 7"]),
        (["knockout", "--heads", "8.0"], {}, ["layer 8 does not exist"]),
        (["knockout", "--heads", "0.1", "--ks", "1,2"], {}, ["cannot knock out 2 heads", "the ranking has 1"]),
        (["scan", "iterative", "--steps", "65"], {}, ["cannot mask 65 heads", "there are 64"]),
        (["pipeline", "--transfer", "", "--ks", "65"], {}, ["cannot knock out 65 heads", "the ranking has 64"]),
    ],
)
def test_every_mistake_of_the_path_is_one_line_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], fields: dict[str, str], parts: list[str]
) -> None:
    monkeypatch.setattr("mathinterp.cluster.ray_cluster.connection", lambda *_: pytest.fail("Ray was started"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(SUM | fields) + "\n")
    result = CliRunner().invoke(main, [*words, "--prompts", str(prompts), "--store", str(tmp_path / "store")])
    assert_one_line(result, *parts)


def assert_one_line(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if not line.startswith("warning")]
    assert len(lines) == 1, result.stderr
    for part in ("mathinterp: ", *parts):
        assert part in lines[0]
