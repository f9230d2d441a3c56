"""Distractors: the logit difference in every scan that scores answers, and nothing else changed by them.

The twin of every number is transformers' own forward pass, one prompt at a time, with one hook.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import mathinterp as mi
from mathinterp.errors import UserError
from mathinterp.experiments.paths import Paths
from mathinterp.prompts.alignment import prompts_fingerprint, tokenize_prompts
from mathinterp.prompts.prompt import with_distractors
from tests.statistics_twin import student_interval
from tests.word_prompts import HEAD, MODEL, NAMED, TWO_DIGITS, WORDS, difference, head_output, logits_of

pytestmark = pytest.mark.bundled


@pytest.fixture(scope="module")
def loaded():
    with MODEL.lent() as model:
        yield model


@pytest.mark.parametrize("rows", [WORDS, TWO_DIGITS], ids=["words", "second token"])
def test_logit_differences_are_those_of_the_models_own_logits(loaded, tmp_path: Path, rows: list[dict]) -> None:
    run = mi.run(mi.experiments.Heads(heads=[HEAD]), MODEL, mi.prompts(rows), store=str(tmp_path), progress=False)
    tokenized = tokenize_prompts(mi.prompts(rows), loaded.tokenizer)
    found = run.table("head_scan_logit_differences").set_index("prompt_id")
    before = run.table("baseline_logit_differences").set_index("prompt_id")
    assert len(found) == len(before) == len(rows)
    for item in tokenized:
        name = item.prompt.prompt_id
        zeroed = difference(logits_of(loaded, item, HEAD), item)
        assert found["logit_difference"][name] == pytest.approx(zeroed, abs=1e-4)
        assert before["logit_difference"][name] == pytest.approx(difference(logits_of(loaded, item), item), abs=1e-4)
        assert found["position"][name] == -1 - item.distractor.position
    (effect,) = run.sql("SELECT * FROM logit_difference_effects WHERE operation = 'all'").to_dict("records")
    change = found["logit_difference"] - before["logit_difference"]
    assert (effect["n"], effect["change"]) == (len(rows), pytest.approx(change.mean()))
    if len(rows) > 1:
        assert effect["change_low"] == pytest.approx(
            student_interval(change.mean(), change.var() / len(rows), len(rows))[0]
        )


def test_distractors_count_in_no_accuracy_and_in_no_other_table(tmp_path: Path) -> None:
    bare = [{k: v for k, v in row.items() if k != "distractor"} for row in WORDS]
    tables = []
    for rows in (WORDS, bare):
        run = mi.run(mi.experiments.Heads(heads=[HEAD]), MODEL, mi.prompts(rows), store=str(tmp_path), progress=False)
        tables.append([run.table(name).drop(columns="run_id") for name in ("head_scan", "baseline", "head_effects")])
    for one, other in zip(*tables, strict=True):
        assert (one.get("position", np.zeros(1)) >= 0).all()
        both = [
            frame.sort_values([name for name in ("operation", "prompt_id", "position") if name in frame]).to_dict(
                "list"
            )
            for frame in (one, other)
        ]
        for name, values in both[0].items():
            numbers = isinstance(values[0], float)
            assert values == (pytest.approx(both[1][name], abs=1e-5, nan_ok=True) if numbers else both[1][name]), name


def test_summaries_show_logit_differences_where_there_are_distractors(tmp_path: Path) -> None:
    heads = mi.run(mi.experiments.Heads(layers="0"), MODEL, mi.prompts(WORDS), store=str(tmp_path), progress=False)
    paths = mi.run(Paths(layers="0", keep_all=True), MODEL, mi.prompts(WORDS), store=str(tmp_path), progress=False)
    for run, view in ((heads, "logit_difference_effects"), (paths, "path_logit_differences")):
        assert "answer minus distractor" in str(run.summary)
        first = run.summary.data["logit_differences"][0]
        assert first["change"] == run.table(view).query("operation == 'all'")["change"].min()
        assert any(len(run.sql(query)) and view in query for query in run.summary.queries) or run is paths
    bare = mi.prompts([{"text": row["text"], "answer": row["answer"]} for row in WORDS])
    plain = mi.run(mi.experiments.Heads(layers="0"), MODEL, bare, store=str(tmp_path), progress=False)
    assert "distractor" not in str(plain.summary)
    assert "logit_differences" not in plain.summary.data


def test_iterative_masking_counts_answers_alone(tmp_path: Path) -> None:
    found = []
    for keep in (True, False):
        rows = [{k: v for k, v in row.items() if keep or k != "distractor"} for row in WORDS]
        scan = mi.experiments.Iterative("zero", steps=2, layers="0")
        run = mi.run(scan, MODEL, mi.prompts(rows), store=str(tmp_path), progress=False)
        found.append(run.table("iterative_scan").sort_values(["step", "layer", "head"]).drop(columns="run_id"))
    for name in found[0].columns:
        assert found[0][name].tolist() == pytest.approx(found[1][name].tolist(), abs=1e-6), name


@pytest.mark.parametrize("changes", [{"engine": "plain"}, {"positions": "end"}, {"ablation": "resample"}], ids=str)
def test_every_engine_and_position_scores_the_distractor(tmp_path: Path, changes: dict) -> None:
    """Against the packed engine's zeros everywhere: the baselines agree, and each row is there."""
    runs = [
        mi.run(mi.experiments.Heads(heads=[HEAD], **asked), MODEL, mi.prompts(WORDS), store=str(tmp_path),
               progress=False)
        for asked in ({}, changes)
    ]  # fmt: skip
    one, other = (run.table("baseline_logit_differences").set_index("prompt_id")["logit_difference"] for run in runs)
    assert one.to_dict() == pytest.approx(other.to_dict(), abs=1e-5)
    assert len(runs[1].table("head_scan_logit_differences")) == len(WORDS)


