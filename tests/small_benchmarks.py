"""The public files of the benchmarks, written small: a --data-dir with a few records each, in the published formats."""

import csv
import json
from pathlib import Path
from typing import Any

SVAMP = [
    {"ID": f"chal-{i}", "Body": f"The total is {10 + i}.", "Question": f"What is {10 + i} minus {i} ?",
     "Equation": f"( {10 + i}.0 - {i}.0 )", "Answer": 10.0, "Type": "Subtraction" if i % 2 else "Addition"}
    for i in range(1, 9)
]  # fmt: skip
GSM8K = [
    {"question": f"What is {i} plus 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1:,}"}
    for i in (2, 1999)
]
GSM8K_TRAIN = [{"question": f"What is {i} times 2?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(10)]
EQUATIONS = [
    {"iIndex": i, "lEquations": [f"X = {i} + 2"], "lSolutions": [str(i + 2)], "sQuestion": f"What is {i} plus 2?"}
    for i in range(3)
]
MULTIARITH = [
    {
        "iIndex": 0,
        "lAlignments": [1],
        "lEquations": ["X=((3.0+4.0)-5.0)"],
        "lSolutions": [2.0],
        "sQuestion": "What is left?",
    }
]


def commonsense(number: int, answer: str = "B") -> dict[str, Any]:
    choices = [{"label": label, "text": f"{label.lower()}{number}"} for label in "ABCDE"]
    return {"answerKey": answer, "id": f"id{number}", "question": {"stem": f"Which {number}?", "choices": choices}}


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_benchmarks(root: Path) -> Path:
    """Fill ``root``, a --data-dir, with a few records of every benchmark; returns it."""
    texts = {
        "svamp/SVAMP.json": json.dumps(SVAMP),
        "gsm8k/test.jsonl": lines(GSM8K),
        "gsm8k/train.jsonl": lines(GSM8K_TRAIN),
        "addsub/AddSub.json": json.dumps(EQUATIONS),
        "singleeq/questions.json": json.dumps(EQUATIONS),
        "multiarith/MultiArith.json": json.dumps(MULTIARITH),
        "commonsense_qa/dev_rand_split.jsonl": lines([commonsense(i, "ABCDE"[i % 5]) for i in range(7)]),
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    for split, count in (("test", 6), ("dev", 5)):
        folder = root / "mmlu" / split
        folder.mkdir(parents=True)
        with (folder / f"anatomy_{split}.csv").open("w", newline="") as file:
            rows = [[f"{split} bone, {i}\nof two lines?", "a", "b", "c", "d", i % 4] for i in range(count)]
            csv.writer(file).writerows([["question", "choice0", "choice1", "choice2", "choice3", "answer"], *rows])
        with (folder / f"us_history_{split}.csv").open("w", newline="") as file:  # the older form: no header, letters
            csv.writer(file).writerows(
                [[f"{split} year {i}?", "w", "x", "y", "z", "ABCD"[i % 4]] for i in range(count)]
            )
    return root
