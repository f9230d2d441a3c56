"""Operand maps of a model: activations are those of one sentence alone, rows and views too, mistakes are told."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import mathinterp as mi
from mathinterp.engine.hooks import edited_input
from mathinterp.engine.intervention import Tokens
from mathinterp.engine.packed import PackedEngine
from mathinterp.engine.plain import PlainEngine
from mathinterp.errors import UserError
from mathinterp.experiments import Subject
from mathinterp.experiments.operand_map import OperandMap
from mathinterp.experiments.operand_map.keeping import effects, kept_neurons
from mathinterp.experiments.operand_map.measures import Measures
from mathinterp.experiments.operand_map.rows import MapState, baseline_rows, keep_rows, layer_rows, rounded
from mathinterp.face import Run
from mathinterp.models.anatomy import Anatomy
from mathinterp.models.ground_truth import PLANTED
from tests.attribution_twin import precise
from tests.operand_twin import Alone, prompts_of, tiny_pairs
from tests.tiny import of_neurons, save_tiny, tiny_model

ITEMS = tiny_pairs()
SCAN = OperandMap(ks=(12, 3), deep_layers=(1, 2), sample=20, shuffles=1, every_map=True)


def prepared(anatomy: Anatomy, scan: OperandMap = SCAN) -> MapState:
    return scan.prepare(Subject(anatomy, ITEMS))


# ---- float64, every family ----


@of_neurons
def test_maps_are_those_of_one_sentence_alone(anatomy: Anatomy) -> None:
    state = prepared(anatomy)
    for layer in range(anatomy.shape.n_layers):
        heads, (neurons_KP, _) = state.maps.heads(layer), state.maps.neurons(layer)
        for place in (0, 41, 99):
            alone = Alone(anatomy, state.prompts[place])
            torch.testing.assert_close(neurons_KP[:, place], alone.seen[f"neurons {layer}"], rtol=1e-6, atol=1e-9)
            for head in range(anatomy.shape.n_heads):
                output_D = alone.head_output(layer, head)
                assert float(heads["norm"][head, place]) == pytest.approx(float(output_D.norm()), rel=1e-6)
                if anatomy.attention_post_norm(layer) is None:
                    assert float(heads["answer"][head, place]) == pytest.approx(alone.share(output_D), abs=1e-6)


@pytest.mark.slow
@of_neurons
def test_shares_of_embedding_heads_neurons_and_biases_sum_to_the_answers_logit(anatomy: Anatomy) -> None:
    state = prepared(anatomy)
    total = 0.0
    for layer in range(anatomy.shape.n_layers):
        total += float(state.maps.heads(layer)["answer"].sum(0).mean()) + float(state.maps.neurons(layer)[1].sum())
    expected = []
    for item in state.prompts:
        alone = Alone(anatomy, item)
        rest = alone.share(alone.seen["embedding"])
        for layer in range(anatomy.shape.n_layers):
            for module in (anatomy.output_projection(layer), anatomy.down_projection(layer)):
                if getattr(module, "bias", None) is not None:
                    rest += alone.share(module.bias)
        expected.append(alone.centred_logit() - rest)
    assert total == pytest.approx(np.mean(expected), rel=1e-5, abs=1e-5)


@pytest.mark.slow
@of_neurons
def test_keeping_few_neurons_is_ablating_the_others_at_end_in_plain_passes(anatomy: Anatomy) -> None:
    for ablation in ("mean", "zero"):
        state = prepared(anatomy, replace(SCAN, ablation=ablation))
        rows = keep_rows(state).to_pandas().set_index(["ranking", "k", "prompt_id"])["logprob"]
        assert len(rows) == 5 * len(ITEMS)
        values = {layer: state.maps.neurons(layer)[0].mean(1) * (ablation == "mean") for layer in (1, 2)}
        for item in (state.prompts[7], state.prompts[60]):
            for ranking, k in (("top", 0), ("top", 3), ("random", 12)):
                kept = {layer: kept_neurons(state.size_LK[layer], ranking, k, 0, layer) for layer in (1, 2)}
                assert [int(own.sum()) for own in kept.values()] == [k, k]
                expected = _logprob(anatomy, item, {layer: (~kept[layer], values[layer]) for layer in (1, 2)})
                assert rows[ranking, k, item.prompt.prompt_id] == pytest.approx(expected, abs=2e-5)
        baseline = baseline_rows(state).to_pandas().set_index("prompt_id")["logprob"]
        assert baseline[item.prompt.prompt_id] == pytest.approx(_logprob(anatomy, item, {}), abs=2e-5)


def _logprob(anatomy: Anatomy, item, ablated: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Of the first answer token, with some neurons of some layers replaced at END."""
    from contextlib import ExitStack

    def edit(mask_K: torch.Tensor, value_K: torch.Tensor):
        def edited(values_BTK: torch.Tensor) -> torch.Tensor:
            changed = values_BTK.clone()
            changed[0, -1] = torch.where(mask_K, value_K, values_BTK[0, -1])
            return changed

        return edited

    with ExitStack() as hooks, torch.no_grad():
        for layer, change in ablated.items():
            hooks.enter_context(edited_input(anatomy.down_projection(layer), edit(*change)))
        logits_V = anatomy.model(torch.tensor([item.input_ids[: item.end + 1]])).logits[0, -1]
    return float(logits_V.log_softmax(-1)[item.scored[0].token_id])


