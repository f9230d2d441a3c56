"""Kept neurons zeroed against random ones; the views by hand and by reweighting; the command itself."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from mathinterp.cli.main import main
from mathinterp.engine.intervention import zeroed
from mathinterp.engine.plain import PlainEngine
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.experiments.concept_zeroing import ConceptZeroing, NeuronSet
from mathinterp.experiments.concept_zeroing.summary import _verdict, missing_controls
from mathinterp.experiments.concepts import ConceptOptions, Concepts
from mathinterp.experiments.concepts.summary import kept_neurons
from mathinterp.experiments.neuron_controls import has_control, layer_matched_neurons
from mathinterp.experiments.results import Results, Shown
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Neuron
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from tests.exact import PROMPTS
from tests.small_store import FINGERPRINT, open_run, prompt

# ---- zeroing ----
from tests.statistics_twin import part_of, score_interval, student_interval
from tests.tiny import of_neurons, save_tiny, tiny_model


def test_random_neurons_match_each_layer_and_leave_out_the_set() -> None:
    shape = Anatomy(tiny_model("llama")).shape
    neurons = [(0, n) for n in range(15)] + [(2, 3), (2, 39)]
    drawn = layer_matched_neurons(shape, neurons, seed=0)
    assert Counter(layer for layer, _ in drawn) == {0: 15, 2: 2}
    assert len(set(drawn)) == 17
    assert not set(drawn) & set(neurons)
    assert drawn == layer_matched_neurons(shape, neurons, seed=0)
    assert drawn != layer_matched_neurons(shape, neurons, seed=1)
    assert has_control(shape, neurons)
    assert not has_control(shape, [(0, n) for n in range(21)])


@of_neurons
def test_zeroing_rows_are_those_of_the_sets(anatomy: Anatomy) -> None:
    half, few = NeuronSet(0, tuple((0, n) for n in range(21))), NeuronSet(1, ((0, 3), (1, 7)))
    scan = ConceptZeroing((half, few), "source", seeds=2)
    state = scan.prepare(Subject(anatomy, PROMPTS[:6]))
    shards = scan.shards(anatomy.shape, PROMPTS[:6])
    assert [(s.key, s.work.get("passes")) for s in shards] == [
        ("baseline/00000", None), ("concept_zeroing/00000", 1), ("concept_zeroing/00001", 3),
    ]  # fmt: skip
    assert [scan.evaluations(shard, PROMPTS[:6]) for shard in shards] == [6, 6, 18]
    baseline = scan.run(state, shards[0])
    assert scan.run(state, shards[1]).column("zeroed").unique().to_pylist() == [21]
    table = scan.run(state, shards[2])
    assert table.schema == scan.tables["concept_zeroing"].schema
    engine = PlainEngine(anatomy, PROMPTS[:6])
    assert baseline["logprob"].to_pylist() == pytest.approx(engine.baseline().logprob_EA[0].tolist())
    for kind, seed, neurons in (
        ("concepts", 0, few.neurons),
        ("random", 0, layer_matched_neurons(anatomy.shape, few.neurons, 0)),
        ("random", 1, layer_matched_neurons(anatomy.shape, few.neurons, 1)),
    ):
        rows = [r for r in table.to_pylist() if (r["neurons"], r["seed"]) == (kind, seed)]
        scores = engine.run([zeroed(anatomy, (Neuron(*neuron) for neuron in neurons))])
        assert [r["logprob"] for r in rows] == pytest.approx(scores.logprob_EA[0].tolist(), rel=1e-6)
        assert {(r["level"], r["zeroed"]) for r in rows} == {(1, 2)}
    assert scan.parameters()["sets"] != ConceptZeroing((half, NeuronSet(1, ((0, 3),))), "source").parameters()["sets"]
    with pytest.raises(UserError, match="`scoring` 'all' is not known"):
        ConceptZeroing((few,), "source", scoring="all")


# ---- views ----


def queries(store: Store) -> Callable[[str], list[dict[str, Any]]]:
    """Queries on one connection: building all views takes longest."""
    connection = store.connect()
    return lambda sql: connection.sql(sql).to_arrow_table().to_pylist()


def concept_row(layer: int | None, neuron: int, attention: int | None, hits: int, sign: int = 1) -> dict[str, Any]:
    names = json.dumps([f"c{n}" for n in range(hits)]) if hits else None
    tokens = json.dumps([f"\nt{layer}.{neuron}.{attention}.{sign}"]) if hits or attention is None else None
    return {"layer": layer, "neuron": neuron, "attention_layer": attention, "sign": sign, "hits": hits,
            "concepts": names, "tokens": tokens}  # fmt: skip


@pytest.fixture(scope="module")
def concept_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    """Three neurons of layer 0, one of layer 1, one random direction; attention layers 1 and 2, both signs."""
    store = Store(tmp_path_factory.mktemp("concepts"))
    hits = {  # (layer, neuron, attention): hits of plus, of minus
        (0, 0, None): (0, 0), (0, 0, 1): (1, 3), (0, 0, 2): (3, 3),
        (0, 1, None): (2, 1), (0, 1, 1): (0, 0), (0, 1, 2): (0, 0),
        (0, 2, None): (1, 0), (0, 2, 1): (2, 0), (0, 2, 2): (2, 1),
        (1, 0, None): (0, 4), (1, 0, 2): (0, 1),
        (None, 0, None): (0, 0), (None, 0, 1): (1, 0), (None, 0, 2): (4, 4),
    }  # fmt: skip
    rows = [
        concept_row(*key, count, sign) for key, pair in hits.items() for count, sign in zip(pair, (1, -1), strict=True)
    ]
    run = open_run(store, ["concept_scan/00000"], scan="concepts", parameters={"count": "distinct", "top": 5})
    schema = catalog().tables["concept_scan"].schema
    store.write_shard(run.run_id, "concept_scan", 0, pa.Table.from_pylist(rows, schema), {})
    run.note({"concept_tokens": 7, "concepts_in_vocabulary": 6, "expected_hits": 0.25})
    run.finish()
    return store, run.run_id


@pytest.mark.slow
def test_best_attention_layer_levels_and_chance(concept_store: tuple[Store, str]) -> None:
    ask = queries(concept_store[0])
    rows = ask("SELECT * FROM concept_neurons ORDER BY layer, neuron")
    assert list(rows[0])[:7] == ["run_id", "layer", "neuron", "attention_layer", "hits", "concepts", "tokens"]
    found = [tuple(r[c] for c in ("layer", "neuron", "attention_layer", "sign", "hits", "direct_hits")) for r in rows]
    assert found == [
        (0, 0, 2, 1, 3, 0),  # plus before minus, though a lower layer has as many with minus
        (0, 1, None, None, 0, 2),
        (0, 2, 1, 1, 2, 1),  # the lower of two layers
        (1, 0, 2, -1, 1, 4),  # and the direct reading of the same sign
    ]
    levels = ask("SELECT layer, level, kept, direct, total, share FROM concept_levels ORDER BY layer, level")
    over_all = [(r["level"], r["kept"], r["direct"], r["total"]) for r in levels if r["layer"] is None]
    assert over_all == [(0, 3, 3, 4), (1, 2, 2, 4), (2, 1, 1, 4), (3, 0, 1, 4), (4, 0, 0, 4)]
    assert [(r["kept"], r["share"]) for r in levels if r["layer"] == 1][:2] == [(1, 1.0), (0, 0.0)]
    shares = {
        (r["attention_layer"], r["level"]): (r["neurons"], r["random"], r["pairs"])
        for r in ask("SELECT * FROM concept_chance")
    }
    assert shares[1, 0] == (3 / 6, 1 / 2, 6)
    assert shares[2, 0] == (5 / 8, 1.0, 8)
    assert shares[2, 2] == (2 / 8, 1.0, 8)
    assert shares[None, 0] == (4 / 8, 0.0, 8)
    pairs = ask("SELECT * FROM concept_layers WHERE layer = 0 ORDER BY attention_layer NULLS FIRST")
    assert [(r["attention_layer"], r["n"], r["with_hits"], r["most_hits"], r["best_of"]) for r in pairs] == [
        (None, 6, 3, 2, 0), (1, 6, 3, 3, 1), (2, 6, 4, 3, 1),
    ]  # fmt: skip


def test_table_forms_and_kept_neurons(concept_store: tuple[Store, str]) -> None:
    store, run_id = concept_store
    results = Results(store, run_id)
    assert kept_neurons(results, [0, 1, 2, 3]) == {0: ((0, 0), (0, 2), (1, 0)), 1: ((0, 0), (0, 2)), 2: ((0, 0),)}
    table = store.rows("SELECT level, neurons, total, share, expected_hits FROM paper_a_table7 ORDER BY level")
    assert [tuple(row.values()) for row in table] == [
        (0, 3, 4, 0.75, 0.25), (1, 2, 4, 0.5, 0.25), (2, 1, 4, 0.25, 0.25), (3, 0, 4, 0, 0.25),
    ]  # fmt: skip
    data = Concepts.summarize(results, ConceptOptions(levels=(1, 9), show=2)).data
    shown, examples = data["levels"], data["examples"]
    assert [row["neurons"] for row in shown] == [2, 0]
    assert shown[0]["one layer"] == pytest.approx((2 / 6 * 6 + 3 / 8 * 8) / 14)
    assert shown[0]["random"] == pytest.approx((0 * 6 + 1 * 8) / 14)
    assert [(r["neuron"], r["attention"], r["hits"], r["concepts"]) for r in examples] == [
        ("0.0", 2, 3, "c0 c1 c2"), ("0.2", 1, 2, "c0 c1"),
    ]  # fmt: skip
    assert examples[0]["tokens through attention"] == "\\nt0.0.2.1"
    assert examples[0]["tokens read directly"] == "\\nt0.0.None.1"
    assert data["chance"] == {"concepts": 6, "tokens": 7, "expected_hits": 0.25}
    assert data["top_tokens"] == 5


@pytest.mark.slow
def test_what_follows_is_the_zeroing_of_the_kept_neurons(concept_store: tuple[Store, str]) -> None:
    results = Results(*concept_store)
    following = Concepts().follow_up(results, ConceptOptions(levels=(2, 9), control_seeds=1, scoring="first_token"))
    assert following == ConceptZeroing((NeuronSet(2, ((0, 0),)),), results.run_id, 1, "first_token")
    for nothing in (ConceptOptions(zero=False), ConceptOptions(levels="9")):
        assert Concepts().follow_up(results, nothing) is None
        *_, said = Concepts.summarize(results, nothing).parts
        assert said == "No neurons were zeroed."
    *_, table = Concepts.summarize(results, ConceptOptions()).parts
    assert isinstance(table, Shown)


def relative_drop(units: dict[str, list[tuple[int, int, int]]], weights: dict[str, np.ndarray]) -> float:
    """(original - zeroed) / original of mean accuracies over operations; units are (n, baseline hits, hits)."""
    sums = {name: (np.array(rows) * weights[name][:, None]).sum(0) for name, rows in units.items()}
    original = sum(before / n for n, before, _ in sums.values())
    return float((original - sum(after / n for n, _, after in sums.values())) / original)


@pytest.mark.slow
def test_zeroing_effects_against_reweighted_prompts(tmp_path: Path) -> None:
    """The interval is that of the infinitesimal jackknife: each prompt's weight moved a little, numerically."""
    rng, store = np.random.default_rng(0), Store(tmp_path)
    items, baseline, zeroed = [], [], []
    units: dict[str, list[tuple[int, int, int]]] = {"add": [], "sub": []}
    for operation, count in (("add", 9), ("sub", 14)):
        for number in range(count):
            tokens = int(rng.integers(1, 4))
            name = f"{operation}{number}"
            items.append(prompt(name, operation, ["memorize"] * tokens))
            before, after = rng.random(tokens) < 0.8, rng.random(tokens) < 0.5
            units[operation].append((tokens, int(before.sum()), int(after.sum())))
            for position in range(tokens):
                row = {"prompt_id": name, "position": position, "logit": 0.0, "predicted_id": 1}
                baseline.append({**row, "correct": bool(before[position]), "logprob": -1.0})
                cut = {**row, "correct": bool(after[position]), "logprob": -1.5, "level": 2, "zeroed": 5}
                zeroed.append({**cut, "neurons": "concepts", "seed": 0})
                zeroed += [
                    {**cut, "neurons": "random", "seed": seed, "correct": bool(before[position])} for seed in (0, 1)
                ]
    run = open_run(store, ["baseline/00000", "concept_zeroing/00000"], scan="concept_zeroing")
    store.write_prompts(FINGERPRINT, items)
    for table, rows in (("baseline", baseline), ("concept_zeroing", zeroed)):
        store.write_shard(run.run_id, table, 0, pa.Table.from_pylist(rows, catalog().tables[table].schema), {})
    run.finish()
    ask = queries(store)
    effects = ask("SELECT * FROM concept_zeroing_effects WHERE neurons = 'concepts'")
    assert {row["operation"] for row in effects} == {"add", "sub", "all"}
    for row in effects:
        chosen = units if row["operation"] == "all" else {row["operation"]: units[row["operation"]]}
        even = {name: np.ones(len(rows)) for name, rows in chosen.items()}
        assert row["relative_drop"] == pytest.approx(relative_drop(chosen, even))
        variance = 0.0
        for name, rows in chosen.items():
            moved = []
            for number in range(len(rows)):
                heavy = {other: weights.copy() for other, weights in even.items()}
                heavy[name][number] += 1e-6
                moved.append((relative_drop(chosen, heavy) - relative_drop(chosen, even)) / 1e-6)
            variance += len(rows) / (len(rows) - 1) * float(np.square(moved).sum())
        fewest = min(len(rows) for rows in chosen.values())
        wide = student_interval(row["relative_drop"], variance, fewest)
        parts = [
            part_of([max(b - h, 0) for _, b, h in rows], [max(h - b, 0) for _, b, h in rows], [n for n, _, _ in rows])
            for rows in chosen.values()
        ]
        low, high = (bound / row["baseline_accuracy"] for bound in score_interval(parts))
        assert (row["low"], row["high"]) == pytest.approx((min(low, wide[0]), min(max(high, wide[1]), 1)), rel=1e-4)
        assert row["logprob_change"] == pytest.approx(-0.5)
    table = {row["operation"]: row for row in ask("SELECT * FROM paper_a_table8")}
    assert (table["all"]["level"], table["all"]["neurons"], table["all"]["random_sets"]) == (2, 5, 2)
    assert (table["all"]["random"], table["add"]["random_most"]) == (0, 0)
    assert table["sub"]["decrease"] == pytest.approx(
        next(r for r in effects if r["operation"] == "sub")["relative_drop"]
    )
    every, worst = table["all"], max((table["add"], table["sub"]), key=lambda row: row["decrease"])
    shares = [f"{100 * row[name]:.3g}" for row in (every, worst) for name in ("decrease", "low", "high")]
    assert ConceptZeroing.summarize(Results(store, run.run_id), None).data["verdict"] == (
        f"The largest relative decrease of accuracy over all operations is {shares[0]} % (95 % interval {shares[1]} to"
        f" {shares[2]}, n = {every['n']}), with the 5 neurons of more than 2 hits at zero; of as many random ones in"
        f" each layer it is 0 % (0 to 0). Of one operation: {shares[3]} % (95 % interval {shares[4]} to {shares[5]},"
        f" n = {worst['n']}) in {worst['operation']}, hits > 2."
    )


