"""Benchmarks before any model: numbers in responses, the public formats, worked examples and where they come from."""

import re
from dataclasses import replace
from decimal import Decimal
from operator import add, mul, sub, truediv
from pathlib import Path
from typing import Any

import pytest

from mathinterp.errors import UserError
from mathinterp.evaluation.items import read_examples, read_items, refuse_leaks
from mathinterp.evaluation.numbers import final_number, same_number, starts_with_answer
from mathinterp.evaluation.task_files import ORDER, own_examples, task_file
from tests.small_benchmarks import GSM8K, SVAMP, commonsense, lines, write_benchmarks

# ---- numbers ----


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("She has 3 + 4 = 7 apples.\n#### 7", "7"),
        ("#### $1,234.50\nand 99", "1234.50"),
        ("2 + 2 = 5\n#### -3 and 8", "-3"),
        ("#### nothing. The answer is 4, of 9", "4"),
        ("The answer is 5. No: the answer is **12** of 40.", "12"),
        ("costs $76.", "76"),
        ("16-3", "3"),
        ("16 - 3 is 13", "13"),
        ("it fell to -$5", "-5"),
        ("it fell to $-5", "-5"),
        ("it fell to −5 degrees", "-5"),
        ("(-5)", "-5"),
        ("1,000,000 people", "1000000"),
        ("1,2 and 3", "3"),
        ("about .5", "0.5"),
        ("3.14.", "3.14"),
        ("A7 12%", "12"),
        ("no number", None),
        ("", None),
    ],
)
def test_number_of_a_response(response: str, number: str | None) -> None:
    assert final_number(response) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("found", "target", "same"),
    [
        ("7", "7", True), ("7.0", "7", True), ("7.001", "7", False), ("6.999", "7", False), ("-7", "7", False),
        ("9.43", "9.43", True), ("9.430", "9.43", True), ("9.4", "9.43", False), ("11.5", "11.5", True),
        (".67", "0.6666666666666666", True), ("0.667", "0.6666666666666666", True),
        ("0.7", "0.6666666666666666", False), ("0.66", "0.6666666666666666", False),
        ("1", "0.999", False), ("1.00", "0.999", True),
    ],
)  # fmt: skip
def test_same_number(found: str, target: str, same: bool) -> None:
    assert same_number(Decimal(found), Decimal(target)) is same
    assert same_number(None, Decimal(target)) is False


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (" 47", "47", True), ("47. The", "47", True), ("47, then", "47", True), ("\n47", "47", True),
        ("470", "47", False),
        ("47.5", "47", False), ("4,700", "4", False), ("-2", "-2", True), ("−2", "-2", True), ("2", "-2", False),
        ("forty-seven", "forty", True), ("fortyfive", "forty", False), ("is 47", "47", False), ("", "47", False),
    ],
)  # fmt: skip
def test_a_response_starts_with_the_answer(response: str, answer: str, right: bool) -> None:
    assert starts_with_answer(response, answer) is right


# ---- public files ----


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("data"))


def test_every_benchmark_is_read_as_published(data: Path) -> None:
    items = {name: read_items(task_file(name), str(data)) for name in ORDER}
    assert {name: len(found) for name, found in items.items()} == {
        "gsm8k": 2, "svamp": 8, "addsub": 3, "singleeq": 3, "multiarith": 1, "mmlu": 12, "commonsense_qa": 7,
    }  # fmt: skip
    assert items["gsm8k"][1] == {
        "item_id": "gsm8k-2", "subset": "mixed", "question": "What is 1999 plus 1?", "target": "2000"
    }  # fmt: skip
    assert items["svamp"][0]["question"] == "The total is 11. What is 11 minus 1 ?"
    assert items["svamp"][0]["subset"] == "sub"
    assert items["multiarith"][0]["target"] == "2"
    assert items["mmlu"][0]["target"] == items["mmlu"][6]["target"] == "A"
    assert items["mmlu"][1] == {
        "item_id": "anatomy-2", "subset": "anatomy", "subject": "anatomy", "question": "test bone, 1\nof two lines?",
        "choices": ["a", "b", "c", "d"], "target": "B",
    }  # fmt: skip
    assert task_file("mmlu").text(items["mmlu"][7]) == "test year 1?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    assert items["commonsense_qa"][2]["target"] == "C"
    for name in ORDER:
        assert len({item["item_id"] for item in items[name]}) == len(items[name])


def test_worked_examples_come_from_where_they_should(data: Path) -> None:
    gsm8k, svamp, mmlu = task_file("gsm8k"), task_file("svamp"), task_file("mmlu")
    drawn = read_examples(gsm8k, str(data), "train", 8, 0)[""]
    assert len(drawn) == 8 == len({example["item_id"] for example in drawn})
    assert (
        drawn
        == read_examples(gsm8k, str(data), "train", 8, 0)[""]
        != read_examples(gsm8k, str(data), "train", 8, 1)[""]
    )
    assert all("<<" not in example["target"] and "####" in example["target"] for example in drawn)
    assert read_examples(svamp, None, "own", 2, 5) == {"": own_examples(svamp)[:2]}
    subjects = read_examples(mmlu, str(data), "train", 5, 0)
    assert {subject: [e["question"][:8] for e in found] for subject, found in subjects.items()} == {
        "anatomy": ["dev bone"] * 5, "us_history": ["dev year"] * 5,
    }  # fmt: skip
    assert read_examples(mmlu, None, "train", 0, 0) == {}  # no file is needed for none
    with pytest.raises(UserError, match="8 'own' examples: `fewshot` 9 is too many"):
        read_examples(svamp, None, "own", 9, 0)
    with pytest.raises(UserError, match=r"train_rand_split\.jsonl', which is not there.*`examples` own"):
        read_examples(task_file("commonsense_qa"), str(data), "train", 7, 0)


