"""Prompts that are no arithmetic: any answer, distractors, named token types, dataset means, further fields.

The twin of every number is transformers' own forward pass, one prompt at a time, with one hook.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import mathinterp as mi
from mathinterp.errors import UserError
from mathinterp.experiments.attention import Attention
from mathinterp.experiments.mlp_probe import MlpProbe
from mathinterp.experiments.paths import Paths
from mathinterp.prompts import read_prompts, write_prompts
from mathinterp.prompts.alignment import prompts_fingerprint, tokenize_prompts
from mathinterp.prompts.prompt import with_distractors

MODEL = mi.load("bundled", device="cpu", dtype="float64")
WORDS = [
    {"text": "two plus three is", "answer": "five", "distractor": "six", "counterfactual": "two times three is"},
    {"text": "four plus three is", "answer": "seven", "distractor": "six", "counterfactual": "four times three is"},
    {"text": "nine plus one is", "answer": "ten", "distractor": "nine", "counterfactual": "nine times one is"},
]
NAMED = [{**row, "token_types": {"subject": str(row["text"]).split()[0]}} for row in WORDS]
TWO_DIGITS = [{"text": "14 plus 5 is", "answer": "19", "distractor": "15"}]  # they differ in the second token
HEAD = (0, 6)


@pytest.fixture(scope="module")
def loaded():
    with MODEL.lent() as model:
        yield model


def logits_of(loaded, item, head: tuple[int, int] | None = None, value: torch.Tensor | None = None) -> np.ndarray:
    """T V logits of one prompt; the head's output replaced by ``value`` at END, or by 0 everywhere."""
    anatomy, handles = loaded.anatomy, []
    if head is not None:
        columns = anatomy.head_slice(head[1])

        def edit(module, inputs):
            changed = inputs[0].clone()
            if value is None:
                changed[..., columns] = 0
            else:
                changed[:, item.end, columns] = value
            return (changed, *inputs[1:])

        handles.append(anatomy.output_projection(head[0]).register_forward_pre_hook(edit))
    try:
        with torch.no_grad():
            return anatomy.model(torch.tensor([item.fed])).logits[0].double().numpy()
    finally:
        for handle in handles:
            handle.remove()


def head_output(loaded, item) -> torch.Tensor:
    """What HEAD gives at END."""
    found = []
    projection = loaded.anatomy.output_projection(HEAD[0])
    handle = projection.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0][0, item.end]))
    logits_of(loaded, item)
    handle.remove()
    return found[0][loaded.anatomy.head_slice(HEAD[1])]


def difference(logits: np.ndarray, item) -> float:
    row = item.distractor.index - 1
    return float(logits[row, item.input_ids[item.distractor.index]] - logits[row, item.distractor.token_id])


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
        half = 1.959963984540054 * change.std(ddof=1) / np.sqrt(len(rows))
        assert effect["change_low"] == pytest.approx(change.mean() - half)


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


def test_a_distractor_that_is_the_answer_is_refused(loaded) -> None:
    with pytest.raises(UserError, match="prompt '1': the distractor 'five' differs from the answer 'five' in no token"):
        tokenize_prompts(mi.prompts([{**WORDS[0], "distractor": "five"}]), loaded.tokenizer)


def test_prompts_without_new_fields_keep_their_fingerprint(loaded) -> None:
    """The one that version 0.1.0 gave before there were distractors."""
    plain = tokenize_prompts(mi.prompts([{"text": "3 plus 5 is", "answer": 8}]), loaded.tokenizer)
    assert "distractor" not in json.dumps(plain[0].as_fields())
    assert with_distractors(plain) == plain
    changed = tokenize_prompts(mi.prompts([{"text": "3 plus 5 is", "answer": 8, "distractor": 9}]), loaded.tokenizer)
    assert prompts_fingerprint(changed) != prompts_fingerprint(plain)


