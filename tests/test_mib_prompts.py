"""MIB's rows as prompts: from dicts, frames, files and (a folder in place of) the hub; which pairs are left out."""

import json
import logging
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from tokenizers import processors

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.prompts import load_prompts, read_prompts, write_prompts
from mathinterp.prompts.alignment import prompts_fingerprint, tokenize_prompts
from mathinterp.prompts.mib import fitting, write_rows
from tests.prompt_tokenizers import gpt2_like, llama_like
from tests.tiny import tiny_tokenizer

ADDITION = {
    "idx": 7, "template": "The sum of {operand1} and {operand2} is ", "prompt": "The sum of 3 and 5 is ", "label": "8",
    "operator": "+", "num_digit": 1, "operand1": 3, "operand2": 5,
    "random_counterfactual": {"prompt": "The sum of 2 and 4 is ", "label": 6, "operand1": 2, "operand2": 4},
    "ones_op1_counterfactual": {"prompt": "The sum of 2 and 5 is ", "label": 7, "operand1": 2, "operand2": 5},
}  # fmt: skip
SUBTRACTION = {**ADDITION, "prompt": "9 - 3 = ", "label": "6", "operator": "-", "template": "dash", "operand1": 9,
               "operand2": 3, "random_counterfactual": {"prompt": "9 - 4 = ", "label": 5}}  # fmt: skip
IOI = {
    "template": "{name_A} and {name_B}", "prompt": "When Tom and Sam left, Sam gave much to",
    "metadata": {"indirect_object": "Tom", "subject": "Sam", "object": "much", "place": "left", "random_c": "Max"},
    "choices": ["Tom", "Sam"], "answerKey": 0,
    "s2_io_flip_counterfactual": {"prompt": "When Tom and Sam left, Tom gave much to", "choices": ["Tom", "Sam"]},
}  # fmt: skip


def without(row: dict, *names: str) -> dict:
    return {name: value for name, value in row.items() if name not in names}


def as_file(folder: Path, rows: list[dict], form: str) -> Path:
    file = folder / f"rows.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("form", ["dicts", "pandas", "jsonl", "parquet"])
def test_a_row_of_arithmetic_is_a_pair_wherever_it_comes_from(tmp_path: Path, form: str) -> None:
    rows = [ADDITION, SUBTRACTION]
    given = {"dicts": lambda: rows, "pandas": lambda: pd.DataFrame(rows)}.get(
        form, lambda: as_file(tmp_path, rows, form)
    )
    first, second = found = mi.prompts(given())
    assert (first.text, first.answer, first.separator) == ("The sum of 3 and 5 is ", "8", "")
    assert (first.counterfactual, first.distractor) == ("The sum of 2 and 4 is ", "6")
    assert (first.operation, first.operand_a, first.operand_b) == ("add", "3", "5")
    assert (first.template, first.prompt_id, first.one_token) == (ADDITION["template"], "1", True)
    assert (second.operation, second.prompt_id, second.distractor) == ("sub", "2", "5")
    assert found.columns["1"] == {"idx": "7", "num_digit": "1"}


def test_names_have_a_space_before_them() -> None:
    (prompt,) = mi.prompts([IOI])
    assert (prompt.text, prompt.separator, prompt.answer, prompt.distractor) == (IOI["prompt"], " ", "Tom", "Sam")
    assert (prompt.counterfactual, prompt.operation) == (IOI["s2_io_flip_counterfactual"]["prompt"], "ioi")
    plain = {"prompt": IOI["prompt"], "correct": " Tom", "incorrect": " Sam", "counterfactual": prompt.counterfactual}
    (same,) = mi.prompts([plain])
    assert (same.separator, same.answer, same.distractor) == (" ", "Tom", "Sam")
    (other,) = mi.prompts([{**plain, "correct": "Tom", "incorrect": "Sam", "counterfactual": {"prompt": "x y"}}])
    assert (other.separator, other.answer, other.counterfactual) == ("", "Tom", "x y")
    tokenizer = tiny_tokenizer(["Tom", "Sam", "When", "left", "gave"])
    (item,) = tokenize_prompts(fitting([prompt], tokenizer), tokenizer)
    assert tokenizer.convert_ids_to_tokens([item.scored[0].token_id, item.distractor.token_id]) == ["Tom", "Sam"]


