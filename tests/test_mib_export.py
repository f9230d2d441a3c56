"""Every scan that scores nodes travels as MIB's JSON: plain means of its rows, in the form EAP-IG reads."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.experiments.attribution import Attribution
from mathinterp.experiments.attribution.ranking import node_scores
from mathinterp.experiments.circuit.mib_json import read_circuit
from mathinterp.experiments.circuit.ranking import scores_from
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.mask import Mask
from mathinterp.experiments.mlps import Mlps
from mathinterp.experiments.paths import Paths

pytestmark = [pytest.mark.bundled, pytest.mark.slow]
CONTRASTS = mi.prompts("operand_pairs", limit=4)
PLAIN = mi.prompts("two_digit", limit=8)  # without distractors
SCANS = {
    "heads": Heads(ablation="resample"), "mlps": Mlps(ablation="resample"), "paths": Paths(layers="0-1"),
    "attribution": Attribution(method="relp"), "mask": Mask(steps=2),
}  # fmt: skip
SCORED = {"heads": 64, "mlps": 8, "paths": 18, "attribution": 72, "mask": 72}


@pytest.fixture(scope="module")
def model():
    return mi.load("bundled", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("exported"))


def exported(store: str, run: str, file: Path, *words: str) -> dict:
    done = CliRunner().invoke(
        main, ["mib", "export", "--from", run, "--store", store, "--dtype", "float32", "--out", str(file), *words]
    )
    assert done.exit_code == 0, done.output
    return json.loads(file.read_text())


def check_form(graph: dict) -> None:
    """What EAP-IG's Graph.from_json looks up: for every node and edge of the model, with these types."""
    layers, heads = graph["cfg"]["n_layers"], graph["cfg"]["n_heads"]
    own = {f"a{layer}.h{head}" for layer in range(layers) for head in range(heads)} | {f"m{i}" for i in range(layers)}
    assert set(graph["nodes"]) == own | {"input", "logits"}
    for node in graph["nodes"].values():
        assert type(node["in_graph"]) is bool
        assert type(node.get("score", 0.0)) is float
    edges = 0
    for layer in range(layers):
        before = 1 + layer * (heads + 1)
        edges += 3 * heads * before + before + heads
    assert len(graph["edges"]) == edges + 1 + layers * (heads + 1)
    for name, edge in graph["edges"].items():
        parent, _, child = name.partition("->")
        assert {parent, child.partition("<")[0]} <= set(graph["nodes"])
        assert type(edge["score"]) is float
        assert type(edge["in_graph"]) is bool


@pytest.mark.parametrize("scan", SCANS)
def test_scores_of_a_run_are_in_the_file_and_are_read_back(tmp_path: Path, model, store: str, scan: str) -> None:
    run = mi.run(SCANS[scan], model, CONTRASTS, store=store, progress=False)
    graph = exported(store, run.id, tmp_path / "importances.json", "--fraction", "0.25")
    check_form(graph)
    scores = {name: node["score"] for name, node in graph["nodes"].items() if "score" in node}
    assert len(scores) == SCORED[scan] == graph["mathinterp"]["scored"]
    found = node_scores(mi.open_store(store), run.id).query("node != 'neuron'")
    for row in found.itertuples():
        name = f"m{row.layer}" if row.node == "mlp" else f"a{row.layer}.h{int(row.unit)}"
        assert scores[name] == pytest.approx(-row.score, rel=1e-6)
    first = sorted(scores, key=lambda name: -abs(scores[name]))[: SCORED[scan] // 4]
    held = {name for name in scores if graph["nodes"][name]["in_graph"]}
    assert sorted(abs(scores[name]) for name in held) == sorted(abs(scores[name]) for name in first)
    back = read_circuit(tmp_path / "importances.json", "node", model.described.shape)
    assert back.fingerprint == scores_from(mi.open_store(store), [run.id], "node", model.described).fingerprint
    said = graph["mathinterp"]
    assert (said["runs"], said["effect"], said["ordering"]) == ([run.id], "logit_difference", "absolute")
    assert (said["model"], said["model_fingerprint"]) == ("bundled", model.described.fingerprint)


def test_without_distractors_scores_are_of_the_answers_log_probability(tmp_path: Path, model, store: str) -> None:
    run = mi.run(Heads(layers="0-1"), model, PLAIN, store=store, progress=False)
    with pytest.raises(UserError, match="its prompts have no distractors"):
        node_scores(mi.open_store(store), run.id)
    graph = exported(store, run.id, tmp_path / "importances.json", "--effect", "logprob")
    check_form(graph)
    key = ["prompt_id", "position"]
    before = run.table("baseline").set_index(key)["logprob"].astype(np.float64)
    for (layer, head), rows in pd.DataFrame(run.table("head_scan")).groupby(["layer", "head"]):
        change = rows.set_index(key)["logprob"].astype(np.float64) - before
        assert graph["nodes"][f"a{layer}.h{head}"]["score"] == pytest.approx(-change.mean(), rel=1e-5, abs=1e-9)
    assert "score" not in graph["nodes"]["m0"]
    assert graph["nodes"]["m0"]["in_graph"]  # what has no score stays
    assert graph["mathinterp"]["method"] == "zero, log-probability"
    paths = mi.run(Paths(layers="0"), model, mi.prompts("pairs", limit=4), store=store, progress=False)
    found = node_scores(mi.open_store(store), paths.id, "logprob")
    means = pd.DataFrame(paths.table("path_scan")).groupby(["node", "head"], dropna=False)["logprob_change"].mean()
    assert sorted(found["score"]) == pytest.approx(sorted(means), rel=1e-5)


def test_an_effect_that_a_scan_does_not_store_is_refused(model, store: str) -> None:
    run = mi.run(SCANS["attribution"], model, CONTRASTS, store=store, progress=False)
    with pytest.raises(
        UserError, match="is a scan of attribution, which ranks no nodes by logprob; take one of 'heads'"
    ):
        node_scores(mi.open_store(store), run.id, "logprob")
    with pytest.raises(UserError, match="`effect` 'drop' is not known; take one of logit_difference, logprob"):
        node_scores(mi.open_store(store), run.id, "drop")
