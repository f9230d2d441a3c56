"""Word problems: the public files of SVAMP, AddSub, SingleEq, MultiArith and GSM8K, read as they are published.

Knows the fields of those files and what may be wrong in one; knows nothing about tokenizers or models.
A problem becomes "Question: ... Answer:" and its final number the answer after a space (paper B, Fig. 4-5, names SVAMP;
the wording is ours). Word problems have no operator word to make neutral: they are for knock-out and evaluation, and
scans that need counterfactuals refuse them, see :func:`mathinterp.prompts.pairs.operator_spans`.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from mathinterp.errors import UserError
from mathinterp.prompts.json_lines import json_lines, json_value, read_text
from mathinterp.prompts.prompt import Prompt

FORM = "Question: {problem} Answer:"
MIXED = "mixed"  # operation of a problem whose last step the file does not tell
TYPES = {
    "Addition": "add",
    "Subtraction": "sub",
    "Multiplication": "mul",
    "Common-Division": "div",
    "Common-Divison": "div",  # so in one published record
}
STEPS: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
FINAL_ANSWER = "####"
WHAT = "word problems"
MOST_DIGITS = 4000  # of an answer written out


def read_word_problems(name: str, path: str | Path) -> list[Prompt]:
    """Read a public file; ``name`` is a key of WORD_PROBLEMS and becomes the prompts' template.

    ``answer`` is the published number without thousands separators and closing ".0" ("9.43", "0.6666666666666666" where
    the file rounds a fraction). ``operation`` is that of the last step: SVAMP's Type, or the outermost operator of an
    equation solved for x; "mixed" for other equations and for GSM8K. Where the equation has two numbers and both are in
    the text, they are ``operand_a`` and ``operand_b``, as written and in the order of the text.

    Raises UserError, naming file and record (line), for: a missing or empty file, text that is not UTF-8, broken JSON,
    a missing or unfit field, an unknown Type, a final number that cannot be read, an id used twice.
    """
    reader = WORD_PROBLEMS[name]
    records = reader.split(Path(path), reader.fields)
    if not records:
        raise UserError(f"{path} holds no word problems")
    prompts = []
    seen: set[str] = set()
    for record in records:
        prompt = reader.build(name, record)
        if prompt.prompt_id in seen:
            raise UserError(f"{record.where}: the id '{prompt.prompt_id}' is used twice; give each problem its own")
        seen.add(prompt.prompt_id)
        prompts.append(prompt)
    return prompts


@dataclass(frozen=True)
class Record:
    """One problem as published."""

    where: str  # file and record (line), for messages
    number: int  # from 1
    values: dict[str, Any]

    def text(self, field: str) -> str:
        """A field of text, white space around it left out."""
        value = self.values[field]
        if not isinstance(value, str) or not value.strip():
            raise self.unfit(field, "text", value)
        return value.strip()

    def only(self, field: str) -> Any:
        """The single member of a field that is a list."""
        value = self.values[field]
        if not isinstance(value, list) or len(value) != 1:
            raise self.unfit(field, "a list of one", value)
        return value[0]

    def unfit(self, field: str, wanted: str, value: object) -> UserError:
        """The error for a value of the wrong kind."""
        return UserError(f"{self.where}: '{field}' must be {wanted}, not {json.dumps(value, default=str)}")


def _json_array(path: Path, fields: tuple[str, ...]) -> list[Record]:
    rows = json_value(read_text(path, WHAT), str(path), parse_float=Decimal, constants=True)
    if not isinstance(rows, list):
        raise UserError(f"{path}: not a JSON array of records; give the file as it is published")
    return [_record(row, number, f"{path}, record {number}", fields) for number, row in enumerate(rows, start=1)]


def _json_lines(path: Path, fields: tuple[str, ...]) -> list[Record]:
    rows = json_lines(path, WHAT, f" with the fields {', '.join(fields)}", parse_float=Decimal)
    return [_record(row, number, f"{path}, line {number}", fields) for number, row in rows]


def _record(row: object, number: int, where: str, fields: tuple[str, ...]) -> Record:
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object with the fields {', '.join(fields)}")
    missing = [field for field in fields if row.get(field) is None]
    if missing:
        raise UserError(f"{where}: the field '{missing[0]}' is missing; the fields are {', '.join(fields)}")
    return Record(where, number, row)


def _svamp(name: str, record: Record) -> Prompt:
    body, kind = record.text("Body"), record.text("Type")
    if kind not in TYPES:
        raise UserError(f"{record.where}: Type '{kind}' is not known; the types are {', '.join(TYPES)}")
    problem = f"{body}{'' if body[-1] in '.?!' else '.'} {record.text('Question')}"
    answer = _number(record, "Answer", record.values["Answer"])
    return _prompt(name, record.text("ID"), problem, answer, TYPES[kind], record.text("Equation"))


def _equation_file(name: str, record: Record) -> Prompt:
    """AddSub, SingleEq, MultiArith: a question, one equation in x, one solution."""
    index, equation = record.values["iIndex"], record.only("lEquations")
    if not isinstance(index, int) or isinstance(index, bool):
        raise record.unfit("iIndex", "a whole number", index)
    if not isinstance(equation, str):
        raise record.unfit("lEquations", "a list of one text", [equation])
    answer = _number(record, "lSolutions", record.only("lSolutions"))
    operation = _last_step(record, equation)
    return _prompt(name, f"{name}-{index}", record.text("sQuestion"), answer, operation, equation)


def _gsm8k(name: str, record: Record) -> Prompt:
    _, mark, final = record.text("answer").rpartition(FINAL_ANSWER)
    if not mark:
        raise UserError(f"{record.where}: 'answer' has no final answer after '{FINAL_ANSWER}'")
    answer = _number(record, "answer", final.strip().replace(",", ""))
    return _prompt(name, f"{name}-{record.number}", record.text("question"), answer, MIXED, "")


def _prompt(name: str, prompt_id: str, problem: str, answer: str, operation: str, equation: str) -> Prompt:
    operand_a, operand_b = _operands(equation, problem)
    return Prompt(
        prompt_id=prompt_id,
        text=FORM.format(problem=problem),
        answer=answer,
        operation=operation,
        operand_a=operand_a,
        operand_b=operand_b,
        template=name,
    )


def _number(record: Record, field: str, value: object) -> str:
    """A number as text: digits, a point only where needed, never an exponent."""
    if isinstance(value, bool) or not isinstance(value, int | str | Decimal):
        raise record.unfit(field, "a number", value)
    try:
        number = Decimal(value)
    except InvalidOperation as error:
        raise record.unfit(field, "a number", value) from error
    if not number.is_finite() or abs(number.adjusted()) > MOST_DIGITS:
        raise record.unfit(field, "a number", value)
    return str(int(number)) if number == number.to_integral_value() else f"{number.normalize():f}"


def _last_step(record: Record, equation: str) -> str:
    """The outermost operator of "x = ..." or "... = x"; "mixed" where x does not stand alone (70 - x = 27)."""
    sides = [side.strip() for side in equation.split("=")]
    solved = [side for side in sides if side not in ("x", "X")]
    if len(sides) != 2 or len(solved) != 1:
        return MIXED
    try:
        root = ast.parse(solved[0], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{record.where}: the equation '{equation}' cannot be read") from error
    return STEPS.get(type(root.op), MIXED) if isinstance(root, ast.BinOp) else MIXED


def _operands(equation: str, problem: str) -> tuple[str | None, str | None]:
    wanted = [_value(number) for number in NUMBER.findall(equation)]
    if len(wanted) != 2:
        return None, None
    found = []
    for written in NUMBER.findall(problem):
        if _value(written) in wanted:
            wanted.remove(_value(written))
            found.append(written)
    return (found[0], found[1]) if len(found) == 2 else (None, None)


def _value(written: str) -> Decimal:
    return Decimal(written.replace(",", ""))


@dataclass(frozen=True)
class Reader:
    """How a public file is cut into records, the fields each must have, and what a record becomes."""

    split: Callable[[Path, tuple[str, ...]], list[Record]]
    fields: tuple[str, ...]
    build: Callable[[str, Record], Prompt]


_EQUATION_FIELDS = ("iIndex", "sQuestion", "lEquations", "lSolutions")

# the NAME of --prompts NAME:PATH -> its reader
WORD_PROBLEMS: dict[str, Reader] = {
    "svamp": Reader(_json_array, ("ID", "Body", "Question", "Equation", "Answer", "Type"), _svamp),
    "addsub": Reader(_json_array, _EQUATION_FIELDS, _equation_file),
    "singleeq": Reader(_json_array, _EQUATION_FIELDS, _equation_file),
    "multiarith": Reader(_json_array, _EQUATION_FIELDS, _equation_file),
    "gsm8k": Reader(_json_lines, ("question", "answer"), _gsm8k),
}
