"""One store with runs of several experiments: every view answers, and what is gone is not pooled."""

import shutil
from pathlib import Path

import duckdb
import pytest

from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from tests.small_store import FINGERPRINT, fill, open_run, prompt, scores


@pytest.fixture
def mixed(tmp_path: Path) -> Store:
    """A head scan and a path scan, with notes as their replicas write them."""
    store = Store(tmp_path)
    rows = [{"prompt_id": name, "correct": name != "b"} for name in "abcd"]
    heads = [{**row, "layer": 0, "head": 1, "correct": row["prompt_id"] == "d"} for row in rows]
    floor = {"max_logprob_deviation": 0.0, "max_logit_deviation": 0.0, "flipped_predictions": 1, "answers": 20}
    fill(store, [prompt(name, "add" if name < "c" else "sub") for name in "abcd"], rows, heads)
    run = open_run(store)
    run.note({"noise_floor": floor})
    run.finish()
    paths = open_run(store, ["path_scan/00000"], scan="paths", parameters={"effect": "logit"})
    measures = dict.fromkeys(("logit_original", "logit_patched", "probability_change", "centred_change"), 1.0)
    scan = [
        {"node": "head", "layer": 0, "head": 1, "prompt_id": name, "effect": -0.2, "logprob_change": 0.0, **measures}
        for name in "abcd"
    ]
    store.write_shard(paths.run_id, "path_scan", 0, scores("path_scan", scan), {})
    paths.note({"noise_floor": 0.25})
    paths.finish()
    return store


@pytest.mark.slow
def test_every_view_answers_beside_runs_of_other_experiments(mixed: Store) -> None:
    with mixed.held():
        for view in catalog().order:
            mixed.rows(f"SELECT * FROM {view}")
    plain = duckdb.connect()
    mixed.write_views()
    plain.execute(Path(mixed.url, "views.sql").read_text(encoding="utf-8"))
    for view in ("head_effects", "path_effects", "patching_effects", "ranking_agreement"):
        plain.execute(f"SELECT * FROM {view}").fetchall()
    assert {row["noise"] for row in mixed.rows("SELECT noise FROM path_effects")} == {0.25}
    assert {row["noise"] for row in mixed.rows("SELECT noise FROM head_effects")} == {1 / 20}


@pytest.mark.slow
def test_effects_of_prompts_that_are_gone_are_gone_too(mixed: Store) -> None:
    """Not pooled under another operation: that would be another number."""
    before = mixed.rows("SELECT operation, drop FROM head_effects ORDER BY operation")
    assert [row["operation"] for row in before] == ["add", "all", "sub"]
    shutil.rmtree(Path(mixed.url, "prompts", f"prompts_fingerprint={FINGERPRINT}"))
    after = Store(mixed.url)
    assert after.rows("SELECT * FROM head_effects") == after.rows("SELECT * FROM path_effects") == []
    assert any("no readable prompts" in problem for problem in after.problems)
