"""Prompts that are no arithmetic: any answer, named token types, dataset means, further fields, accuracies per prompt.

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
from mathinterp.prompts.alignment import tokenize_prompts
from tests.word_prompts import HEAD, MODEL, NAMED, WORDS, head_output, logits_of

pytestmark = pytest.mark.bundled


@pytest.fixture(scope="module")
def loaded():
    with MODEL.lent() as model:
        yield model


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