def test_where_nothing_was_right_originally_there_is_no_relative_drop_and_no_interval(tmp_path: Path) -> None:
    store, names = Store(tmp_path), [f"p{number}" for number in range(12)]
    rows = [
        {"prompt_id": n, "position": 0, "logit": 0.0, "predicted_id": 1, "correct": False, "logprob": -1.0}
        for n in names
    ]
    run = open_run(store, ["baseline/00000", "concept_zeroing/00000"], scan="concept_zeroing")
    store.write_prompts(FINGERPRINT, [prompt(name) for name in names])
    zeroed = [{**row, "level": 2, "zeroed": 5, "neurons": "concepts", "seed": 0} for row in rows]
    for table, part in (("baseline", rows), ("concept_zeroing", zeroed)):
        store.write_shard(run.run_id, table, 0, pa.Table.from_pylist(part, catalog().tables[table].schema), {})
    run.finish()
    found = store.rows("SELECT relative_drop, low, high FROM concept_zeroing_effects")
    assert found == [{"relative_drop": None, "low": None, "high": None}] * 2
    verdict = ConceptZeroing.summarize(Results(store, run.run_id), None).data["verdict"]
    assert verdict == "Nothing was right originally (n = 12): there is nothing to lose."


def test_of_a_run_whose_own_sets_are_missing_it_is_not_said_that_nothing_was_right() -> None:
    missing = {
        "hits more than": 2,
        "operation": "all",
        "neurons": 5,
        "n": 12,
        "decrease": None,
        "low": None,
        "high": None,
    }
    random = {"random": 0.25, "random least": 0.0, "random most": 0.5}
    assert _verdict([{**missing, **random}]) == ""


