"""The public formats of the benchmarks: one published file, or one row of the hub, to documents of one form.

Knows fields and what may be wrong in them; knows nothing about where files lie or how many items are wanted. A
document is a dict of plain values: item_id, subset (operation, MMLU's subject, else the task), question, target, and
where a task has them choices and subject. A worked example needs no subset.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mathinterp.errors import UserError
from mathinterp.evaluation.task_files import Document
from mathinterp.prompts.json_lines import NumberText, json_lines, read_text, scalar_text, shown
from mathinterp.prompts.prompt import Prompt
from mathinterp.prompts.word_problems import FORM, WORD_PROBLEMS, Record, read_word_problems
from mathinterp.tuning.data import CALCULATOR_NOTE

WHAT = "items"
LETTERS = "ABCDE"
MMLU_HEADER = ["question", "choice0", "choice1", "choice2", "choice3", "answer"]


def word_problem_file(name: str, path: Path) -> list[Document]:
    """GSM8K's test file, SVAMP, AddSub, SingleEq or MultiArith; the target is the final number."""
    return [_word_problem(prompt) for prompt in read_word_problems(name, path)]


def word_problem_row(name: str, row: dict[str, Any], where: str, number: int) -> Document:
    """One row of the same data on the hub, ``number`` from 1."""
    if name == "multiarith":
        solution = {"lEquations": [""], "lSolutions": [row.get("final_ans")]}
        row = {"iIndex": number - 1, "sQuestion": row.get("question"), **solution}
    return _word_problem(WORD_PROBLEMS[name].build(name, Record(where, number, row)))


def _word_problem(prompt: Prompt) -> Document:
    before, _, after = FORM.partition("{problem}")
    question = prompt.text.removeprefix(before).removesuffix(after)
    return {
        "item_id": prompt.prompt_id, "subset": prompt.operation, "question": question, "target": prompt.answer
    }  # fmt: skip


def worked_problem(row: dict[str, Any], where: str, number: int) -> Document:
    """A record of GSM8K's training file: the target is the whole solution, without the calculator's notes."""
    question, answer = text_of(row, "question", where), text_of(row, "answer", where)
    return {"item_id": f"train-{number}", "question": question, "target": CALCULATOR_NOTE.sub("", answer)}


def commonsense_row(row: dict[str, Any], where: str) -> Document:
    """A record of CommonsenseQA as published: id, question {stem, choices [{label, text}]}, answerKey."""
    inner = row.get("question")
    if not isinstance(inner, dict) or not isinstance(inner.get("choices"), list):
        raise UserError(f"{where}: 'question' must be an object with stem and choices, as CommonsenseQA is published")
    choices = {choice.get("label"): choice.get("text") for choice in inner["choices"] if isinstance(choice, dict)}
    if list(choices) != list(LETTERS) or not all(isinstance(text, str) for text in choices.values()):
        raise UserError(f"{where}: five choices labelled A to E are needed")
    answer = text_of(row, "answerKey", where)
    if answer not in choices:
        raise UserError(f"{where}: 'answerKey' must be one of A to E, not '{answer}'")
    return {
        "item_id": text_of(row, "id", where), "subset": "commonsense_qa", "question": text_of(inner, "stem", where),
        "choices": [str(text) for text in choices.values()], "target": answer,
    }  # fmt: skip


def mmlu_folder(folder: Path) -> list[Document]:
    """Every <subject>_test.csv (or _dev.csv): the columns of MMLU_HEADER, or no header and a letter for the answer."""
    files = sorted(folder.glob(f"*_{folder.name}.csv"))
    if not files:
        raise UserError(f"'{folder}' has no files *_{folder.name}.csv; give MMLU's folder as it is published")
    documents = []
    for file in files:
        try:
            rows = list(csv.reader(io.StringIO(read_text(file, WHAT), newline="")))
        except csv.Error as error:  # a field over the limit, most often behind a quotation mark that is never closed
            raise UserError(f"{file}: not the columns that are published ({error})") from error
        rows = rows[1:] if rows and rows[0] == MMLU_HEADER else rows
        subject = file.name.removesuffix(f"_{folder.name}.csv")
        documents += [mmlu_row(subject, i, row, f"{file}, record {i}") for i, row in enumerate(rows, start=1)]
    return documents


def mmlu_row(subject: str, number: int, row: Sequence[Any], where: str) -> Document:
    """Question, four choices, and the answer as 0 to 3 or A to D."""
    if len(row) != len(MMLU_HEADER) or not str(row[0]).strip():
        raise UserError(f"{where}: a question, four choices and the answer are needed, not {len(row)} columns")
    answer = str(row[5]).strip()
    target = LETTERS[int(answer)] if answer in ("0", "1", "2", "3") else answer
    if target not in ("A", "B", "C", "D"):
        raise UserError(f"{where}: the answer must be 0 to 3 or A to D, not '{answer}'")
    return {
        "item_id": f"{subject}-{number}", "subset": subject, "subject": subject, "question": str(row[0]).strip(),
        "choices": [str(choice).strip() for choice in row[1:5]], "target": target,
    }  # fmt: skip


def records(path: Path) -> list[tuple[dict[str, Any], str]]:
    """The objects of a JSON-lines file, each with its place for messages."""
    rows = [
        (row, f"{path}, line {number}")
        for number, row in json_lines(
            path, WHAT, "; give the file as it is published", parse_float=NumberText, parse_int=NumberText
        )
    ]
    if not rows:
        raise UserError(f"{path} is empty; give the file as it is published")
    return rows


def text_of(row: dict[str, Any], field: str, where: str) -> str:
    """A field of text, white space around it left out; of a number the text that it is written with."""
    value = row.get(field)
    whole = isinstance(value, int) and not isinstance(value, bool)  # in a row from the hub
    text = str(value) if whole else scalar_text(value, numbers=True)
    if text is None or not text.strip():
        raise UserError(f"{where}: '{field}' must be text or a number, not {shown(value)}")
    return text.strip()