def test_dataset_mean_takes_the_mean_over_all_prompts_themselves(loaded, tmp_path: Path) -> None:
    bare = [{"text": row["text"], "answer": row["answer"]} for row in WORDS]
    scan = mi.experiments.Heads("dataset_mean", heads=[HEAD])
    run = mi.run(scan, MODEL, mi.prompts(bare), store=str(tmp_path), progress=False)
    tokenized = tokenize_prompts(mi.prompts(bare), loaded.tokenizer)
    mean = torch.stack([head_output(loaded, item) for item in tokenized]).mean(dim=0)
    found = run.table("head_scan").set_index("prompt_id")["logit"]
    for item in tokenized:
        logits = logits_of(loaded, item, HEAD, mean)[item.end]
        assert found[item.prompt.prompt_id] == pytest.approx(logits[item.scored[0].token_id], abs=1e-4)
    parameters = json.loads(run.sql("SELECT parameters FROM runs WHERE run_id = $run")["parameters"][0])
    assert (parameters["ablation"], parameters["positions"]) == ("dataset_mean", "end")
    assert not [line for line in run.summary.warnings if "hardly a mean" in line]
    alone = mi.run(scan, MODEL, mi.prompts(bare[:1]), store=str(tmp_path), progress=False)
    assert [line for line in alone.summary.warnings if "hardly a mean" in line]  # it replaces nothing


def test_where_there_is_no_counterfactual_the_message_says_what_to_do(tmp_path: Path) -> None:
    bare = mi.prompts([{"text": row["text"], "answer": row["answer"]} for row in WORDS])
    with pytest.raises(UserError, match=r"no counterfactual.*write the field counterfactual.*dataset_mean needs none"):
        mi.run(mi.experiments.Heads("mean"), MODEL, bare, store=str(tmp_path), progress=False)
    longer = mi.prompts([{**WORDS[0], "counterfactual": "two times three is is"}])
    with pytest.raises(UserError, match="write a counterfactual with as many tokens as the text") as refused:
        mi.run(Paths(), MODEL, longer, store=str(tmp_path), progress=False)
    assert "operator" not in str(refused.value)


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


def test_attention_falls_back_on_the_named_words_first_and_last_token(tmp_path: Path) -> None:
    run = mi.run(Attention(heads=[HEAD], keep_all=True), MODEL, mi.prompts(NAMED), store=str(tmp_path), progress=False)
    rows = run.table("attention_scan")
    assert set(rows["token_type"]) == {"bos", "subject", "first", "last", "other"}
    tokens = rows.groupby("token_type")["tokens"].max().to_dict()
    assert tokens == {"bos": int(tokens["bos"]), "subject": 1, "first": 0, "last": 1, "other": tokens["other"]}
    np.testing.assert_allclose(rows.groupby("prompt_id")["mass"].sum(), 1, atol=1e-6)
    assert "subject" in str(run.summary)
    assert run.figure() is not None
    for query in run.summary.queries:
        assert len(run.sql(query)), query


def test_attention_by_position_counts_back_from_end(tmp_path: Path) -> None:
    scan = Attention(heads=[HEAD], keep_all=True, types="position")
    run = mi.run(scan, MODEL, mi.prompts(WORDS), store=str(tmp_path), progress=False)
    types = set(run.table("attention_scan").query("tokens > 0")["token_type"])
    assert {"end", "end-1", "end-2"} <= types
    assert types <= {"bos", "end", "end-1", "end-2", "end-3", "end-4"}


def test_arithmetic_prompts_keep_their_types_and_run_ids() -> None:
    prompts = mi.prompts("pairs", limit=4)
    assert Attention().scheme(prompts) == "arithmetic"
    assert "types" not in Attention(types="arithmetic").parameters()
    assert Attention().scheme(mi.prompts(WORDS)) == "words"
    assert Attention(types="words").parameters()["types"] == "words"


