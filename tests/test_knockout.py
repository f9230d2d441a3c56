"""Knock-out: head sets in float64 against slow twins, controls, curves by hand in SQL, and the command itself."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from mathinterp.cli.main import main
from mathinterp.cluster.ray_cluster import connection
from mathinterp.errors import UserError
from mathinterp.forward.edits import Edit, Replacement
from mathinterp.forward.hooks import edited_input, zeroed_columns
from mathinterp.forward.knockout import (
    NO_HEADS,
    HeadSet,
    PackedHeadSets,
    PlainHeadSets,
    head_sets,
    next_token_probabilities,
)
from mathinterp.forward.plain import PlainEngine
from mathinterp.forward.replay import PackedEngine
from mathinterp.forward.scores import Scores, answers_of
from mathinterp.models.anatomy import Anatomy, model_shape
from mathinterp.report.figures import draw
from mathinterp.report.knockout import ranking_from
from mathinterp.scans.base import Subject
from mathinterp.scans.controls import Head, layer_matched_heads, random_heads
from mathinterp.scans.heads import chosen_heads
from mathinterp.scans.iterative import IterativeScan, operation_means
from mathinterp.scans.knockout import KnockoutScan, Sentence
from mathinterp.store import Store
from mathinterp.store.statistics import Unit, effects_by_operation
from tests import test_scans
from tests.small_store import FINGERPRINT, fill, open_run, prompt, scores
from tests.test_forward import EXACT, PROMPTS, anatomy, assert_same, one_at_a_time, random_prompts
from tests.tiny import save_tiny, tiny_config, tiny_tokenizer

assert anatomy  # the fixture: every tiny family in float64

SETS: list[HeadSet] = [
    frozenset({(1, 0), (1, 3)}),
    frozenset({(0, 1), (1, 2), (2, 0), (2, 3)}),
    NO_HEADS,
    frozenset({(2, 1)}),
]


def zeros(anatomy: Anatomy) -> dict[int, Replacement]:
    return {layer: Replacement.zero(anatomy, "head", layer) for layer in range(anatomy.shape.n_layers)}


def resampled(anatomy: Anatomy) -> dict[int, Replacement]:
    """Values of another prompt at END, per prompt: what mean and resample ablation look like to an engine."""
    others = random_prompts()[::-1]
    source, prompt_n = PlainEngine(anatomy, others), np.arange(len(PROMPTS))
    ends, other_ends = (np.array([p.end for p in prompts]) for prompts in (PROMPTS, others))
    return {
        layer: Replacement(source.token_values("head", layer, prompt_n, other_ends), prompt_n, ends)
        for layer in range(anatomy.shape.n_layers)
    }


def packed_engine(anatomy: Anatomy) -> PackedEngine:
    """Several groups, several batches; nodes from END on are each prompt's own."""
    return PackedEngine(anatomy, PROMPTS, private_from=[p.end for p in PROMPTS], max_tokens=300, edits_per_batch=2)


def test_a_set_over_layers_equals_zeroed_columns_of_all_its_heads(anatomy: Anatomy) -> None:
    clean = one_at_a_time(anatomy, PROMPTS)
    packed = PackedHeadSets(packed_engine(anatomy)).run_sets(SETS, zeros(anatomy))
    for row, heads in enumerate(SETS):
        with ExitStack() as zeroed:
            for layer, head in heads:
                zeroed.enter_context(zeroed_columns(anatomy, layer, head))
            expected = one_at_a_time(anatomy, PROMPTS)
        np.testing.assert_allclose(packed.logprob_EA[row], expected, **EXACT)
        assert (np.abs(expected - clean).max() > 1e-6) == bool(heads), "a set of heads did nothing"


def test_a_set_in_one_layer_equals_the_engine_that_edits_one_layer(anatomy: Anatomy) -> None:
    engine = packed_engine(anatomy)
    for replacements in (zeros(anatomy), resampled(anatomy)):
        for layer in range(anatomy.shape.n_layers):
            edit = Edit.heads_of(layer, [0, 2])
            expected = engine.run_edits(layer, [edit], replacements[layer])
            heads: HeadSet = frozenset({(layer, 0), (layer, 2)})
            assert_same(PackedHeadSets(engine).run_sets([heads], replacements), expected)