@pytest.mark.slow
def test_a_set_of_the_hub_is_read_by_its_name_split_and_operator(tmp_path: Path, monkeypatch) -> None:
    """datasets takes a folder of that name in place of the hub."""
    folder = tmp_path / "mib-bench" / "arithmetic_addition"
    folder.mkdir(parents=True)
    for split, rows in (("validation", [ADDITION, SUBTRACTION, ADDITION]), ("test", [ADDITION])):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found = mi.prompts("mib-bench/arithmetic_addition")
    assert [prompt.prompt_id for prompt in found] == ["1", "3"]  # MIB takes sums alone
    assert found.label == "mib-bench/arithmetic_addition"
    assert len(load_prompts("mib-bench/arithmetic_addition:test")) == 1
    with pytest.raises(UserError, match=r"cannot be had from the hub: ValueError: Unknown split .*; give a downloaded"):
        mi.prompts("mib-bench/arithmetic_addition:dev")
    with pytest.raises(UserError, match="sets of MIB that are read here are mib-bench/arithmetic_addition, "):
        mi.prompts("mib-bench/ravel")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("arithmetic_addition", r"\(JSON lines or Parquet\) with the rows whose operator is '\+' alone$"),
        ("arithmetic_subtraction", r"with the rows whose operator is '-' alone$"),
        ("ioi", r"\(JSON lines or Parquet\)$"),
    ],
)
def test_a_set_that_cannot_be_had_says_which_rows_a_file_needs(monkeypatch, name: str, told: str) -> None:
    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(UserError, match=told):
        mi.prompts(f"mib-bench/{name}")


WORDS = ["The sum of and is "] * 50


@pytest.mark.parametrize("trimmed", [False, True])  # GPT-NeoX's offsets leave a token's space out
def test_answers_that_share_a_token_with_the_space_are_left_out(
    caplog: pytest.LogCaptureFixture, trimmed: bool
) -> None:
    """MIB tokenizes prompt and answer apart: it would read another token at another one."""
    plain = {**ADDITION, "prompt": "The sum of 3 and 5 is="}
    apart = {"prompt": "The sum of 2 and 4 is=", "label": 6}
    rows = [
        ADDITION,  # the answer, 8
        {**ADDITION, "label": "6", "random_counterfactual": {**ADDITION["random_counterfactual"], "label": 8}},
        {**plain, "random_counterfactual": {**apart, "prompt": "The sum of 2 and 4 is "}},
        {**plain, "random_counterfactual": apart},  # no space before any answer
    ]
    joining, other = gpt2_like([*WORDS, *[" 8"] * 50], 400), gpt2_like(WORDS, 400)
    for each in (joining, other):
        each.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trimmed)
    assert joining.tokenize("is 8") == ["is", "Ġ8"]
    assert joining.tokenize("is 6") == ["is", "Ġ", "6"]
    assert other.tokenize("is 8") == ["is", "Ġ", "8"]
    with caplog.at_level(logging.WARNING, "mathinterp"):
        assert [prompt.prompt_id for prompt in fitting(mi.prompts(rows), joining)] == ["4"]
    assert caplog.messages == ["3 of 4 pairs are left out: 3 whose answer shares a token with the space before it"]
    fitting_rows = [*rows[:2], rows[3]]
    for tokenizer in (other, llama_like([row["prompt"] for row in rows]), tiny_tokenizer()):
        assert len(fitting(mi.prompts(fitting_rows), tokenizer)) == 3
    ours = {"text": "The sum of 3 and 5 is", "answer": "8", "one_token": True}  # the separator is ours
    assert len(fitting(mi.prompts([ours]), joining)) == 1


