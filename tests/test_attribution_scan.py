"""Attribution as an experiment: its rows are the engine's, its yardstick is plain patching, and mistakes are told."""

from pathlib import Path

import numpy as np
import pytest

import mathinterp as mi
from mathinterp.engine.attribution.estimate import estimate
from mathinterp.engine.attribution.methods import METHODS as ENGINE_METHODS
from mathinterp.engine.attribution.methods import passes_of
from mathinterp.engine.attribution.pairs import places_of
from mathinterp.errors import UserError
from mathinterp.experiments import attribution
from mathinterp.experiments.attribution import Attribution
from mathinterp.experiments.attribution.ranking import node_scores
from mathinterp.experiments.attribution.summary import _verdict
from mathinterp.experiments.attribution.tables import METHODS
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mlps import Mlps
from mathinterp.experiments.paths import Paths
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.alignment import tokenize_prompts
from tests import attribution_twin as twin
from tests.attribution_twin import contrasts
from tests.charts import table_of
from tests.tiny import tiny_model

pytestmark = pytest.mark.bundled
PROMPTS = mi.prompts("operand_pairs", limit=5)
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}  # rows are stored so


@pytest.fixture(scope="module")
def model():
    return mi.load("bundled", device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("attribution"))


def test_the_names_are_the_engines() -> None:
    assert tuple(ENGINE_METHODS) == METHODS


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_the_engines_whatever_the_files(model, store, monkeypatch, method: str) -> None:
    monkeypatch.setattr(attribution, "PROMPTS_PER_FILE", 2)
    scan = Attribution(method=method, steps=2, neurons=method == "atp")
    run = mi.run(scan, model, PROMPTS, store=store, progress=False)
    rows = run.table("node_attributions")
    assert set(rows["method"]) == {method}
    assert run.ended.shards == 3
    with model.lent() as loaded:
        shape, items = loaded.anatomy.shape, tokenize_prompts(PROMPTS, loaded.tokenizer)
        places = places_of(loaded.anatomy, scan.neurons)
        expected, _ = estimate(loaded.anatomy, items, places, method=method, steps=2)
    planned = mi.plan(scan, model, PROMPTS, store=store)
    assert planned is not None
    assert len(rows) == planned.rows == len(PROMPTS) * scan.nodes(shape)
    names = [item.prompt.prompt_id for item in items]
    for (site, layer), values_PU in expected.items():
        own = rows[(rows["node"] == site) & (rows["layer"] == layer)]
        unit = own["head"] if site == "head" else own["neuron"] if site == "neuron" else own["layer"] * 0
        wide = own.assign(unit=unit.astype(int)).pivot(index="prompt_id", columns="unit", values="effect").loc[names]
        np.testing.assert_allclose(wide.to_numpy(float), values_PU.numpy(), **FLOAT32)
    (notes,) = run.sql(
        """SELECT (notes ->> 'forwards_per_prompt')::INTEGER AS f, (notes ->> 'backwards_per_prompt')::INTEGER AS b
           FROM runs WHERE run_id = $run"""
    ).to_dict("records")
    assert (notes["f"], notes["b"]) == passes_of(method, shape.n_layers, 2)
    shown = run.summary.data["top"]
    means = run.sql("SELECT * FROM node_attribution_effects WHERE run_id = $run AND operation = 'all'")
    assert abs(shown[0]["effect"]) == pytest.approx(means["effect"][means["node"] != "neuron"].abs().max())
    first, said = shown[0], run.summary.data["verdict"]
    assert said.startswith("Largest estimated change of the logit difference: over all operations ")
    named = f"head {first['node']}" if first["node"][0].isdigit() else first["node"]
    assert f" {first['effect']:.3g} of {named} (n = {len(PROMPTS)})" in said, (
        "one prompt of an operation has no interval"
    )
    assert ("neuron" in said) == any(row["node"].startswith("neuron") for row in shown)
    drawn = table_of(run.figure(), "effect").query("operation == 'all'")
    assert sorted(drawn["effect"]) == pytest.approx(sorted(means["effect"][means["node"] != "neuron"]), rel=1e-3)


def test_the_finding_is_the_largest_effect_of_either_sign_with_its_place_interval_and_n() -> None:
    rows = [
        ("all", "mlp 3", -2.25, 40), ("all", "0.6", 1.5, 40), ("all", "neuron 1.7", 0.5, 40), ("add", "0.6", 1.0, 25),
        ("sub", "0.6", -3.0, 15), ("sub", "neuron 1.7", 9.0, 15),
    ]  # fmt: skip
    ranked = [
        {"operation": operation, "node": node, "n": n, "effect": effect, "low": effect - 1, "high": effect + 1}
        for operation, node, effect, n in rows
    ]
    assert _verdict(ranked) == (
        "Largest estimated change of the logit difference: over all operations -2.25 of mlp 3 (95 % interval -3.25 to"
        " -1.25, n = 40); in sub -3 of head 0.6 (95 % interval -4 to -2, n = 15); over all operations 0.5 of neuron 1.7"
        " (95 % interval -0.5 to 1.5, n = 40)."
    )
    one = [{**row, "operation": operation} for row in ranked[:1] for operation in ("all", "add")]
    assert "in add" not in _verdict(one), "it has the same figures"
    assert _verdict([]) == ""


