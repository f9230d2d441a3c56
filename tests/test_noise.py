"""The noise floor: where it is measured; nothing is called sure that it could have made, or where it is unknown."""

from pathlib import Path
from typing import Any

import pytest

from mathinterp.engine.packed import PackedEngine
from mathinterp.experiments.base import Subject
from mathinterp.experiments.head_pairs import HeadPairs, ShownPairs
from mathinterp.experiments.heads import Heads
from mathinterp.experiments.results import Results
from mathinterp.models.anatomy import Anatomy
from mathinterp.store import Store
from tests.made_prompts import PROMPTS as MADE
from tests.small_store import FINGERPRINT, NO_NOISE, fill, open_run, prompt, scores
from tests.tiny import tiny_model

NAMES = [f"p{number:02d}" for number in range(24)]


def head_store(folder: Path, noise: dict[str, Any] | None) -> tuple[Store, str]:
    """A head that costs half of 24 answers."""
    store = Store(folder)
    rows = [{"prompt_id": name} for name in NAMES]
    heads = [{**row, "layer": 0, "head": 1, "correct": number % 2 == 0} for number, row in enumerate(rows)]
    run = fill(store, [prompt(name) for name in NAMES], rows, heads)
    opened = open_run(store)
    opened.note({"noise_floor": noise})
    opened.finish()
    return store, run


@pytest.mark.slow
@pytest.mark.parametrize(("share", "sure"), [(0.0, True), (0.4, True), (0.6, False), (None, None)])
def test_a_drop_is_sure_beyond_the_noise_and_never_where_that_is_unknown(
    share: float | None, sure: bool | None, tmp_path: Path
) -> None:
    noise = None if share is None else {**NO_NOISE, "flipped_predictions": round(10 * share), "answers": 10}
    store, run = head_store(tmp_path, noise)
    found = store.rows("SELECT q_value < 0.05 AS small, sure, noise FROM head_effects WHERE operation = 'add'")
    assert found == [{"small": True, "sure": sure, "noise": share}]
    summary = Heads.summarize(Results(store, run), None)
    assert "1 of 1 heads cost more than 10 points" in str(summary)
    assert f"({int(sure is True)} of them surely" in str(summary)
    assert ("noise floor is not known, so that no effect is called sure" in str(summary)) == (share is None)


@pytest.mark.parametrize(("noise", "sure"), [(0.0, True), (1.5, False), (None, None)])
def test_a_path_effect_is_sure_beyond_the_noise_and_never_where_that_is_unknown(
    noise: float | None, sure: bool | None, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    run = open_run(store, ["path_scan/00000"], scan="paths", parameters={"effect": "logit"})
    store.write_prompts(FINGERPRINT, [prompt(name) for name in NAMES])
    rows = [
        {"node": "head", "layer": 0, "head": 1, "prompt_id": name, "logit_original": 4.0, "logit_patched": 3.0,
         "effect": -0.25 + number / 1000, "logprob_change": -0.5, "probability_change": 0.0, "centred_change": 0.0}
        for number, name in enumerate(NAMES)
    ]  # fmt: skip
    store.write_shard(run.run_id, "path_scan", 0, scores("path_scan", rows), {})
    if noise is not None:
        run.note({"noise_floor": noise})
    run.finish()
    found = store.rows("SELECT below, q_value < 0.05 AS small, sure, key FROM path_effects WHERE operation = 'add'")
    assert found == [{"below": True, "small": True, "sure": sure, "key": sure}]


@pytest.mark.slow
@pytest.mark.parametrize(("flipped", "sure"), [(0, True), (10, True), (20, False), (None, None)])
def test_an_interaction_is_sure_beyond_the_noise_of_its_three_drops(
    flipped: int | None, sure: bool | None, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    run = open_run(store, ["baseline/00000", "head_pair_scan/00000"], scan="head_pairs")
    store.write_prompts(FINGERPRINT, [prompt(name) for name in NAMES])
    base = [{"prompt_id": name} for name in NAMES]
    pairs = [
        {**row, "layer": layer, "head": 0, "other_layer": other, "other_head": None if other is None else 0,
         "given": False, "correct": other is None or number % 2 == 0}
        for layer, other in ((0, None), (1, None), (0, 1)) for number, row in enumerate(base)
    ]  # fmt: skip
    store.write_shard(run.run_id, "baseline", 0, scores("baseline", base), {})
    store.write_shard(run.run_id, "head_pair_scan", 0, scores("head_pair_scan", pairs), {})
    if flipped is not None:
        run.note({"noise_floor": {**NO_NOISE, "flipped_predictions": flipped, "answers": 100}})
    run.finish()
    found = store.rows("SELECT interaction, q_value < 0.05 AS small, sure FROM head_pairs WHERE operation = 'all'")
    assert found == [{"interaction": 0.5, "small": True, "sure": sure}]
    summary = HeadPairs.summarize(Results(store, run.run_id), ShownPairs())
    assert f"Of 1 pairs, {int(sure is True)} surely cost more together than apart" in str(summary)


def test_it_is_measured_on_first_middle_and_last_packs() -> None:
    model = Anatomy(tiny_model("llama"))
    engine = PackedEngine(model, MADE, max_tokens=16, edits_per_batch=1, pack_size=12)
    assert len(engine.groups) > 3, "else the first group is nearly all"
    baseline = engine.baseline()
    found = engine.noise_floor(baseline)
    assert found["max_logprob_deviation"] < 1e-9
    for place in (0, len(engine.groups) // 2, len(engine.groups) - 1):
        answers = engine.groups[place].answers.numpy()
        strayed = int(answers[-1])
        baseline.predicted_EA[0, strayed] += 1
        baseline.logprob_EA[0, strayed] += 0.25
        again = engine.noise_floor(baseline)
        assert (again["flipped_predictions"], again["answers"]) == (1, len(answers))
        assert again["max_logprob_deviation"] == pytest.approx(0.25)
        baseline.predicted_EA[0, strayed] -= 1
        baseline.logprob_EA[0, strayed] -= 0.25


def test_the_plain_engine_tells_its_noise_too() -> None:
    scan = Heads(engine="plain", heads="0.1")
    notes = scan.notes(scan.prepare(Subject(Anatomy(tiny_model("llama")), MADE)))
    assert notes["engine"] == "plain"
    assert notes["noise_floor"] == {**NO_NOISE, "answers": sum(len(item.scored) for item in MADE)}