@pytest.mark.parametrize("seeds", [2, 0])
def test_levels_without_random_sets_say_which_layer_is_full(concept_store: tuple[Store, str], seeds: int) -> None:
    """Level 0 keeps neurons 0 and 2 of the three of layer 0, and the only one of layer 1; level 2 has random sets."""
    store, source = concept_store
    parameters = {"source": source, "seeds": seeds}
    run = open_run(store, ["baseline/00000", "concept_zeroing/00000"], scan="concept_zeroing", parameters=parameters)
    row = {"prompt_id": "a", "position": 0, "logit": 0.0, "predicted_id": 1, "correct": True, "logprob": -1.0}
    sets = [("concepts", 0, 3), ("concepts", 2, 1), *([("random", 2, 1)] if seeds else [])]
    zeroed = [{**row, "neurons": kind, "level": level, "seed": 0, "zeroed": count} for kind, level, count in sets]
    store.write_prompts(FINGERPRINT, [prompt("a")])
    for table, rows in (("baseline", [row]), ("concept_zeroing", zeroed)):
        store.write_shard(run.run_id, table, 0, pa.Table.from_pylist(rows, catalog().tables[table].schema), {})
    run.finish()
    lines = missing_controls(Results(store, run.run_id))
    if seeds:
        (line,) = lines
        assert line.startswith("No random sets for hits > 0: 1 of the 1 neurons of layer 1 are zeroed, so there are")
    else:
        assert lines == [], "none were asked for"