def test_an_effect_that_is_no_number_is_not_the_finding() -> None:
    rows = [("all", "0.1", None), ("all", "mlp 3", 2.0), ("add", "0.1", None), ("sub", "0.1", None)]
    ranked = [
        {"operation": operation, "node": node, "n": 4, "effect": effect, "low": None, "high": None}
        for operation, node, effect in rows
    ]
    assert (
        _verdict(ranked) == "Largest estimated change of the logit difference: over all operations 2 of mlp 3 (n = 4)."
    )
    assert _verdict(ranked[:1]) == ""


def test_exact_effects_are_those_of_plain_patching(model, store) -> None:
    runs = [
        mi.run(scan, model, PROMPTS, store=store, progress=False)
        for scan in (Heads(layers="0,5", ablation="resample", positions="all"),
                     Mlps(layers="0,5", ablation="resample", positions="all"))
    ]  # fmt: skip
    with model.lent() as loaded:
        items = tokenize_prompts(PROMPTS, loaded.tokenizer)
        for run, site, unit in ((runs[0], "head", 3), (runs[1], "mlp", None)):
            rows = run.table("exact_node_effects").set_index(["layer", "prompt_id"])
            assert set(rows["positions"]) == {"all"}
            for layer in (0, 5):
                own = rows[rows["head"] == unit] if unit is not None else rows
                for item in items:
                    exact = twin.exact(loaded.anatomy, item, (site, layer), unit)
                    found = own.loc[(layer, item.prompt.prompt_id), "effect"]
                    assert float(found) == pytest.approx(exact, abs=2e-5)


def test_scores_of_nodes_are_means_over_prompts_of_any_run_that_has_them(model, store) -> None:
    scans = {
        "node_attributions": Attribution(),
        "head_scan": Heads(layers="1", ablation="resample", positions="all"),
        "mlp_scan": Mlps(layers="1", ablation="zero"),
        "path_scan": Paths(layers="1", keep_all=True),
    }
    runs = {table: mi.run(scan, model, PROMPTS, store=store, progress=False) for table, scan in scans.items()}
    opened = mi.open_store(store)
    scores = {table: node_scores(opened, run.id).set_index(["node", "layer", "unit"]) for table, run in runs.items()}
    rows = runs["node_attributions"].table("node_attributions")
    own = rows[(rows["node"] == "head") & (rows["layer"] == 2) & (rows["head"] == 4)]["effect"]
    assert scores["node_attributions"].loc[("head", 2, 4), "score"] == pytest.approx(own.astype(float).mean())
    assert len(scores["node_attributions"]) == 72
    exact = runs["head_scan"].table("exact_node_effects")
    assert scores["head_scan"].loc[("head", 1, 4), "score"] == pytest.approx(exact[exact["head"] == 4]["effect"].mean())
    assert len(scores["mlp_scan"]) == 1
    weighted = runs["mlp_scan"].sql(
        "SELECT sum(change * n) / sum(n) AS m FROM logit_difference_effects WHERE run_id = $run AND operation <> 'all'"
    )
    assert scores["mlp_scan"]["score"].iloc[0] == pytest.approx(weighted["m"][0])
    assert len(scores["path_scan"]) == 9
    bare = mi.run(
        Heads(layers="1"), model, [{"text": "3 + 5 =", "answer": "8"}], store=store, progress=False
    )  # fmt: skip
    with pytest.raises(UserError, match="no distractors"):
        node_scores(opened, bare.id)


def test_mistakes_are_told_before_anything_runs(model, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    for scan, prompts, said in (
        (lambda: Attribution(method="eap"), None, "`method` 'eap' is not known"),
        (lambda: Attribution(steps=0), None, "`steps`"),
        (Attribution, mi.prompts("pairs", limit=4), "has no distractor"),
        (
            Attribution,
            [{"text": "3 + 5 =", "answer": "18", "distractor": "19", "counterfactual": "4 + 5 ="}],
            "begins with the answer's first token",
        ),
    ):
        with pytest.raises(UserError, match=said):
            mi.run(scan(), model, prompts, store=str(folder), progress=False)
    assert not folder.exists() or not list(folder.glob("runs/*"))


def test_mixtures_have_no_rules_and_no_neurons() -> None:
    shape = Anatomy(tiny_model("mixtral")).shape
    for scan in (Attribution(method="relp"), Attribution(neurons=True)):
        with pytest.raises(UserError, match="mixtures of experts"):
            scan.shards(shape, contrasts())
    assert Attribution(method="atp-star").shards(shape, contrasts())


def test_every_prompt_of_operand_pairs_reads_as_its_distractors_sentence() -> None:
    prompts = mi.prompts("operand_pairs")
    texts = {(p.operation, p.template, p.text): p.answer for p in prompts}
    assert len(prompts) == 1600
    for prompt in prompts:
        assert texts[prompt.operation, prompt.template, prompt.counterfactual] == prompt.distractor
        assert prompt.distractor[0] != prompt.answer[0]
        assert len(prompt.counterfactual) == len(prompt.text)
