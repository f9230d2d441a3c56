"""The neuron scan: rows against the direct form, ranks and summaries in SQL, the command, and the paper's values."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from click.testing import CliRunner, Result

from mathinterp.cli.main import main
from mathinterp.cluster.plan import plan_scan
from mathinterp.engine.hooks import zeroed_columns
from mathinterp.errors import UserError
from mathinterp.experiments.base import Subject
from mathinterp.experiments.neurons import Neurons, OtherModel
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.catalog import ModelSpec, load, resolve
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from tests.made_prompts import PROMPTS as MADE
from tests.neuron_rows import grid, rows_of, scan_of, stored
from tests.neuron_twin import log_probability, look, slow_head, slow_neuron, spread
from tests.tiny import save_tiny, tiny_model


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "olmo2", "granite", "falcon-new"])
@pytest.mark.parametrize("target", ["predicted", "gold"])
def test_rows_are_the_direct_form_under_both_conditions(name: str, target: str) -> None:
    model = scan_of(name)
    zeroed = rows_of(Neurons("head:0.1", target, keep="all"), model)
    swapped = rows_of(Neurons("input", target, keep="all"), model)
    for p in (0, 5, 12):
        original, other = (
            look(model, ids[: MADE[p].end + 1]) for ids in (MADE[p].input_ids, MADE[p].counterfactual_ids)
        )
        with zeroed_columns(model, 0, 1):
            ablated = look(model, MADE[p].input_ids[: MADE[p].end + 1])
        token = MADE[p].scored[0].token_id if target == "gold" else int(original.logits.argmax())
        for rows, intervened in ((zeroed, ablated), (swapped, other)):
            scan = rows["neuron_scan"]
            for layer, k in ((0, 3), (1, 39), (2, 20)):
                for prefix, run in (("", original), ("intervened_", intervened)):
                    importance = grid(scan, f"{prefix}importance")[p, layer, k]
                    expected = slow_neuron(model, layer, k, run, original, token)
                    assert importance == pytest.approx(expected, rel=1e-5, abs=1e-7)
                    coefficient = grid(scan, f"{prefix}coefficient")[p, layer, k]
                    assert coefficient == pytest.approx(float(run.c[layer][k]), rel=1e-5, abs=1e-7)
            targets = rows["neuron_targets"].to_pylist()[p :: len(MADE)]
            for row, run in zip(targets, (original, intervened), strict=True):
                assert row["target_id"] == token
                assert row["logprob"] == pytest.approx(float(run.logits.log_softmax(0)[token]), rel=1e-4, abs=1e-5)
                assert row["predicted_id"] == int(run.logits.argmax())
                assert row["correct"] == (row["predicted_id"] == MADE[p].scored[0].token_id)


def test_what_neurons_are_ranked_by(tmp_path: Path) -> None:
    keys = ("('difference', -2.0, 4.0)", "('abs', -2.0, 4.0)", "('ratio', -2.0, -4.0)", "('ratio', 1.0, 0.0)",
            "('difference', NULL, 3.0)", "('abs', NULL, -3.0)")  # fmt: skip
    (row,) = Store(tmp_path).rows("SELECT " + ", ".join(f"neuron_rank_key{key} AS k{i}" for i, key in enumerate(keys)))
    assert [float(value) for value in row.values()] == [-2, 2, -0.5, 0, 3, 3]


@pytest.mark.parametrize("rank", ["difference", "abs", "ratio"])
def test_first_of_all_layers_together_from_the_first_of_each(tmp_path: Path, rank: str) -> None:
    model = scan_of("llama")
    everything = rows_of(Neurons("head:0.1", keep="all"), model)["neuron_scan"]
    importance = grid(everything, "importance")
    change = importance - grid(everything, "intervened_importance")
    key = {"difference": change, "abs": np.abs(change), "ratio": change / np.abs(importance)}[rank]
    store = stored(tmp_path, Neurons("head:0.1", rank=rank, keep="topk:7"), model)
    found = store.rows("SELECT * FROM neuron_changes ORDER BY prompt_id, rank")
    assert len(found) == 7 * len(MADE)
    names = [prompt.prompt.prompt_id for prompt in MADE]
    for row in found:
        p = names.index(row["prompt_id"])
        order = np.argsort(-key[p].ravel(), kind="stable")  # layers one after another: ties by (layer, neuron)
        layer, neuron = np.unravel_index(order[row["rank"] - 1], key[p].shape)
        assert (row["layer"], row["neuron"]) == (layer, neuron)
        assert row["change"] == pytest.approx(change[p, layer, neuron], rel=1e-6)
        assert row["in_top"]
        assert row["operation"] == MADE[p].prompt.operation
    assert len({row["layer"] for row in found}) > 1, "one layer has all: the joint ranking shows nothing"


def test_ties_go_to_the_lower_layer_and_neuron(tmp_path: Path) -> None:
    model = scan_of("llama")
    for layer in range(3):
        model.down_projection(layer).weight.zero_()  # no neuron writes anything: every importance is 0
    found = stored(tmp_path, Neurons("head:0.1", keep="topk:50"), model).rows("SELECT * FROM neuron_changes")
    assert {(row["rank"], row["layer"], row["neuron"]) for row in found} == {
        (rank + 1, rank // 40, rank % 40) for rank in range(50)
    }


@pytest.mark.slow
@pytest.mark.parametrize("block", [4096, 5])
def test_summary_of_every_neuron_is_mean_and_spread_over_the_prompts(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scan_of("llama")
    everything = rows_of(Neurons("head:0.1", keep="all"), model)["neuron_scan"]
    columns = {
        name: grid(everything, name).astype(np.float64)
        for name in ("importance", "intervened_importance", "coefficient", "intervened_coefficient")
    }
    columns["change"] = columns["importance"] - columns["intervened_importance"]
    columns["coefficient_change"] = columns["coefficient"] - columns["intervened_coefficient"]
    monkeypatch.setattr("mathinterp.experiments.neurons.PROMPTS_A_SHARD", block)
    store = stored(tmp_path, Neurons("head:0.1", keep="topk:4"), model)
    top = store.rows("SELECT layer, neuron, operation, count(*) AS times FROM neuron_changes GROUP BY ALL")
    times = {(row["layer"], row["neuron"], row["operation"]): row["times"] for row in top}
    found = store.rows("SELECT * FROM neuron_summary")
    assert len(found) == 3 * 3 * 40  # add, sub and all; layers; neurons
    groups = {name: [i for i, p in enumerate(MADE) if p.prompt.operation == name] for name in ("add", "sub")}
    assert len({len(group) for group in groups.values()}) == 2, "operations of one size: weighing shows nothing"
    for row in found:
        layer, neuron = row["layer"], row["neuron"]
        chosen = [row["operation"]] if row["operation"] != "all" else list(groups)
        assert row["n"] == sum(len(groups[name]) for name in chosen)
        shares = [times.get((layer, neuron, name), 0) / len(groups[name]) for name in chosen]
        assert row["in_top"] == pytest.approx(np.mean(shares))
        for column, values in columns.items():
            parts = [values[groups[name], layer, neuron] for name in chosen]
            mean = np.mean([part.mean() for part in parts])
            spread = np.sqrt(np.mean([(part**2).mean() for part in parts]) - mean**2)
            assert row[column] == pytest.approx(mean, rel=1e-4, abs=1e-6)
            assert row[f"{column}_std"] == pytest.approx(spread, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptj"])
def test_shards_of_some_prompts_have_the_rows_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scan = scan_of(name), Neurons("head:0.1", keep="topk:7")

    def of_prompts() -> list[dict]:
        rows = rows_of(scan, model)["neuron_scan"].filter(pc.is_valid(pc.field("prompt_id"))).to_pylist()
        return sorted(rows, key=lambda row: (row["layer"], row["node"], row["prompt_id"], row["unit"]))

    whole = of_prompts()
    monkeypatch.setattr("mathinterp.experiments.neurons.PROMPTS_A_SHARD", 5)
    shards = [shard for shard in scan.shards(model.shape, MADE) if shard.table == "neuron_scan"]
    assert len(shards) == 3 * -(-len(MADE) // 5)
    assert sum(scan.evaluations(shard, MADE) for shard in shards) == 3 * 2 * len(MADE)
    plan = plan_scan(scan, model.shape, MADE, "float32")
    assert plan.rows == sum(table.num_rows for table in rows_of(scan, model).values())
    for row, expected in zip(of_prompts(), whole, strict=True):
        for column, value in expected.items():
            close = pytest.approx(value, rel=1e-6, abs=1e-9) if isinstance(value, float) else value
            assert row[column] == close


def test_blocks_and_heads_have_the_same_score(tmp_path: Path) -> None:
    model = scan_of("gptj")
    store = stored(tmp_path, Neurons(), model)
    assert store.rows("SELECT DISTINCT condition FROM neuron_scan") == [{"condition": "original"}]
    seen = [look(model, prompt.input_ids[: prompt.end + 1]) for prompt in MADE]
    heads = {
        (row["prompt_id"], row["layer"], row["head"]): row["importance"] for row in store.rows("FROM head_importance")
    }
    assert len(heads) == len(MADE) * 3 * 4
    blocks: dict[str, list[float]] = {"ffn": [], "attention": []}
    for prompt, run in zip(MADE, seen, strict=True):
        token = int(run.logits.argmax())
        expected = slow_head(model, 1, 2, run, run, token)
        assert heads[prompt.prompt.prompt_id, 1, 2] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        if prompt.prompt.operation == "add":
            s, r = spread(model, model.final_norm, run.last), run.x[1] + run.a[1]
            at = [log_probability(model, z, s, token) for z in (run.x[1], r, r + run.f[1])]
            blocks["attention"].append(float(at[1] - at[0]))
            blocks["ffn"].append(float(at[2] - at[1]))
    row = store.rows("FROM layer_importance WHERE layer = 1 AND operation = 'add'")[0]
    for name, values in blocks.items():
        assert row[name] == pytest.approx(np.mean(values), rel=1e-5)
    assert row["neurons_sum"] != pytest.approx(row["ffn"], rel=1e-3)  # reported, not forced


def test_another_model_is_tuned_minus_original_under_the_originals_scale(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tuned", "llama", seed=1, dtype=torch.float64)
    spec = ModelSpec(str(folder), dtype="float64")
    other = OtherModel(spec, resolve(spec).fingerprint, "tuned")
    model, tuned = scan_of("llama"), Anatomy(tiny_model("llama", seed=1))
    scan = Neurons(f"model:{folder}", keep="topk:40", layers=(2,), other=other)
    store = stored(tmp_path / "store", scan, model)
    p = MADE[3]
    original, run = (look(each, p.input_ids[: p.end + 1]) for each in (model, tuned))
    token, s = int(original.logits.argmax()), spread(model, model.final_norm, original.last)
    changes = store.rows(f"FROM neuron_changes WHERE prompt_id = '{p.prompt.prompt_id}' AND neuron IN (5, 20)")
    assert len(changes) == 2
    for row in changes:
        k, r = row["neuron"], run.x[2] + run.a[2]
        value = run.c[2][k] * tuned.down_projection(2).weight[:, k]
        expected = float(log_probability(tuned, r + value, s, token) - log_probability(tuned, r, s, token))
        assert row["intervened_importance"] == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert row["change"] == pytest.approx(expected - row["importance"], rel=1e-4, abs=1e-6)
    with pytest.raises(UserError, match="is not the driver's here"):
        replace(scan, other=replace(other, fingerprint="other")).prepare(Subject(model, MADE))


# ---- the command ----


def command(*words: str | int | Path) -> Result:
    return CliRunner().invoke(main, ["scan", "neurons", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "head:0.99"], "head 0.99 does not exist: each layer has heads 0 to 7"),
        (["--against", "head:1"], "write heads as head:17.22"),
        (["--against", "heads"], "cannot be read"),
        (["--against", "adapter:smollm2-arithmetic"], "was made for another base"),
        (["--against", "model:bundled"], "is bundled itself"),
        (["--keep", "topk:0"], "--keep 'topk:0' cannot be read"),
        (["--target", "best"], "'--target': 'best' is not one of 'predicted', 'gold'"),
        (["--rank", "best"], "'--rank': 'best' is not one of"),
        (["--layers", "8"], "layer 8 does not exist"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    result = command("--store", tmp_path, "--limit", "8", *words)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert message in result.stderr


def test_fields_are_read_from_text_and_wrong_ones_named() -> None:
    scan = Neurons("head:3.1,0.6,3.1", keep="topk:7", layers="0,2-3")
    assert (str(scan.against), str(scan.keep), scan.layers) == ("head:0.6,3.1", "topk:7", (0, 2, 3))
    assert (str(Neurons("model:a:b").against), str(Neurons(keep="all").keep)) == ("model:a:b", "all")
    for fields, message in (
        ({"against": "head"}, "`against` 'head' cannot be read"),
        ({"keep": "first"}, "`keep` 'first' cannot be read"),
        ({"target": "best"}, "`target` 'best' is not known; take one of predicted, gold"),
    ):
        with pytest.raises(UserError, match=message):
            Neurons(**fields)


def test_models_whose_neurons_or_tokens_differ_are_not_compared(tmp_path: Path) -> None:
    result = command("--store", tmp_path / "s", "--against", f"model:{save_tiny(tmp_path / 'tiny', 'llama')}")
    assert result.exit_code == 2
    assert result.stderr == "mathinterp: --against: tiny has n_layers 3, bundled has 8\n"


def test_keeping_more_than_the_disk_holds_is_refused_with_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=50_000_000)
    monkeypatch.setattr("mathinterp.experiments.neurons.against.shutil.disk_usage", lambda place: usage)
    result = command("--store", tmp_path / "new", "--keep", "all", "--against", "head:0.6")
    assert result.exit_code == 2
    shape = resolve(ModelSpec()).shape
    neurons = shape.n_layers * shape.n_neurons
    wanted = 8 * neurons * 1600 * 2 / 1e9
    assert f"about {wanted:.1f} GB ({neurons:,} neurons x 1,600 prompts x 2 condition(s))" in result.stderr
    assert "0.1 GB free" in result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.ray
def test_command_runs_resumes_and_says_what_changed(tmp_path: Path) -> None:
    words = ["--store", tmp_path, "--limit", 16, "--against", "head:0.6", "--keep", "topk:5", "--replicas", 1, "--json"]
    first = command(*words)
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert (found["shards"], found["shards_done"]) == (9, 9)
    assert found["top"][0]["operation"] == "all"
    store = Store(tmp_path)
    best = store.rows("SELECT layer || '.' || neuron AS neuron, change FROM neuron_summary WHERE operation = 'all' "
                      "ORDER BY change DESC LIMIT 1")[0]  # fmt: skip
    assert found["top"][0]["neuron"] == best["neuron"]
    assert store.rows("SELECT count(*) AS n FROM neuron_changes") == [{"n": 5 * 16}]
    assert store.rows("SELECT notes ->> 'against' AS a FROM runs") == [{"a": "head:0.6"}]
    (tmp_path / "neuron_scan" / f"run_id={found['run_id']}" / "shard-00003.parquet").unlink()
    again = json.loads(command(*words).stdout)
    assert (again["run_id"], again["shards_reused"], again["shards_done"]) == (found["run_id"], 8, 1)
    assert again["top"] == found["top"]


# ---- published values ----


@pytest.mark.skipif("MATHINTERP_LLAMA_7B" not in os.environ, reason="MATHINTERP_LLAMA_7B names no Llama-1-7B folder")
def test_published_neurons_of_three_plus_five() -> None:
    """Paper A on "3+5=" with head 17.22 zeroed: (change, importance, intervened importance, coefficients), float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load(ModelSpec(os.environ["MATHINTERP_LLAMA_7B"], dtype="float32"), device)
    prompts = tokenize_prompts([Prompt("golden", "3+5=", "8", separator="")], loaded.tokenizer)
    scan = Neurons("head:17.22", keep="all")
    state = scan.prepare(Subject(loaded.anatomy, prompts))
    tables = [scan.run(state, shard) for shard in scan.shards(loaded.anatomy.shape, prompts)]
    original, intervened = tables[-1].to_pylist()
    assert np.exp(original["logprob"]) == pytest.approx(0.37760, abs=2e-4)
    assert np.exp(intervened["logprob"]) == pytest.approx(0.06160, abs=2e-4)
    assert loaded.tokenizer.decode([intervened["predicted_id"]]) == "6"
    rows = [
        row
        for table in tables[:-1]
        for row in table.filter((pc.field("node") == "neuron") & pc.is_valid(pc.field("prompt_id"))).to_pylist()
    ]
    rows.sort(key=lambda row: row["intervened_importance"] - row["importance"])
    names = [f"{row['layer']}_{row['unit']}" for row in rows[:5]]
    assert names == ["28_3696", "25_7164", "29_10957", "19_5769", "29_6563"]
    changes = [row["importance"] - row["intervened_importance"] for row in rows[:5]]
    np.testing.assert_allclose(changes, [0.6964, 0.2327, 0.1384, 0.1348, 0.1322], atol=5e-4)
    first = [rows[0][name] for name in ("importance", "intervened_importance", "coefficient", "intervened_coefficient")]
    np.testing.assert_allclose(first, [0.8229, 0.1265, -6.2005, -0.9502], atol=2e-3)