def test_probing_compares_with_the_answer_the_distractor_and_the_named_words(loaded, tmp_path: Path) -> None:
    run = mi.run(MlpProbe(layers="7", keep_all=True), MODEL, mi.prompts(NAMED), store=str(tmp_path), progress=False)
    rows = run.table("mlp_probe").set_index(["prompt_id", "target"])["mlp_out"]
    item = tokenize_prompts(mi.prompts(NAMED), loaded.tokenizer)[0]
    found = []
    handle = loaded.anatomy.layers[7].register_forward_hook(
        lambda module, inputs, output: found.append((output[0] if isinstance(output, tuple) else output)[0])
    )
    logits_of(loaded, item)
    handle.remove()
    weights = loaded.anatomy.unembedding.weight
    wanted = {"c": item.scored[0].token_id, "distractor": item.distractor.token_id, "last": item.input_ids[item.end]}
    wanted["subject"] = wanted["first"] = loaded.tokenizer("two")["input_ids"][-1]
    for target, token in wanted.items():
        cosine = torch.cosine_similarity(found[0][item.end], weights[token], dim=0)
        assert rows["1", target] == pytest.approx(float(cosine), abs=1e-5), target
    assert set(rows.index.get_level_values("target")) == {*wanted}
    assert "distractor" in str(run.summary)
    mixed = mi.prompts([NAMED[0], {**NAMED[1], "token_types": {"verb": "plus"}}])
    with pytest.raises(UserError, match="name the same token_types in each"):
        mi.run(MlpProbe(), MODEL, mixed, store=str(tmp_path), progress=False)


def test_further_fields_of_a_file_are_columns_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    rows = [{**row, "source": f"book {number}"} for number, row in enumerate(NAMED)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = mi.run(
        mi.experiments.Heads(heads=[HEAD]), MODEL, mi.prompts(str(file)), store=str(tmp_path / "s"), progress=False
    )
    shown = run.sql(
        """SELECT extra ->> 'source' AS source, extra ->> 'distractor' AS distractor,
               extra ->> 'token_types' AS types FROM prompts ORDER BY source"""
    )
    assert list(shown["source"]) == ["book 0", "book 1", "book 2"]
    assert list(shown["distractor"]) == ["six", "six", "nine"]
    assert [json.loads(types) for types in shown["types"]] == [row["token_types"] for row in NAMED]
    read = read_prompts(file)
    write_prompts(read, tmp_path / "again.jsonl")
    assert read_prompts(tmp_path / "again.jsonl") == read


@pytest.mark.parametrize(
    ("types", "told"),
    [("two", "must be an object"), ({"subject": 3}, "must be an object"), ({"other": "two"}, "names a type 'other'"),
     ({"subject": "five"}, "do not stand in the text")],
)  # fmt: skip
def test_bad_token_types_are_told_in_one_line(tmp_path: Path, types: object, told: str) -> None:
    def asked() -> None:
        prompts = mi.prompts([{**WORDS[0], "token_types": types}])
        mi.run(Attention(), MODEL, prompts, store=str(tmp_path), progress=False)

    with pytest.raises(UserError, match=told):
        asked()


def test_accuracies_count_whole_prompts_beside_tokens(tmp_path: Path) -> None:
    run = mi.run(mi.experiments.Heads(heads=[HEAD]), MODEL, mi.prompts("two_digit", limit=32), store=str(tmp_path),
                 progress=False)  # fmt: skip
    tokens = run.sql(
        """SELECT operation, prompt_id, b.correct AS base, h.correct FROM head_scan AS h
           JOIN baseline AS b USING (run_id, prompt_id, position)
           JOIN prompts USING (prompt_id) WHERE run_id = $run"""
    )
    whole = tokens.groupby(["operation", "prompt_id"])[["base", "correct"]].min().groupby("operation").mean()
    effects = run.table("head_effects").set_index("operation")
    for operation in whole.index:
        assert effects["prompt_accuracy"][operation] == pytest.approx(whole["correct"][operation])
        assert effects["baseline_prompt_accuracy"][operation] == pytest.approx(whole["base"][operation])
    assert effects["prompt_accuracy"]["all"] == pytest.approx(whole["correct"].mean())
    accuracies = run.table("accuracies").set_index("operation")
    assert accuracies["prompt_accuracy"]["all"] == pytest.approx(whole["base"].mean())
    assert accuracies["accuracy"]["all"] == pytest.approx(effects["baseline_accuracy"]["all"])
    assert accuracies["prompts"]["all"] == 32