def test_packed_sets_equal_plain_ones_and_no_head_is_clean(anatomy: Anatomy) -> None:
    engine = packed_engine(anatomy)
    packed, plain = head_sets(engine), head_sets(PlainEngine(anatomy, PROMPTS, batch_size=7))
    assert isinstance(packed, PackedHeadSets)
    assert isinstance(plain, PlainHeadSets)
    for replacements in (zeros(anatomy), resampled(anatomy)):
        scores = packed.run_sets(SETS, replacements)
        assert_same(scores, plain.run_sets(SETS, replacements))
        row = SETS.index(NO_HEADS)
        np.testing.assert_allclose(scores.logprob_EA[row], engine.baseline().logprob_EA[0], **EXACT)


def test_a_cached_base_changes_no_number(anatomy: Anatomy) -> None:
    base: HeadSet = frozenset({(0, 1), (1, 2)})
    sets: list[HeadSet] = [base | {(layer, head)} for layer in (2, 0, 1) for head in (0, 3)] + [base]
    engine = packed_engine(anatomy)
    runner = PackedHeadSets(engine)
    residual = engine.residual_LPND.clone()
    for replacements in (zeros(anatomy), resampled(anatomy)):
        cached = runner.run_sets(sets, replacements, base)
        assert_same(cached, runner.run_sets(sets, replacements))
        assert_same(cached, PlainHeadSets(anatomy, PROMPTS).run_sets(sets, replacements))
    assert torch.equal(engine.residual_LPND, residual), "the engine's own cache was overwritten"


def test_nothing_stays_hooked_and_nan_names_heads_and_prompt(anatomy: Anatomy) -> None:
    zero = zeros(anatomy)
    prompt_n = np.array([3])
    broken = Replacement(torch.full_like(zero[1].values, torch.nan)[None], prompt_n, np.array([PROMPTS[3].end]))
    runner = PackedHeadSets(packed_engine(anatomy))
    with pytest.raises(FloatingPointError, match=r"heads 0\.1, 1\.2 edited: log-probability of prompt 3 is nan"):
        runner.run_sets([frozenset({(0, 1), (1, 2)})], {**zero, 1: broken})
    for layer in range(anatomy.shape.n_layers):
        assert not anatomy.output_projection(layer)._forward_pre_hooks
    with pytest.raises(AssertionError, match="no replacement for layers"):
        runner.run_sets([frozenset({(2, 1)})], {0: zero[0]})


def test_next_token_probabilities_are_the_models_own(anatomy: Anatomy) -> None:
    ids, heads = PROMPTS[0].fed, frozenset({(0, 1), (2, 0)})
    zero = {layer: torch.zeros(4 * anatomy.shape.d_head, dtype=torch.float64) for layer in range(3)}
    with zeroed_columns(anatomy, 0, 1), zeroed_columns(anatomy, 2, 0):
        expected = anatomy.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    found = next_token_probabilities(anatomy, ids, heads, zero, end_only=False)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    at_end = next_token_probabilities(anatomy, ids, heads, zero, end_only=True)
    assert (at_end - found).abs().max() > 1e-6


# ---- controls ----

EVERY = [(layer, head) for layer in range(4) for head in range(8)]


def test_random_heads_are_never_key_heads_and_seeds_differ() -> None:
    key = [(0, 3), (2, 1), (2, 2), (3, 7)]
    draws = [random_heads(EVERY, key, seed) for seed in range(50)]
    assert all(len(set(drawn)) == 4 and not set(drawn) & set(key) for drawn in draws)
    assert len({tuple(drawn) for drawn in draws}) > 45
    assert {head for drawn in draws for head in drawn} == set(EVERY) - set(key), "some head is never drawn"
    assert random_heads(EVERY, key, 7) == draws[7]
    assert set(random_heads(EVERY, key[:2], 3)) < {*random_heads(EVERY, key, 3), *key}, "curves of one seed are nested"
    with pytest.raises(AssertionError, match="leave only 15 others"):
        random_heads(EVERY, EVERY[:17], 0)


