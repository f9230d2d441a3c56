"""Circuit files in MIB's JSON: what is refused, rows of all heads, and where files are written."""

import json
from pathlib import Path

import numpy as np
import pytest

import mathinterp as mi
from mathinterp.errors import UserError
from mathinterp.experiments.circuit import Circuit
from mathinterp.experiments.circuit.mib_json import read_circuit, write_circuit
from mathinterp.experiments.circuit.ranking import NodeScores

pytestmark = pytest.mark.bundled
PROMPTS = mi.prompts("operand_pairs", limit=5)


@pytest.fixture(scope="module")
def model():
    return mi.load("bundled", device="cpu", dtype="float64")


def graph_of(tmp_path: Path, **changes) -> str:
    graph = {
        "cfg": {"n_layers": 8, "n_heads": 8, "d_model": 256},
        "nodes": {"m0": {"score": 1.0}},
        "edges": {},
    } | changes
    file = tmp_path / "circuit.json"
    file.write_text(json.dumps(graph))
    return str(file)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nodes": []}, "is no circuit of MIB: a JSON object with the objects cfg, nodes, edges"),
        ({"cfg": {"n_layers": 2, "n_heads": 8, "d_model": 256}}, "of a model with n_layers 2, not 8"),
        ({"nodes": {"m0": {"in_graph": True}}}, "has no score of nodes"),
        ({"nodes": {"m0": {"score": float("nan")}}}, "has no score of nodes"),
        ({"nodes": {"m8": {"score": 1}}}, "the model has no node 'm8'"),
        ({"nodes": {"x": {"score": 1}}}, "'x' is no node"),
        ({"nodes": {"m0": {"score": "much"}}}, "m0 must have one number for its scores"),
        ({"nodes": {"m0": {"score": float("inf")}}}, "none that is infinite"),
        ({"nodes": {"m0": {"score": [1, 2]}}}, "m0 must have one number"),
        ({"nodes": {"m0": {"score": 10**400}}}, "m0 must have one number for its scores, and none that is infinite"),
        ({"nodes": {"m0": {"score": True}}}, "m0 must have one number"),
        ({"nodes": {"m0": {"score": "0.5"}}}, "m0 must have one number"),
        ({"nodes": {"m0": {"score": "nan"}, "m1": {"score": 1}}}, "m0 must have one number"),
        ({"nodes": {"m" + "1" * 5000: {"score": 1}}}, r"'m1{59}\.\.\.' is no node"),
        ({"nodes": {"m00": {"score": 1}}}, "'m00' is no node"),
        ({"nodes": {"a٠.h0": {"score": 1}}}, "is no node"),
        ({"nodes": {"m0": 1, "m1": {"score": 1}}}, "the node 'm0' must be an object"),
    ],
)
def test_a_circuit_file_that_does_not_fit_is_refused(tmp_path: Path, model, changes: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        mi.run(Circuit(circuit=graph_of(tmp_path, **changes)), model, PROMPTS, store=str(tmp_path), progress=False)


@pytest.mark.parametrize("name", ["m0", "input", "a0.h1"])
def test_rows_of_all_heads_are_read_of_heads_alone(tmp_path: Path, model, name: str) -> None:
    shape = model.described.shape
    rows = [[float(row * 1000 + column) for column in range(256)] for row in range(9)]
    read = lambda given: read_circuit(  # noqa: E731
        graph_of(tmp_path, nodes={name: {"neurons_scores": given}}), "neuron", shape
    )
    refused = [rows, rows[:7], rows[:1], rows[0][:255], [*rows[0][:255], True], [*rows[0][:255], "1"], 1.0]
    for given in refused if name == "a0.h1" else [*refused, rows[:8]]:
        with pytest.raises(UserError, match=f"{name} must have 256 numbers for its scores"):
            read(given)
    (found,) = read(rows[1]).scores.values()
    np.testing.assert_array_equal(found[1] if name == "a0.h1" else found, rows[1])
    if name == "a0.h1":
        np.testing.assert_array_equal(read(rows[:8]).scores["head", 0][1], rows[1])


def test_a_circuit_is_written_into_new_folders_and_the_home_folder(tmp_path: Path, monkeypatch, model) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    scores = NodeScores("m", "r", {("mlp", 0): np.ones(1)})
    for given, written in (("~/c.json", "c.json"), (tmp_path / "new" / "er" / "c.json", "new/er/c.json")):
        write_circuit(given, scores, 1, "signed", model.described.shape)
        assert read_circuit(tmp_path / written, "node", model.described.shape).scored == 1