def test_names_of_several_tokens_are_said_to_be_left_out_here_alone() -> None:
    row = {**IOI, "metadata": {**IOI["metadata"], "indirect_object": "Tom1"}}
    with pytest.raises(UserError, match=r"of several tokens \(stricter than MIB, which takes names of several tokens"):
        fitting(mi.prompts([row]), tiny_tokenizer())


def test_pairs_that_do_not_fit_the_tokenizer_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    other = ADDITION["random_counterfactual"]
    rows = [
        ADDITION,
        {**ADDITION, "label": "12"},  # two tokens here
        {**ADDITION, "random_counterfactual": {**other, "label": 10}},
        {**ADDITION, "random_counterfactual": {**other, "label": 8}},
        {**ADDITION, "random_counterfactual": {**other, "prompt": "The sum of 23 and 4 is "}},
    ]
    ordinary = {"text": "3 plus 9 is", "answer": "12"}
    prompts, tokenizer = mi.prompts([*rows, ordinary]), tiny_tokenizer()
    with caplog.at_level(logging.WARNING, "mathinterp"):
        kept = fitting(prompts, tokenizer)
    assert [prompt.prompt_id for prompt in kept] == ["1", "6"]  # a prompt of ours may have many tokens
    assert caplog.messages == [
        "4 of 6 pairs are left out: 2 with an answer of several tokens, 1 with the same answer, 1 with sentences of"
        " different numbers of tokens"
    ]
    caplog.clear()
    assert fitting(kept, tokenizer) is kept
    assert not caplog.messages
    with pytest.raises(UserError, match="1 of 1 pairs are left out: 1 with an answer of several tokens; take a set"):
        fitting(mi.prompts(rows[1:2]), tokenizer)


