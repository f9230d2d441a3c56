"""The path scan: rows against the slow twin, what it refuses, its views against numpy, and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from scipy.stats import false_discovery_control, spearmanr

from mathinterp.cli.main import main
from mathinterp.engine.pairs import pairs_of
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.experiments.paths import Paths, ShownNodes
from mathinterp.experiments.paths.figure import draw
from mathinterp.experiments.paths.summary import summarize
from mathinterp.experiments.results import Results
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.units import Head, Mlp
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from mathinterp.store import Store
from tests.charts import parts_of, table_of
from tests.path_twin import PAIRS, anatomy_of, forward, patched_logits
from tests.small_store import FINGERPRINT, open_run
from tests.statistics_twin import student_interval, student_p_value
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def llama() -> Anatomy:
    return anatomy_of("llama")


def tokenized_pairs(anatomy: Anatomy) -> list[TokenizedPrompt]:
    """PAIRS as prompts of two operations; the model answers the first two right and no other."""
    prompts = []
    for i, (own, other) in enumerate(zip(PAIRS.original, PAIRS.counterfactual, strict=True)):
        logits = forward(anatomy, own, {})
        answer = int(logits.argmax() if i < 2 else logits.argmin())  # right, or a logit below 0
        scored = (ScoredToken(0, len(own), answer, "7", "digit", None),)
        prompt = Prompt(f"p{i}", "text", "7", operation=("add", "sub")[i % 2], counterfactual="neutral")
        prompts.append(TokenizedPrompt(prompt, (*own, answer), scored, (*other, answer)))
    return prompts


def all_rows(scan: Paths, anatomy: Anatomy) -> dict[str, pa.Table]:
    prompts = tokenized_pairs(anatomy)
    state = scan.prepare(Subject(anatomy, prompts))
    shards = scan.shards(anatomy.shape, prompts)
    tables = {name: [scan.run(state, s) for s in shards if s.table == name] for name in scan.tables}
    return {name: pa.concat_tables(parts) for name, parts in tables.items() if parts}


def test_scan_rows_are_the_twins_numbers(llama: Anatomy) -> None:
    found = all_rows(Paths(keep_all=True), llama)
    prompts = tokenized_pairs(llama)
    rows = found["path_scan"].to_pylist()
    assert len(rows) == 3 * 5 * len(PAIRS)
    assert len({(r["layer"], r["node"], r["head"], r["prompt_id"]) for r in rows}) == len(rows)
    for row in rows[:: len(PAIRS) + 1]:
        pair = int(row["prompt_id"][1:])
        gold = prompts[pair].scored[0].token_id
        node = Mlp(row["layer"]) if row["node"] == "mlp" else Head(row["layer"], row["head"])
        assert (row["head"] is None) == (row["node"] == "mlp")
        before = forward(llama, PAIRS.original[pair], {})
        after = patched_logits(llama, pair, node, "heads")
        change = float(after[gold] - before[gold])
        logprobs = [float(v.log_softmax(0)[gold]) for v in (before, after)]
        wanted = {
            "logit_original": float(before[gold]),
            "logit_patched": float(after[gold]),
            "effect": change / abs(float(before[gold])),
            "logprob_change": logprobs[1] - logprobs[0],
            "probability_change": np.exp(logprobs[1]) - np.exp(logprobs[0]),
            "centred_change": change - float(after.mean() - before.mean()),
        }
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    shares = found["attribution_scan"].to_pylist()
    assert len(shares) == len(rows)


def test_pairs_answered_wrongly_are_left_out(llama: Anatomy) -> None:
    found = all_rows(Paths(layers=(1,)), llama)
    assert found["path_pairs"]["kept"].to_pylist() == [True, True, False, False]
    assert set(found["path_scan"]["prompt_id"].to_pylist()) == {"p0", "p1"}
    everything = all_rows(Paths(layers=(1,), keep_all=True), llama)["path_scan"]
    kept = everything.filter(pc.is_in(everything["prompt_id"], pa.array(["p0", "p1"])))
    for name in ("logit_original", "logit_patched", "effect"):
        np.testing.assert_allclose(found["path_scan"][name], kept[name], rtol=1e-6)
    wrong = tokenized_pairs(llama)[2:]
    with pytest.raises(UserError, match=r"answers none of the 2 prompts right .* `keep_all`"):
        Paths().prepare(Subject(llama, wrong))


def test_effect_is_the_measure_asked_for(llama: Anatomy) -> None:
    rows = {
        (effect, denominator): all_rows(Paths(effect=effect, denominator=denominator, keep_all=True), llama)[
            "path_scan"
        ]
        for effect, denominator in (
            ("logit", "paper"), ("logit", "absolute"), ("centred", "absolute"), ("probability", "absolute"),
            ("logprob", "absolute"),
        )
    }  # fmt: skip
    paper, absolute = (rows["logit", d]["effect"].to_numpy() for d in ("paper", "absolute"))
    negative = rows["logit", "paper"]["logit_original"].to_numpy() < 0
    assert 0 < negative.sum() < len(negative)
    np.testing.assert_array_equal(paper, np.where(negative, -absolute, absolute))
    for effect in ("probability", "logprob"):
        table = rows[effect, "absolute"]
        np.testing.assert_array_equal(table["effect"], table[f"{effect}_change"])
    table = rows["centred", "absolute"]
    assert (np.sign(table["effect"]) == np.sign(table["centred_change"])).all()
    assert not np.allclose(table["effect"], absolute)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"freeze": "some"}, "`freeze` 'some' is not known; take one of heads, all, none"),
        ({"effect": "loss"}, "`effect` 'loss' is not known"),
        ({"positions": "all"}, "no token but END reaches the logits"),
        ({"receiver": "17"}, "`receiver` '17' cannot be read"),
        ({"receiver": "1.2.q", "freeze": "none"}, "take `freeze` heads or all"),
        ({"layers": ()}, "no layers to patch"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Paths(**asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layers": (3,)}, "layer 3 does not exist: the model has layers 0 to 2"),
        ({"receiver": "2.4.q"}, "head 2.4 does not exist: each layer has heads 0 to 3"),
        ({"receiver": "1.0.v", "layers": (0, 1)}, r"layer 1 is not before the receiver 1\.0\.v"),
        ({"receiver": "0.1.q"}, "nothing is before the receiver"),
    ],
)
def test_nodes_that_cannot_be_are_refused(llama: Anatomy, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Paths(**asked).shards(llama.shape, [])


def test_senders_of_a_receiver_and_files_of_enough_nodes(llama: Anatomy) -> None:
    first = [*(Head(0, head) for head in range(4)), Mlp(0)]
    second = [Head(1, head) for head in range(4)]
    assert Paths(receiver="1.mlp").nodes(llama.shape) == {0: first, 1: second}
    assert Paths(receiver="1.0.k").nodes(llama.shape) == {0: first}
    wide = replace(llama.shape, n_layers=8, n_heads=8)
    files = [s.work for s in Paths().shards(wide, []) if s.table == "path_scan"]
    assert [w["layers"] for w in files] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert {w["nodes"] for w in files} == {18}
    found = all_rows(Paths(receiver="1.mlp", keep_all=True), llama)
    assert "attribution_scan" not in found
    assert found["path_scan"].num_rows == 9 * len(PAIRS)


def test_an_answer_without_a_digit_is_scored_by_its_first_token_and_unequal_lengths_are_refused(llama: Anatomy) -> None:
    first = tokenized_pairs(llama)[0]
    word = replace(first, scored=(replace(first.scored[0], kind="text"),), prompt=replace(first.prompt, answer="two"))
    assert pairs_of([word]).gold_P.tolist() == [first.scored[0].token_id]
    text = "3 plus 5 is"
    longer = Prompt("p", text, "8", operation="add", counterfactual="3 and then 5 is")
    with pytest.raises(UserError, match=r"prompt 'p'.*tokens"):
        tokenize_prompts([longer], tiny_tokenizer(["then"]))


# ---- the views ----


@pytest.fixture(scope="module")
def stored(llama: Anatomy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, pa.Table]]:
    """A run of all four pairs of the tiny model, written as a replica would."""
    store, scan = Store(tmp_path_factory.mktemp("paths")), Paths(keep_all=True)
    tables = all_rows(scan, llama)
    run = open_run(store, [f"{name}/00000" for name in tables], scan="paths", parameters=scan.parameters())
    store.write_prompts(FINGERPRINT, tokenized_pairs(llama))
    for name, table in tables.items():
        store.write_shard(run.run_id, name, 0, table, {"scan": "paths"})
    run.note({"noise_floor": 0.0})
    assert run.finish() == []
    return store, tables


@pytest.mark.slow
def test_path_effects_equal_numpy(stored: tuple[Store, dict[str, pa.Table]]) -> None:
    store, tables = stored
    rows = store.rows("SELECT * FROM path_effects")
    assert len(rows) == 3 * 5 * 3  # nodes x (add, sub, all)
    frame = tables["path_scan"].to_pandas()
    frame["operation"] = frame.prompt_id.map({"p0": "add", "p1": "sub", "p2": "add", "p3": "sub"})
    by_node = {}
    for (node, layer, head, operation), part in frame.groupby(["node", "layer", "head", "operation"], dropna=False):
        effect = part.effect.astype(float)
        by_node.setdefault((node, layer, None if np.isnan(head) else int(head)), {})[operation] = (
            effect.mean(), effect.var() / len(part), part.logprob_change.astype(float).mean()
        )  # fmt: skip
    p_values: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        parts = by_node[row["node"], row["layer"], row["head"]]
        if row["operation"] == "all":
            mean, logprob = (np.mean([part[i] for part in parts.values()]) for i in (0, 2))
            variance, n, fewest = sum(part[1] for part in parts.values()) / 4, 4, 2
        else:
            (mean, variance, logprob), n, fewest = parts[row["operation"]], 2, 2
        low, high = student_interval(mean, variance, fewest)
        p_value = student_p_value(mean, variance, fewest)
        wanted = {"mean": mean, "low": low, "high": high, "p_value": p_value, "logprob_change": logprob}
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        assert (row["n"], row["pairs"], row["below"]) == (n, fewest, mean < -0.05)
        moves = max(abs(row["logit_change"]), abs(row["logprob_change"])) > row["noise"]
        assert row["sure"] == (row["q_value"] < 0.05 and moves)
        assert row["key"] == (row["below"] and row["sure"])
        p_values.setdefault((row["node"], row["operation"]), []).append((row["p_value"], row["q_value"]))
    for values in p_values.values():
        tests, found = zip(*values, strict=True)
        assert found == pytest.approx(false_discovery_control(tests), rel=1e-12)
    ranked = [row["mean"] for row in sorted(rows, key=lambda r: r["rank"]) if row["operation"] == "all"]
    assert ranked == sorted(ranked)
    assert {row["below"] for row in rows} == {True, False}


@pytest.mark.slow
def test_agreement_is_spearmans_and_a_disagreement_is_warned_of(stored: tuple[Store, dict[str, pa.Table]]) -> None:
    store, _ = stored
    effects = store.rows("SELECT * FROM path_effects ORDER BY operation, node, layer, head")
    shares = store.rows("SELECT * FROM attribution_effects ORDER BY operation, node, layer, head")
    agreement = {row["operation"]: row for row in store.rows("SELECT * FROM path_agreement")}
    assert set(agreement) == {"add", "sub", "all"}
    for operation, row in agreement.items():
        part = [r for r in effects if r["operation"] == operation]
        first = [r["first_order"] for r in shares if r["operation"] == operation]
        columns = {name: [r[name] for r in part] for name in ("logit_effect", "logprob_change", "logit_change")}
        wanted = {
            "logit_logprob": spearmanr(columns["logit_effect"], columns["logprob_change"]).statistic,
            "first_order_rank": spearmanr(columns["logit_change"], first).statistic,
            "first_order_pearson": np.corrcoef(columns["logit_change"], first)[0, 1],
        }
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, abs=1e-9)
    run_id = effects[0]["run_id"]
    summary = summarize(Results(store, run_id), ShownNodes(top=3))
    assert len(summary.data["top"]) == 9
    low = [row for row in agreement.values() if row["logit_logprob"] < 0.5]
    assert len([line for line in summary.warnings if "rank the nodes differently" in line]) == len(low)
    heads = [r for r in effects if r["operation"] == "all" and r["node"] == "head"]
    assert summary.data["verdict"].startswith(f"{sum(r['key'] for r in heads)} of {len(heads)} heads")


@pytest.mark.ray
def test_the_command_line_reports_key_heads(tmp_path: Path) -> None:
    words = ["scan", "paths", "--store", str(tmp_path / "store")]
    words += ["--limit", "16", "--layers", "2-4", "--replicas", "1"]
    printed = CliRunner().invoke(main, words)
    assert printed.exit_code == 0, printed.output
    for part in ("of 24 heads", "Most negative effects", "path_effects", "rank correlations"):
        assert part in printed.output
    again = CliRunner().invoke(main, [*words, "--json"])
    assert again.exit_code == 0, again.exception
    found = json.loads(again.stdout)
    assert (found["shards_done"], found["shards_reused"], len(found["pairs"])) == (0, found["shards"], 4)
    assert all(set(row) >= {"node", "effect", "low", "high", "q", "key"} for row in found["top"])
    store = Store(tmp_path / "store")
    figure = draw(Results(store, found["run_id"]), ShownNodes())
    ((cells, _), *_) = parts_of(figure.to_dict())
    assert cells["encoding"]["x"]["scale"]["domain"] == [*"01234567", "MLP"]
    assert cells["encoding"]["y"]["scale"]["domain"] == [4, 3, 2, 1, 0]
    drawn = table_of(figure, "effect").query("operation == 'all'").set_index(["layer", "place"])["effect"]
    effects = store.rows("SELECT * FROM path_effects WHERE operation = 'all'")
    assert len(drawn) == len(effects)
    for row in effects:
        place = "MLP" if row["node"] == "mlp" else str(row["head"])
        assert drawn[row["layer"], place] == pytest.approx(row["mean"], rel=1e-3)
    refused = CliRunner().invoke(main, [*words, "--receiver", "1.0.q"])
    assert refused.exit_code == 2
    assert "layer 2 is not before the receiver 1.0.q" in refused.output