def test_layer_matched_heads_have_the_layers_of_the_key_heads() -> None:
    key = [(0, 3), (2, 1), (2, 2), (3, 7)]
    for seed in range(20):
        drawn = layer_matched_heads(EVERY, key, seed)
        assert [layer for layer, _ in drawn] == [0, 2, 2, 3]
        assert not set(drawn) & set(key)
    crowded = [*((1, head) for head in range(6)), (2, 0)]  # layer 1 has two others: four come from its neighbours
    drawn = layer_matched_heads(EVERY, crowded, 0)
    assert len(set(drawn)) == 7
    assert not set(drawn) & set(crowded)
    assert Counter(layer for layer, _ in drawn) == {1: 2, 2: 1, 0: 4}


# ---- the scans, on prompts with counterfactuals ----

RANKING = ((1, 3), (0, 2), (2, 0), (1, 0))


def slow_rows(family: str, heads: Sequence[Head], ablation: str, positions: str) -> test_scans.Rows:
    """One prompt a forward pass, plain hooks in every edited layer, the new values from the twin of the head scan."""
    model, rows = test_scans.tiny_model(family), {}
    twins = {layer: test_scans.Twin(model, "head", layer, ablation, positions) for layer, _ in heads}
    for number, item in enumerate(test_scans.PROMPTS):
        with ExitStack() as hooks:
            for layer, head in heads:
                new = twins[layer].new[number]
                tokens = slice(None) if positions == "all" else slice(item.end, item.end + 1)

                def put(value: torch.Tensor, new=new, tokens=tokens, head=head) -> torch.Tensor:
                    value = value.clone()
                    columns = slice(head * test_scans.D_HEAD, (head + 1) * test_scans.D_HEAD)
                    value[0, tokens, columns] = new[tokens, columns]
                    return value

                hooks.enter_context(edited_input(test_scans.site_of(model, "head", layer), put))
            logits = model(torch.tensor([item.fed])).logits[0]
        rows |= test_scans.rows_of(logits, item)
    return rows