def test_mask_and_keep_keeps_the_distractors_logit_too(tmp_path: Path) -> None:
    asked = {"store": str(tmp_path), "progress": False}
    scan = mi.experiments.Neurons("head:0.6", keep="topk:5", layers="7", target="gold")
    neurons = mi.run(scan, MODEL, mi.prompts(WORDS), **asked)
    run = mi.run(mi.experiments.MaskKeep(neurons.id, (3,), 1), MODEL, mi.prompts(WORDS), **asked)
    assert len(run.table("maskkeep_scan_logit_differences")) == len(run.table("maskkeep_scan").query("position == 0"))


@pytest.mark.parametrize("experiment", ["Mlps", "Knockout", "HeadPairs"])
def test_other_scans_keep_the_distractors_logit_too(tmp_path: Path, experiment: str) -> None:
    asked, table = {
        "Mlps": ({"layers": "0"}, "mlp_scan"),
        "Knockout": ({"ablation": "zero", "heads": ["0.6"], "ks": [1], "control_seeds": 0}, "knockout_scan"),
        "HeadPairs": ({"heads": ["0.6", "0.1"]}, "head_pair_scan"),
    }[experiment]
    scan = getattr(mi.experiments, experiment)(**asked)
    run = mi.run(scan, MODEL, mi.prompts(WORDS), store=str(tmp_path), progress=False)
    found = run.table(f"{table}_logit_differences")
    assert len(found) == len(run.sql(f"SELECT * FROM {table} WHERE run_id = $run AND position = 0")) > 0
    assert found["logit_difference"].notna().all()


def test_one_question_leaves_distractors_out_of_its_answer() -> None:
    answer = mi.ablate(MODEL, mi.prompts(WORDS), heads=[HEAD])
    assert (answer.rows["position"] >= 0).all()
    assert answer.effects["n"].iloc[0] == len(WORDS)


@pytest.mark.parametrize(("distractor", "where"), [("7", "before"), ("-27", "after")])
def test_path_patching_says_where_a_distractor_differs_from_the_token_it_scores(
    tmp_path: Path, distractor: str, where: str
) -> None:
    row = {"text": "3 - 5 =", "answer": "-2", "distractor": distractor, "counterfactual": "3 < 5 ="}
    if where == "after":
        row["answer"] = "-25"
    said = f"distractor '{distractor}' first differs from the answer '{row['answer']}' {where} the one token"
    with pytest.raises(UserError, match=said):
        mi.run(Paths(layers="0"), MODEL, mi.prompts([row]), store=str(tmp_path), progress=False)


def test_a_distractor_that_is_the_answer_is_refused(loaded) -> None:
    with pytest.raises(UserError, match="prompt '1': the distractor 'five' differs from the answer 'five' in no token"):
        tokenize_prompts(mi.prompts([{**WORDS[0], "distractor": "five"}]), loaded.tokenizer)


def test_path_patching_takes_any_answer_and_the_distractors_logit(loaded, tmp_path: Path) -> None:
    """freeze none and one head: the whole forward pass with the head's counterfactual output at END."""
    scan = Paths(freeze="none", keep_all=True, layers="0", attribution=False)
    run = mi.run(scan, MODEL, mi.prompts(NAMED), store=str(tmp_path), progress=False)
    found = run.table("path_distractors").query("node == 'head' and head == 6").set_index("prompt_id")
    gold = run.table("path_scan").query("node == 'head' and head == 6").set_index("prompt_id")
    counterfactuals = tokenize_prompts(
        mi.prompts([{**row, "text": row["counterfactual"]} for row in NAMED]), loaded.tokenizer
    )
    tokenized = tokenize_prompts(mi.prompts(NAMED), loaded.tokenizer)
    patched = []
    for item, other in zip(tokenized, counterfactuals, strict=True):
        logits = logits_of(loaded, item, HEAD, head_output(loaded, other))[item.end]
        name = item.prompt.prompt_id
        assert found["logit_patched"][name] == pytest.approx(logits[item.distractor.token_id], abs=1e-4)
        assert gold["logit_patched"][name] == pytest.approx(logits[item.scored[0].token_id], abs=1e-4)
        patched.append(logits[item.scored[0].token_id] - logits[item.distractor.token_id])
    (row,) = run.sql(
        "SELECT * FROM path_logit_differences WHERE node = 'head' AND head = 6 AND operation = 'all'"
    ).to_dict("records")
    assert (row["n"], row["patched"]) == (len(WORDS), pytest.approx(np.mean(patched), abs=1e-4))


def test_prompts_without_new_fields_keep_their_fingerprint(loaded) -> None:
    """The one that version 0.1.0 gave before there were distractors."""
    plain = tokenize_prompts(mi.prompts([{"text": "3 plus 5 is", "answer": 8}]), loaded.tokenizer)
    assert "distractor" not in json.dumps(plain[0].as_fields())
    assert with_distractors(plain) == plain
    changed = tokenize_prompts(mi.prompts([{"text": "3 plus 5 is", "answer": 8, "distractor": 9}]), loaded.tokenizer)
    assert prompts_fingerprint(changed) != prompts_fingerprint(plain)