@pytest.mark.parametrize("ablation", ["mean", "zero"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_effects_are_derivatives_of_the_log_odds(family: str, ablation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    anatomy = precise(family, monkeypatch)
    items = [replace(item, scored=item.scored[:1]) for item in ITEMS[:6]]
    signed_LK, size_LK = effects(anatomy, items, ablation)
    alone = [Alone(anatomy, item) for item in items]
    for layer, neuron in ((0, 3), (2, 17)):
        values_P = torch.stack([one.seen[f"neurons {layer}"][neuron] for one in alone])
        changes = []
        for item, own, value in zip(items, alone, values_P, strict=True):
            mask_K = torch.arange(anatomy.shape.n_neurons) == neuron
            odds = []
            for step in (1e-4, -1e-4):
                logprob = _logprob(anatomy, item, {layer: (mask_K, own.seen[f"neurons {layer}"] + step)})
                odds.append(logprob - np.log1p(-np.exp(logprob)))
            target = float(values_P.mean()) if ablation == "mean" else 0.0
            changes.append((target - float(value)) * (odds[0] - odds[1]) / 2e-4)
        assert float(signed_LK[layer, neuron]) == pytest.approx(np.mean(changes), rel=1e-5, abs=1e-8)
        assert float(size_LK[layer, neuron]) == pytest.approx(np.abs(changes).mean(), rel=1e-5, abs=1e-8)


def test_neurons_are_ranked_by_the_effect_of_the_ablation_that_is_asked_for() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    every = replace(SCAN, sample=len(ITEMS))
    for ablation in ("mean", "zero"):
        state = prepared(anatomy, replace(every, ablation=ablation))
        torch.testing.assert_close(state.size_LK, effects(anatomy, state.prompts, ablation)[1])
    assert not torch.allclose(state.size_LK, prepared(anatomy, every).size_LK)


@of_neurons
def test_both_engines_tell_what_the_final_norm_reads(anatomy: Anatomy) -> None:
    last, ends = anatomy.shape.n_layers, Tokens.ends(ITEMS[:9])
    packed, plain = (
        kind(anatomy, ITEMS[:9]).activations("residual", last, ends) for kind in (PackedEngine, PlainEngine)
    )
    torch.testing.assert_close(packed, plain, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(plain[4], Alone(anatomy, ITEMS[4]).seen["final"], rtol=1e-6, atol=1e-8)


def test_random_neurons_are_the_same_for_every_k_and_others_in_other_layers() -> None:
    size_K = torch.rand(50)
    few, many = (kept_neurons(size_K, "random", k, 1, 2) for k in (5, 20))
    assert (few <= many).all()
    assert not torch.equal(many, kept_neurons(size_K, "random", 20, 1, 3))
    assert not torch.equal(many, kept_neurons(size_K, "random", 20, 2, 2))
    assert set(kept_neurons(size_K, "top", 3, 0, 0).nonzero()[:, 0].tolist()) == set(size_K.topk(3).indices.tolist())


def test_rows_hold_the_maps_themselves_and_their_means() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    state = prepared(anatomy)
    rows = layer_rows(state, 1).to_pandas()
    neurons_KP, direct_K = state.maps.neurons(1)
    own = rows[rows["node"] == "neuron"]
    assert list(own["neuron"]) == list(range(anatomy.shape.n_neurons))
    np.testing.assert_array_equal(np.stack(own["map"]), rounded(neurons_KP.float().numpy()))
    np.testing.assert_allclose(own["mean"], neurons_KP.mean(1), rtol=1e-6)
    np.testing.assert_allclose(own["spread"], neurons_KP.std(1, correction=0), rtol=1e-6)
    np.testing.assert_allclose(own["direct"], direct_K, rtol=1e-6)
    np.testing.assert_allclose(own["effect_size"], state.size_LK[1], rtol=1e-6)
    norms = rows[rows["measure"] == "norm"]
    np.testing.assert_array_equal(np.stack(norms["map"]), rounded(state.maps.heads(1)["norm"].float().numpy()))


def test_a_heads_map_has_the_rounding_of_a_sum_and_constant_maps_are_kept_last() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    state = prepared(anatomy, replace(SCAN, every_map=False, maps=3))
    state.measures = Measures(state.grid, anatomy.device, torch.bfloat16, shuffles=1, seed=0)
    even_P = torch.from_numpy(1 + 0.04 * (state.grid.b_P % 2 == 0))  # a spread of .02 beside 4 roundings, .03
    state.maps.heads = lambda layer: {"norm": even_P.expand(4, -1)}  # type: ignore[method-assign]
    neurons_KP = torch.stack([even_P, torch.zeros_like(even_P), 100 * (even_P - 1), 50 * (even_P - 1), even_P - 1])
    state.maps.neurons = lambda layer: (neurons_KP, torch.zeros(5))  # type: ignore[method-assign]
    state.effect_LK, state.size_LK = torch.zeros(2, 3, 5)
    rows = layer_rows(state, 1).to_pandas()
    assert set(rows[rows["node"] == "head"]["heuristic"]) == {"b mod 2 = 0"}
    own = rows[rows["node"] == "neuron"]
    assert list(own["heuristic"].isna()) == [True, True, False, False, False]
    assert list(own["map"].notna()) == [False, False, True, True, True]


def test_a_number_that_is_none_is_named() -> None:
    anatomy = Anatomy(tiny_model("llama"))
    state = prepared(anatomy)
    state.maps.heads = lambda layer: {"norm": torch.full((4, len(ITEMS)), torch.nan)}  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match=r"head 1\.0: norm is nan on prompt \d+\+\d+"):
        layer_rows(state, 1)


# ---- rows of the bundled model ----

PROMPTS = mi.prompts("operands_add", limit=144)
BUNDLED = OperandMap(layers=(0, 7), maps=5, ks=(50,), sample=40)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    store = str(tmp_path_factory.mktemp("operands"))
    return mi.run(BUNDLED, mi.load("bundled", device="cpu"), PROMPTS, store=store, progress=False)


@pytest.mark.bundled
def test_rows_and_views_are_there_as_planned(run: Run) -> None:
    units = run.table("operand_units")
    shape = mi.load("bundled", device="cpu").described.shape
    assert len(units) == 2 * (2 * shape.n_heads + shape.n_neurons)
    planned = mi.plan(BUNDLED, mi.load("bundled", device="cpu"), PROMPTS, store=run.store.url)
    assert planned is not None
    assert planned.rows == len(units) + (1 + 1 + 3) * len(PROMPTS)
    assert set(units[units["node"] == "head"]["measure"]) == {"norm", "answer"}
    assert (units["auroc"].dropna() >= 0.5).all()
    families = units.filter(like="auroc_").max(axis=1)
    np.testing.assert_array_equal(families.dropna(), units["auroc"].dropna())
    kept = units[units["map_kept"]]
    assert (kept["node"] == "neuron").sum() == 2 * 5
    assert (kept["node"] == "head").sum() == 2 * 2 * shape.n_heads
    faithful = run.table("operand_faithfulness").set_index(["ranking", "k"])
    assert set(faithful.index) == {("top", 0), ("top", 50), ("random", 50)}
    assert (faithful["drop_low"] <= faithful["drop"]).all()
    assert faithful.loc[("top", 0), "faithfulness"] == 0
    correct = run.table("operand_keep_scan").groupby(["ranking", "k"])["correct"].mean()
    assert faithful.loc[("top", 50), "accuracy"] == pytest.approx(correct["top", 50])


@pytest.mark.bundled
def test_stored_maps_are_the_models_activations_rounded(run: Run) -> None:
    maps = run.table("operand_maps")
    assert len(maps) == (2 * 5 + 2 * 2 * 8) * len(PROMPTS)
    own = maps[maps["node"] == "neuron"]
    layer, neuron = (int(own[name].iloc[0]) for name in ("layer", "neuron"))
    with mi.load("bundled", device="cpu").lent() as loaded:
        state = BUNDLED.prepare(Subject(loaded.anatomy, _tokenized(loaded)))
        expected_KP = state.maps.neurons(layer)[0]
    found = own[(own["layer"] == layer) & (own["neuron"] == neuron)].sort_values(["a", "b"])
    assert list(zip(found["a"], found["b"], strict=True)) == list(zip(state.grid.a_P, state.grid.b_P, strict=True))
    np.testing.assert_array_equal(found["value"], rounded(expected_KP[neuron].numpy()))
    (file, *_) = sorted(Path(run.store.url).glob("operand_unit_maps/*/*.parquet"))
    columns = pq.ParquetFile(file).metadata.row_group(0)
    encodings = {columns.column(i).path_in_schema: columns.column(i).encodings for i in range(columns.num_columns)}
    assert "BYTE_STREAM_SPLIT" in encodings["map.list.element"]


def _tokenized(loaded) -> list:
    from mathinterp.prompts.alignment import tokenize_prompts

    return tokenize_prompts(PROMPTS, loaded.tokenizer)


@pytest.mark.bundled
def test_the_summary_and_the_figure_say_what_the_rows_say(run: Run) -> None:
    units = run.table("operand_units")
    neurons = units[(units["node"] == "neuron") & units["auroc"].notna()]
    data = run.summary.data
    assert sum(row["neurons"] for row in data["families"]) == len(neurons)
    assert sum(row["explained"] for row in data["families"]) == (neurons["auroc"] >= 0.9).sum()
    assert data["neurons"][0]["auroc"] == pytest.approx(neurons["auroc"].max())
    accuracy = run.table("operand_faithfulness").set_index(["ranking", "k"]).loc[("top", 50), "accuracy"]
    assert f"first answer token is right in {100 * accuracy:.4g} % of the pairs" in str(run.summary)
    assert "of 0.9 or more, most often " in str(run.summary)
    titles = [part["title"] for part in run.figure().to_dict()["concat"] if isinstance(part["title"], dict)]
    heads = [" ".join(title["subtitle"]) for title in titles if "head " in title["text"]]
    assert len(heads) == 2
    assert all("where" in title and "AUROC" in title and "shuffled" in title for title in heads)
    assert len(run.summarize(top=3).data["heads"]) == 3


@pytest.mark.bundled
def test_a_run_goes_on_where_it_was_and_gives_the_same_rows(run: Run) -> None:
    store, model = run.store.url, mi.load("bundled", device="cpu")
    before = run.sql("SELECT * FROM operand_unit_maps WHERE run_id = $run ORDER BY layer, node, measure, head, neuron")
    file = sorted(Path(store).glob("operand_unit_maps/*/*.parquet"))[1]
    file.unlink()
    again = mi.run(BUNDLED, model, PROMPTS, store=store, progress=False)
    assert (again.id, again.complete) == (run.id, True)
    after = again.sql("SELECT * FROM operand_unit_maps WHERE run_id = $run ORDER BY layer, node, measure, head, neuron")
    assert before.drop(columns="map").equals(after.drop(columns="map"))
    for one, two in zip(before["map"], after["map"], strict=True):
        np.testing.assert_array_equal(one, two)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ablation": "resample"}, "`ablation` 'resample' is not known; take one of mean, zero"),
        ({"ks": "0"}, "`ks` '0' cannot be read"),
        ({"ks": ()}, "name at least one"),
        ({"sample": 1}, "`sample`"),
        ({"shuffles": 0}, "`shuffles`"),
    ],
)
def test_bad_values_are_told(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        OperandMap(**fields)


def test_more_neurons_than_there_are_and_mixtures_of_experts_are_refused_before_anything_loads(tmp_path: Path) -> None:
    shape = Anatomy(tiny_model("llama")).shape
    with pytest.raises(UserError, match="`ks` 40: a layer has 40 neurons; keep fewer"):
        OperandMap(ks=(40,)).shards(shape, ITEMS)
    assert OperandMap().chosen_ks(shape) == [10]
    assert [shard.table for shard in OperandMap(layers="2").shards(shape, ITEMS)].count("operand_unit_maps") == 1
    mixture = save_tiny(tmp_path / "mixture", "mixtral")
    given = prompts_of([divmod(i, 100) for i in range(100)])
    with pytest.raises(UserError, match="single neurons are not supported"):
        mi.run(OperandMap(), str(mixture), given, store=str(tmp_path / "store"), progress=False)
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_model_that_cannot_say_the_numbers_is_told_so_in_one_line(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"7":', '"seventh":'), encoding="utf-8")
    with pytest.raises(UserError, match="the tokenizer does not know '7'") as error:
        mi.run(OperandMap(), str(folder), "operands_add", store=str(tmp_path / "store"), progress=False)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_written_models_residue_neurons_are_named(tmp_path: Path) -> None:
    """Ten neurons of MLP 2 fire where the sum modulo 10 is theirs, by their weights (models/ground_truth/clock.py)."""
    planted = PLANTED["clock"]()
    model = mi.wrap(planted.model(), planted.tokenizer, name="clock")
    run = mi.run(OperandMap(ks=(8,), shuffles=1), model, mi.prompts(planted.prompts), store=str(tmp_path))
    units = run.sql(
        "SELECT neuron, heuristic, high, auroc, shuffled FROM operand_units WHERE layer = 2 AND node = 'neuron'"
    )
    named = units[units["heuristic"] == "result mod 10 = " + units["neuron"].astype(str)]
    assert sorted(named["neuron"]) == list(range(10))
    assert named["high"].all()
    assert (named["auroc"] > 0.999).all()
    assert (named["shuffled"] < 0.6).all()