@pytest.mark.parametrize(
    ("ablation", "positions"), [("mean", None), ("mean", "all"), ("zero", None), ("resample", None)]
)
@pytest.mark.parametrize("engine", ["packed", "plain"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_knockout_rows_equal_their_twin(family: str, engine: str, ablation: str, positions: str | None) -> None:
    scan = KnockoutScan(ablation, positions, engine=engine, ranking=RANKING, ks=(0, 1, 3), seeds=1)
    on = test_scans.subject(test_scans.tiny_model(family))
    found = test_scans.run_all(scan, on)
    assert_rows = test_scans.assert_rows
    assert_rows(test_scans.rows_where(found["baseline"]), slow_rows(family, [], ablation, scan.edited_positions))
    for ranking in ("effect", "random", "random_layer"):
        for k in (1, 3):
            heads = scan.heads_of(on.anatomy.shape, ranking, 0, k)
            rows = test_scans.rows_where(found["knockout_scan"], ranking=ranking, k=k)
            assert_rows(rows, slow_rows(family, heads, ablation, scan.edited_positions))
            stored = [r for r in found["knockout_heads"].to_pylist() if (r["ranking"], r["k"]) == (ranking, k)]
            assert [(r["place"], (r["layer"], r["head"])) for r in stored] == list(enumerate(heads, start=1))
    assert scan.heads_of(on.anatomy.shape, "effect", 0, 3) == [(1, 3), (0, 2), (2, 0)], "the ranking's order is lost"


def test_default_numbers_of_heads_and_controls() -> None:
    shape = model_shape(tiny_config("llama"))  # 3 layers of 4 heads
    every = tuple(chosen_heads(shape, None, None))
    assert KnockoutScan(ranking=every).chosen_ks(shape) == [1, 2, 4]
    assert KnockoutScan(ranking=every[:3]).chosen_ks(shape) == [1, 2]
    curves = KnockoutScan(ranking=every, ks=(0, 6, 7, 12), seeds=2).curves(shape)
    assert curves[0] == ("effect", 0, [6, 7, 12])
    assert [(name, seed, ks) for name, seed, ks in curves[1:]] == [
        (name, seed, [6]) for name in ("random", "random_layer") for seed in (0, 1)
    ], "7 of 12 heads leave 5 others: no control"
    same = [KnockoutScan(ranking=ranking, ks=(2,)).parameters() for ranking in (every, every[:2])]
    assert same[0] == same[1], "heads that no k reaches change no row"
    default = KnockoutScan(ranking=every).parameters()
    assert (default["ablation"], default["positions"], default["scoring"]) == ("mean", "end", "first_token")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranking": ()}, "no heads to knock out"),
        ({"ranking": ((0, 1), (0, 1))}, "head 0.1 is twice"),
        ({"ks": (0,)}, "more than 0"),
        ({"ks": (5,)}, "cannot knock out 5 heads: the ranking has 4"),
        ({"ranking": ((9, 0),)}, "layer 9 does not exist"),
        ({"ablation": "half"}, "'half' is not known"),
        ({"seeds": -1}, "0 or more"),
        ({"ablation": "resample", "sentences": (Sentence("1", (1,)),)}, "no counterfactual"),
    ],
)
def test_mistakes_in_a_knockout(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        KnockoutScan(**{"ranking": RANKING, **changes}).shards(model_shape(tiny_config("llama")), [])


# ---- iterative masking ----


def greedy(on: Subject, steps: int) -> list[tuple[Head, float, float]]:
    """Head, accuracy and log-probability of each step, by plain full passes over every set."""
    runner, every, masked, found = (
        PlainHeadSets(on.anatomy, on.prompts),
        chosen_heads(on.anatomy.shape, None, None),
        [],
        [],
    )
    for _ in range(steps):
        left = [head for head in every if head not in masked]
        means = []
        for head in left:
            scores = runner.run_sets([frozenset({head, *masked})], zeros(on.anatomy))
            units = units_of(on, scores)
            effect = effects_by_operation(units)["all"]
            means.append((round(effect.accuracy, 12), round(effect.logprob_change, 12), head))
        accuracy, logprob, head = min(means)
        masked.append(head)
        found.append((head, accuracy, logprob))
    return found


def units_of(on: Subject, scores: Scores) -> list[Unit]:
    answers = answers_of(on.prompts)
    prompts = [on.prompts[p].prompt for p in answers.prompt_A]
    return [
        Unit(p.prompt_id, int(position), p.operation or "none", True, bool(correct), 0.0, float(logprob))
        for p, position, correct, logprob in zip(
            prompts, answers.position_A, scores.correct_EA[0], scores.logprob_EA[0], strict=True
        )
    ]


def test_iterative_masking_is_greedy_and_resumes_by_step() -> None:
    on = test_scans.subject(test_scans.tiny_model("llama"))
    scan = IterativeScan("zero", steps=3)
    shards = scan.shards(on.anatomy.shape, on.prompts)
    assert [shard.cost for shard in shards] == [12, 11, 10], "the first step is dispatched first"
    state = scan.prepare(on)
    steps = [scan.run(state, shard) for shard in shards]
    expected = greedy(on, 3)
    unedited = effects_by_operation(units_of(on, state.ablation.engine.baseline()))["all"]
    for step, (rows, (head, accuracy, logprob)) in enumerate(zip(steps, expected, strict=True)):
        assert rows.num_rows == 12 - step
        (chosen,) = [row for row in rows.to_pylist() if row["masked"]]
        assert (chosen["layer"], chosen["head"]) == head
        np.testing.assert_allclose(chosen["accuracy"], accuracy, rtol=1e-6)
        before = expected[step - 1][2] if step else unedited.logprob_change
        np.testing.assert_allclose(chosen["logprob_change"], logprob - before, rtol=1e-4, atol=1e-6)
    alone = scan.run(scan.prepare(on), shards[2])  # a replica that lost its steps finds them again
    resumed = replace(scan, known=(expected[0][0], expected[1][0]))
    assert resumed.parameters() == scan.parameters()
    resumed_state = resumed.prepare(on)
    assert alone.equals(steps[2])
    assert resumed.run(resumed_state, shards[2]).equals(steps[2])
    assert resumed.run(resumed_state, shards[0]).equals(steps[0]), "a lost file of an early step is made again"


@pytest.mark.parametrize("scoring", ["token", "first_token", "exact_match"])
def test_operation_means_are_those_of_the_statistics(scoring: str) -> None:
    on = test_scans.subject(test_scans.tiny_model("llama"))
    scan = KnockoutScan("zero", scoring=scoring, ranking=RANKING)
    state = scan.prepare(on)
    scores = state.runner.run_sets([frozenset(RANKING[:1])], zeros(on.anatomy))
    lucky = np.random.default_rng(0).random(scores.correct_EA.shape) < 0.6  # a random model is never right
    scores = replace(scores, correct_EA=lucky)
    accuracy, logprob = operation_means(state.ablation, scores, scoring)
    expected = effects_by_operation(units_of(on, scores), scoring)["all"]
    np.testing.assert_allclose([accuracy[0], logprob[0]], [expected.accuracy, expected.logprob_change], rtol=1e-12)
    assert 0 < accuracy[0] < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"steps": 13}, "cannot mask 13"), ({"steps": 0}, "at least 1"), ({"rank_by": "luck"}, "accuracy, logprob"),
     ({"layers": (1,), "steps": 5}, "there are 4"), ({"layers": (7,)}, "layer 7 does not exist")],
)  # fmt: skip
def test_mistakes_in_iterative_masking(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        IterativeScan(**changes).shards(model_shape(tiny_config("llama")), [])


# ---- SQL ----


def curve_store(folder: Path, scoring: str = "token") -> tuple[Store, str]:
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
    run = open_run(store, ["baseline/00000", "knockout_scan/00000"], scan="knockout", parameters={"scoring": scoring})
    store.write_prompts(FINGERPRINT, prompts)
    store.write_shard(run.run_id, "baseline", 0, scores("baseline", baseline), {})
    store.write_shard(run.run_id, "knockout_scan", 0, scores("knockout_scan", rows), {})
    assert run.finish() == []
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
    # prompts a, b: n = 3, 1; hits 2, 1; e = 2 - .75 * 3, 1 - .75; sum e^2 = 2 / 16; variance 2/1 * that / 16
    half = 1.959963984540054 * (2 * (2 / 16) / 16) ** 0.5
    assert point(1, "add")["low"] == pytest.approx(0.75 - half, abs=1e-12)
    assert point(1, "add")["high"] == pytest.approx(min(0.75 + half, 1), abs=1e-12)
    assert (point(0, "add")["low"], point(0, "add")["high"]) == (1, 1)
    assert point(1, "sub")["low"] is None, "one prompt has no interval"


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


def test_whole_answers_and_first_tokens_count_as_the_run_says(tmp_path: Path) -> None:
    for scoring, expected in (("exact_match", [0.5, 0.0]), ("first_token", [1.0, 1.0])):
        store, run = curve_store(tmp_path / scoring, scoring)
        rows = store.rows(
            f"""SELECT operation, accuracy FROM knockout_curve WHERE run_id = '{run}' AND ranking = 'effect' AND k = 1
                AND operation <> 'all' ORDER BY operation"""
        )
        assert [row["accuracy"] for row in rows] == expected


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
        [10, 0, 5],
        [10, 15, 12.5],
        [5, 0, 2.5],
    ]
    assert [row["sub"] for row in rows] == [None] * 3
    (effect,) = store.rows("SELECT q_value FROM head_effects WHERE head = 0 AND operation = 'add'")
    assert rows[0]["serves_q"] == effect["q_value"]
    assert ranking_from(store, run) == ((0, 1), (0, 0), (0, 2))
    assert ranking_from(store, run, "add")[:2] == ((0, 0), (0, 1)), "ties go to the lower head"
    assert ranking_from(store, run, "mul")[0] == (0, 1)