def test_own_examples_are_sound_and_complete() -> None:
    for example in own_examples(task_file("svamp")):
        worked, mark, final = example["target"].partition("\n#### ")
        steps = re.findall(r"([\d.]+) ([-+*/]) ([\d.]+) = ([\d.]+\d|\d)", worked)
        assert mark
        assert steps, example
        for left, sign, right, result in steps:
            exact = {"+": add, "-": sub, "*": mul, "/": truediv}[sign](Decimal(left), Decimal(right))
            assert exact == Decimal(result), example
        assert Decimal(steps[-1][3]) == Decimal(final) == final_number(example["target"])
    questions = own_examples(task_file("commonsense_qa"))
    assert len(own_examples(task_file("svamp"))) == 8
    assert len(questions) == 7
    assert all(len(question["choices"]) == 5 and question["target"] in "ABCDE" for question in questions)
    assert len({question["target"] for question in questions}) == 5  # no letter is favoured by being the only one


def test_an_example_that_is_a_test_item_is_refused(data: Path) -> None:
    task = task_file("svamp")
    items = read_items(task, str(data))
    refuse_leaks(task, items, {"": own_examples(task)})
    leaked = {**own_examples(task)[0], "question": items[3]["question"].upper().replace(" ", "  ")}
    with pytest.raises(UserError, match="own-1 is test item 'chal-4' itself"):
        refuse_leaks(task, items, {"": [leaked]})
    mmlu = task_file("mmlu")
    item = read_items(mmlu, str(data))[0]
    refuse_leaks(mmlu, [item], {"us_history": [item]})  # never stands before its own subject's items
    refuse_leaks(mmlu, [item], {"anatomy": [{**item, "choices": ["e", "f", "g", "h"]}]})
    with pytest.raises(UserError, match="is test item"):
        refuse_leaks(mmlu, [item], {"anatomy": [item]})


CSQA = ("commonsense_qa", "commonsense_qa/dev_rand_split.jsonl")


@pytest.mark.parametrize(
    ("task", "file", "text", "message"),
    [
        ("svamp", "svamp/SVAMP.json", None, r"SVAMP needs '.*SVAMP\.json', which is not there"),
        ("svamp", "svamp/SVAMP.json", "[{]", "broken JSON"),
        (*CSQA, lines([commonsense(0), commonsense(1, "F")]), "line 2.*A to E"),
        (*CSQA, "{}\n", "line 1.*'question' must be an object"),
        (*CSQA, "", "is empty"),
        ("mmlu", "mmlu/test/anatomy_dev.csv", "", r"has no files \*_test\.csv"),
        ("mmlu", "mmlu/test/anatomy_test.csv", "Which?,a,b,c,A\n", "record 1.*not 5 columns"),
        ("mmlu", "mmlu/test/anatomy_test.csv", "Which?,a,b,c,d,E\n", "record 1.*not 'E'"),
        ("mmlu", "mmlu/test/anatomy_test.csv", 'Which?,a,b,c,"' + "d" * 200_000, "not the columns that are published"),
    ],
)  # fmt: skip
def test_faulty_files_are_named(task: str, file: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_items(task_file(task), str(tmp_path))


def test_the_hub_gives_the_same_items(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    rows: dict[str, list[dict[str, Any]]] = {
        "openai/gsm8k": GSM8K,
        "ChilleD/SVAMP": [{**row, "Answer": str(row["Answer"])} for row in SVAMP],
        "ChilleD/MultiArith": [{"question": "What is left?", "final_ans": "2"}],
        "tau/commonsense_qa": [
            {"id": f"id{i}", "question": f"Which {i}?", "answerKey": "ABCDE"[i % 5],
             "choices": {"label": list("ABCDE"), "text": [f"{letter}{i}" for letter in "abcde"]}}
            for i in range(7)
        ],
        "cais/mmlu": [
            {"question": question.format(i=i), "subject": subject, "choices": list(choices), "answer": i % 4}
            for subject, question, choices in [
                ("anatomy", "test bone, {i}\nof two lines?", "abcd"), ("us_history", "test year {i}?", "wxyz")
            ]
            for i in range(6)
        ],
    }  # fmt: skip

    def load_dataset(path: str, name: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((path, name, split))
        if path == "tau/commonsense_qa" and split == "train":
            raise ConnectionError("no route\nto the hub")
        return rows[path] if split != "test" or path != "ChilleD/SVAMP" else []

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for name in ("gsm8k", "svamp", "mmlu", "commonsense_qa"):
        assert read_items(task_file(name), None) == read_items(task_file(name), str(data)), name
    assert ("ChilleD/SVAMP", None, "train") in asked
    assert ("cais/mmlu", "all", "test") in asked
    (problem,) = read_items(
        replace(task_file("multiarith"), metadata={"hub": {"path": "ChilleD/MultiArith", "splits": ["x"]}}), None
    )
    assert (problem["question"], problem["target"]) == ("What is left?", "2")
    with pytest.raises(UserError, match="AddSub on the hub is known; give `data_dir`"):
        read_items(task_file("addsub"), None)
    with pytest.raises(UserError, match=r"from the hub \(no route\); give `data_dir`"):
        read_examples(task_file("commonsense_qa"), None, "train", 7, 0)