def test_rows_without_a_counterfactual_are_left_out_as_mib_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        ADDITION,
        {**ADDITION, "random_counterfactual": None},
        {**ADDITION, "random_counterfactual": {"prompt": None}},
    ]
    with caplog.at_level(logging.WARNING, "mathinterp"):
        assert [prompt.prompt_id for prompt in mi.prompts(as_file(tmp_path, rows, "jsonl"))] == ["1"]
    assert caplog.messages == ["2 of 3 rows have no counterfactual and are left out"]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            without(ADDITION, "random_counterfactual"),
            r"prompts\[0\]: 'random_counterfactual' must be an object with a prompt",
        ),
        ({**ADDITION, "label": [8]}, r"'label' must be text or a whole number, not \[8\]"),
        ({**ADDITION, "label": None}, "'label' must be text or a whole number, not None"),
        ({**IOI, "metadata": {"subject": "Sam"}}, "'indirect_object' must be text"),
        (without(IOI, "s2_io_flip_counterfactual"), "'s2_io_flip_counterfactual' must be an object with a prompt"),
        ({"prompt": "a b", "correct": "c"}, "unknown field 'prompt'"),
        ({"text": "3 plus 5 is", "answer": 8, "one_token": "yes"}, "'one_token' must be true or false, not \"yes\""),
    ],
)
def test_a_row_that_is_no_pair_says_what_it_lacks(row: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        mi.prompts([row])


def test_files_that_are_none_are_told_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "rows.parquet"
    broken.write_text("no parquet")
    with pytest.raises(UserError, match=r"cannot read prompts from .*rows.parquet"):
        mi.prompts(broken)


def test_which_prompts_are_read_is_no_part_of_what_they_are(tmp_path: Path) -> None:
    prompts, tokenizer = mi.prompts([ADDITION]), tiny_tokenizer()
    write_prompts(prompts, tmp_path / "ours.jsonl")
    again = read_prompts(tmp_path / "ours.jsonl")
    assert again == list(prompts)
    ours = [{**json.loads((tmp_path / "ours.jsonl").read_text()), "one_token": False}]
    fingerprints = {
        prompts_fingerprint(tokenize_prompts(each, tokenizer)) for each in (prompts, again, mi.prompts(ours))
    }
    assert len(fingerprints) == 1


def test_our_pairs_written_as_rows_are_the_same_pairs_to_the_model(tmp_path: Path) -> None:
    pairs, tokenizer = load_prompts("one_token_pairs", limit=40), tiny_tokenizer()
    write_rows(pairs, tmp_path / "mib.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "mib.jsonl").read_text().splitlines()]
    assert {row["operator"] for row in rows} == {"+", "-"}
    back = fitting(mi.prompts(tmp_path / "mib.jsonl"), tokenizer)
    assert len(back) == len(pairs) == 40
    for ours, theirs in zip(tokenize_prompts(pairs, tokenizer), tokenize_prompts(back, tokenizer), strict=True):
        assert ours.input_ids == theirs.input_ids
        assert ours.counterfactual_ids == theirs.counterfactual_ids
        assert (ours.end, ours.distractor.token_id) == (theirs.end, theirs.distractor.token_id)
        assert (theirs.prompt.operation, theirs.prompt.operand_a) == (ours.prompt.operation, ours.prompt.operand_a)
    with pytest.raises(UserError, match="has no counterfactual or no distractor, and a row of MIB is a pair"):
        write_rows(load_prompts("two_digit", limit=4), tmp_path / "mib.jsonl")


@pytest.mark.parametrize(("text", "label"), [("--5", "--5"), ("-5", -5), ("05", "05"), ("9" * 19, "9" * 19)])
def test_labels_are_numbers_where_the_text_is_that_of_one(tmp_path: Path, text: str, label: int | str) -> None:
    pair = {"text": "3 plus 5 is", "answer": "8", "counterfactual": "2 plus 4 is", "distractor": text}
    write_rows(mi.prompts([pair]), tmp_path / "mib.jsonl")
    assert json.loads((tmp_path / "mib.jsonl").read_text())["random_counterfactual"]["label"] == label


def test_rows_are_written_into_new_folders_and_the_home_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, written in (("~/new/a.jsonl", "new/a.jsonl"), (tmp_path / "b" / "c" / "d.jsonl", "b/c/d.jsonl")):
        write_rows(load_prompts("one_token_pairs", limit=2), given)
        assert len((tmp_path / written).read_text().splitlines()) == 2


def test_the_set_of_pairs_has_answers_of_one_digit() -> None:
    prompts = load_prompts("one_token_pairs")
    assert {prompt.operation for prompt in prompts} == {"add", "sub"}
    for prompt in prompts:
        a, b = int(prompt.operand_a), int(prompt.operand_b)
        assert int(prompt.answer) == (a + b if prompt.operation == "add" else a - b)
        assert len(prompt.answer) == len(prompt.distractor) == 1
        assert prompt.answer != prompt.distractor


@pytest.mark.bundled
def test_the_command_writes_rows_and_reads_them(tmp_path: Path) -> None:
    file = str(tmp_path / "mib.jsonl")
    asked = ["prompts", "--prompts", "one_token_pairs", "--limit", "8", "--form", "mib", "--out", file]
    assert CliRunner().invoke(main, asked).stdout == f"8 prompts written to {file}\n"
    shown = CliRunner().invoke(main, ["prompts", "--prompts", file, "--json"])
    assert [row["one_token"] for row in json.loads(shown.stdout)] == [True] * 8


@pytest.mark.bundled
def test_a_run_reads_those_that_fit_and_says_how_many_do_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [ADDITION, {**ADDITION, "label": "12"}, SUBTRACTION]
    model = mi.load("bundled", device="cpu")
    with caplog.at_level(logging.WARNING, "mathinterp"):
        scan = mi.experiments.Attribution()
        run = mi.run(scan, model, mi.prompts(rows), store=str(tmp_path), progress=False)
    assert caplog.messages.count("1 of 3 pairs are left out: 1 with an answer of several tokens") == 1
    assert sorted(run.table("node_attributions")["prompt_id"].unique()) == ["1", "3"]
    told = run.sql("SELECT prompt_id, value FROM prompt_columns WHERE name = 'idx' ORDER BY prompt_id")
    assert told["value"].tolist() == ["7", "7"]