def test_a_run_that_ranks_no_heads(tmp_path: Path) -> None:
    store, run = curve_store(tmp_path)
    for wanted, operation, message in (
        ("none", "all", "no run 'none'"),
        (run, "all", "ranks no heads"),
        (open_run(store).run_id, "all", "0 of 2 shards"),
    ):
        with pytest.raises(UserError, match=message):
            ranking_from(store, wanted, operation)


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
    with pytest.raises(UserError, match="no effects of heads for operation 'div'"):
        ranking_from(store, run.run_id, "div")


# ---- the command ----


def command(*words: object) -> Result:
    return CliRunner().invoke(main, ["knockout", *(str(word) for word in words)])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["--heads", "--rank-from", "--iterative"]),
        (["--heads", "0.1", "--rank-from", "x"], ["one way"]),
        (["--heads", "0-1"], ["cannot be read"]),
        (["--heads", "0.1,0.1"], ["twice"]),
        (["--heads", "0.1", "--ks", "1,two"], ["--ks", "cannot be read"]),
        (["--heads", "0.1", "--ks", "2"], ["cannot knock out 2 heads"]),
        (["--heads", "0.1", "--rank-operation", "add"], ["--rank-operation"]),
        (["--heads", "0.1", "--layers", "0"], ["--iterative"]),
        (["--heads", "0.1", "--engine", "warp"], ["warp", "packed"]),
        (["--heads", "0.1", "--show", "qwertz"], ["--show", "qwertz"]),
        (["--heads", "9.1"], ["layer 9 does not exist"]),
        (["--rank-from", "nothing"], ["no run 'nothing'"]),
        (["--iterative", "2", "--heads", "0.1"], ["takes none"]),
        (["--iterative", "2", "--replicas", "2"], ["one replica"]),
        (["--iterative", "99"], ["cannot mask 99 heads"]),
    ],
)
def test_mistakes_on_the_command_line(tmp_path: Path, words: list[str], parts: list[str]) -> None:
    result = command("--store", tmp_path / "s", "--limit", 16, "--ablation", "zero", *words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    for part in parts:
        assert part in line


@pytest.mark.ray
def test_the_command_ranks_knocks_out_shows_and_resumes(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "llama", "llama")
    common = ["--model", folder, "--store", tmp_path / "s", "--limit", 16, "--ablation", "zero", "--replicas", 1]
    with connection(None):
        masked = json.loads(command("--iterative", 2, *common, "--json").stdout)
        assert len(masked["ranking"]) == masked["shards_done"] == 2
        store = Store(tmp_path / "s")
        chosen = store.rows("SELECT layer || '.' || head AS head FROM iterative_scan WHERE masked ORDER BY step")
        assert masked["ranking"] == [row["head"] for row in chosen]
        (second,) = (tmp_path / "s" / "iterative_scan").glob("*/shard-00001.parquet")
        content = second.read_bytes()
        second.unlink()
        again = json.loads(command("--iterative", 2, *common, "--json").stdout)
        assert (again["shards_reused"], again["shards_done"], again["steps"]) == (1, 1, masked["steps"])
        assert len(second.read_bytes()) == len(content)

        words = ["--rank-from", masked["run_id"], "--control-seeds", 2, "--show", "3 plus 5 is", *common]
        found = json.loads(command(*words, "--json").stdout)
        assert found["ranking"] == masked["ranking"]
        assert [row["k"] for row in found["curve"]] == [0, 1, 2]
        assert (found["shards_done"], found["failed"]) == (8, [])
        examples = store.rows(f"SELECT * FROM knockout_examples WHERE run_id = '{found['run_id']}' ORDER BY k, rank")
        assert [(row["k"], row["rank"]) for row in examples] == [(k, rank) for k in (0, 1, 2) for rank in range(1, 6)]
        assert examples[0]["probability"] >= examples[1]["probability"] > 0
        assert {row["token"] for row in examples} <= set(tiny_tokenizer().get_vocab())
        lines = {line.get_label(): line for line in draw(store, found["run_id"]).axes[0].lines}
        assert set(lines) == {"effect-rank", "random-rank", "random, layer-rank"}
        drawn = [row["effect"] for row in found["curve"]]
        np.testing.assert_allclose(lines["effect-rank"].get_ydata(), drawn, atol=1e-9)
    shown = command(*words)  # nothing left to compute: no Ray
    assert shown.exit_code == 0, shown.output
    for part in ("Accuracy (%), first k heads out", "random_layer", "has halved", "knockout_curve", "nothing left"):
        assert part in shown.stdout
