"""The page's cells of path scans and of adaptive scans: each stored row, and nothing where there is none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mathinterp.experiments import registry
from mathinterp.experiments.results import Results
from mathinterp.report.contents import contents
from mathinterp.report.grids import restored
from mathinterp.report.page import draw
from mathinterp.store import Store
from tests.explorer_pages import HEADS, PROMPTS, adaptive_store, path_store, with_attention
from tests.small_store import open_run
from tests.test_explorer import given, unpacked

pytestmark = pytest.mark.slow


def data_of(store: Store, run: str) -> tuple[dict[str, Any], np.ndarray, list[np.ndarray]]:
    """The page's data, its cells, and its quantities as people read them; of prompts in order."""
    data = given(dict(contents(store, [run]))[f"assets/data/{run}.js"])[1]
    shape = len(data["layers"]), len(data["prompts"])
    cells = unpacked(data["cells"], np.uint8).reshape(shape)
    amounts = [
        restored(unpacked(each["levels"], np.uint8).reshape(shape), each["bound"]) for each in data["quantities"]
    ]
    return data, cells, amounts


def test_each_cell_of_a_path_scan_is_its_stored_row(tmp_path: Path) -> None:
    store, run = path_store(tmp_path / "store")
    data, cells, (effect, nats) = data_of(store, run)
    assert list(zip(data["layers"], data["heads"], strict=True)) == [(0, -1), (0, 0), (0, 1), (1, -1), (1, 0), (1, 1)]
    assert [each["unit"] for each in data["quantities"]] == ["%", "nats"]
    assert (data["answers"], data["extras"], data["by_quantity"]) == (None, ["counterfactual"], True)
    columns = [row[0] for row in data["prompts"]]
    assert sorted(columns) == [f"p{i}" for i in range(8)], "the pair that was not kept is left out"
    stored = {
        (row["layer"], -1 if row["head"] is None else row["head"], row["prompt_id"]): row
        for row in store.rows("SELECT * FROM path_scan")
    }
    for h, place in enumerate(zip(data["layers"], data["heads"], strict=True)):
        for p, prompt_id in enumerate(columns):
            row = stored.pop((*place, prompt_id), None)
            if row is None:
                assert (*place, prompt_id) == (1, -1, "p3")
                assert cells[h, p] == 255
                assert np.isnan([effect[h, p], nats[h, p]]).all()
                continue
            assert cells[h, p] == (1 if row["effect"] < -0.05 else 2 if row["effect"] > 0.05 else 3)
            assert effect[h, p] == pytest.approx(100 * row["effect"], abs=data["quantities"][0]["error"] + 1e-4)
            assert nats[h, p] == pytest.approx(row["logprob_change"], abs=data["quantities"][1]["error"] + 1e-6)
    assert not stored
    about = {row[0]: row[1:] for row in data["prompts"]}
    assert about["p1"] == ["1 plus 2 equals", "12", "1", "sub", "1 nothing 2 equals"]
    assert about["p0"][2] == "<token 77>"
    assert data["logprobs"] == [-0.25] * 8
    assert data["decisions"] is None


def test_a_path_scan_that_ranks_by_log_probability_has_that_alone(tmp_path: Path) -> None:
    data, cells, (nats,) = data_of(*path_store(tmp_path / "store", "logprob"))
    assert [each["title"] for each in data["quantities"]] == ["change of log-probability"]
    assert data["outcomes"]["legend"][0] == "lowered by more than 0.05 nats"
    assert (cells != 255).sum() == np.isfinite(nats).sum() == 47


def test_cells_that_an_adaptive_scan_did_not_compute_are_absent(tmp_path: Path) -> None:
    store, run = adaptive_store(tmp_path / "store")
    data, cells, (nats,) = data_of(store, run)
    computed = {
        (row["layer"], row["head"], row["prompt_id"])
        for row in store.rows("SELECT DISTINCT layer, head, prompt_id FROM head_scan")
    }
    assert len(computed) == 2 * 9 + 4 * 3
    for h, (layer, head) in enumerate(HEADS):
        for p, row in enumerate(data["prompts"]):
            there = (layer, head, row[0]) in computed
            assert (cells[h, p] != 255) == there == np.isfinite(nats[h, p])
    assert len(data["prompts"]) == len(PROMPTS), "a prompt that no head ran on is no column"
    page = dict(contents(store, [run]))["index.html"].decode()
    assert "Explore the 30 cells computed, of 54" in page
    stored = store.rows("SELECT layer, head, decision, prompts_used, exact FROM head_decisions ORDER BY layer, head")
    decided = data["decisions"]["rows"]
    assert [
        (row["layer"], row["head"], row["decision"], row["prompts_used"], row["exact"]) for row in decided[:-1]
    ] == [tuple(row.values()) for row in stored]
    assert decided[-1] is None
    assert data["decisions"]["unit"] == "points"
    assert [decided[0][name] for name in ("threshold", "estimate", "low", "high")] == [5, 25, 12.5, 50]


def test_attention_on_sentences_without_a_cell_goes_to_no_other_sentence(tmp_path: Path) -> None:
    """The path scan has no column for p8, whose attention another scan has."""
    store, run = path_store(tmp_path / "store")
    with_attention(store, left=(1, 1))
    found = registry.find("paths").grid(Results(store, run))
    assert found is not None
    assert found.attention is not None
    listed = [int(row["prompt_id"][1:]) for row in found.prompts]
    expected = np.array([0.5 + number / 20 for number in listed])
    for row in found.attention.mass[..., 0]:
        np.testing.assert_allclose(row, expected, atol=1e-6)


def test_the_title_of_decisions_has_the_threshold_in_its_unit(tmp_path: Path) -> None:
    """`decide` counts hundredths, also of a nat."""
    store, _ = adaptive_store(tmp_path / "store")
    asked = {"effect": "logprob", "decide": 5.0, "fdr": 0.05, "order_seed": 0}
    assert _title(store, "heads", {}) == "Which heads are above 5 points"
    assert _title(store, "paths", asked) == "Which nodes are above 0.05 nats"


def _title(store: Store, scan: str, parameters: dict[str, Any]) -> str:
    if not parameters:
        (run,) = store.rows("SELECT run_id FROM runs")
        return " ".join(draw(store, run["run_id"]).to_dict()["title"]["text"])
    run = open_run(store, ["decisions/00000"], scan=scan, parameters=parameters)
    (other,) = store.rows("SELECT run_id FROM runs WHERE scan = 'heads'")
    store.write_shard(run.run_id, "decisions", 0, store.arrow(
        "SELECT * EXCLUDE (run_id) FROM decisions WHERE run_id = $run", {"run": other["run_id"]}), {})  # fmt: skip
    assert run.finish() == []
    return " ".join(draw(store, run.run_id).to_dict()["title"]["text"])