# ---- the command ----


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, ["scan", "concepts", *map(str, words)])


@pytest.mark.ray
def test_command_counts_zeroes_and_resumes(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "llama", "llama")
    command = ["--model", folder, "--store", tmp_path / "store", "--replicas", 1, "--top", 6, "--levels", "1,3,6",
               "--limit", 4, "--control-seeds", 1, "--json"]  # fmt: skip
    first = invoke(*command)
    assert first.exit_code == 0, first.output
    printed = json.loads(first.stdout)
    assert [row["of"] for row in printed["levels"]] == [40] * 3
    assert printed["levels"][0]["neurons"] > printed["levels"][1]["neurons"] > 0
    assert {row["hits more than"] for row in printed["zeroing"]["decreases"]} == {1, 3}  # none has more than 6
    store = Store(tmp_path / "store")
    assert len(store.rows("SELECT * FROM concept_neurons")) == 40
    shown = invoke(*command[:-1])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("nothing left to compute") == 2
    assert "nothing left to compute; 3 of 3 shards were there already" in shown.stdout
    assert "tokens spell" in shown.stdout
    assert "All of them at zero" in shown.stdout


def test_mistakes_in_the_command_are_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"a": [1]}')
    other = tmp_path / "other.json"
    other.write_text('{"a": ["unfindable"]}')
    for words, part in (
        (["--concepts", broken], "neither a spelling"),
        (["--concepts", tmp_path / "none.json"], "cannot read concepts"),
        (["--concepts", other], "none of the 1 concepts"),
        (["--levels", "a"], "--levels 'a' cannot be read"),
        (["--top", "500"], "hold every concept"),
        (["--top", "0"], "'--top': 0 is not in the range"),
        (["--layers", "9"], "layer 9 does not exist"),
        (["--control-seeds", "-1"], "'--control-seeds': -1 is not in the range"),
        (["--scoring", "x"], "'--scoring': 'x' is not one of"),
    ):
        result = invoke("--store", tmp_path / "s", *words)
        assert result.exit_code == 2, result.output
        assert part in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
