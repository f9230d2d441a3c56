"""Prompt files: JSON lines in and out.

Knows the fields of a prompt file and what a user may get wrong in one; knows nothing about tokenizers or models.
Fields: ``text`` and ``answer`` required; ``prompt_id`` (else the line number, as text), ``operation``, ``operand_a``,
``operand_b``, ``template``, ``counterfactual``, ``separator`` (else one space), ``distractor``, ``token_types`` (an
object: name of a type -> words of the text) and ``one_token`` (true: leave the pair out where an answer is not one
token) optional. null is as good as absent. Rows of MIB (mib.py) are read as well, and any of them from Parquet.
A number keeps the text that it is written with (1.0 is "1.0"); names take true and false too. Any other field is a
further column of the prompt, unless it is nearly the name of one of these.
"""

import difflib
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mathinterp.errors import UserError
from mathinterp.prompts.json_lines import (
    NumberText,
    check_characters,
    full_text,
    json_object,
    lines_of,
    scalar_text,
    shown,
    write_json_lines,
)
from mathinterp.prompts.mib import fields_of, is_row, lacks_pair, parquet_records
from mathinterp.prompts.prompt import Prompt

FIELDS = tuple(field.name for field in fields(Prompt))
REQUIRED = ("text", "answer")
NUMERIC = ("answer", "operand_a", "operand_b", "distractor")  # may be JSON numbers, of which the text is kept
NAMES = ("prompt_id", "operation", "template")  # may be any JSON scalar, of which the text is kept
UNLIKE = ("prompt_id", "text", "counterfactual")  # other texts repeat from prompt to prompt: one object for equal ones
TYPES = "token_types"
ONE_TOKEN = "one_token"  # true or false
RESERVED_TYPES = (
    "bos", "operand_a", "operand_b", "operator", "equals", "first", "last", "other", "a", "b", "c", "distractor",
)  # fmt: skip
FORM = '; write {"text": ..., "answer": ...}'
DEFAULT_SEPARATOR = " "
NEARLY = 0.8  # of 1: a field as like as this to one of FIELDS is a misspelling of it
RESERVED_OPERATION = "all"  # in the views: the mean over operations

logger = logging.getLogger(__name__)


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompt file (JSON lines, UTF-8; blank lines are skipped but counted); further columns are left out.

    Raises UserError, naming file and line, for: a missing or empty file, text that is not UTF-8, broken JSON, a
    misspelled, missing, empty or repeated field, a value that is no text (or number, or name), a prompt_id used twice.
    """
    return [prompt for prompt, _ in read_rows(path)]


def read_rows(path: str | Path) -> list[tuple[Prompt, dict[str, str]]]:
    """The prompts of a file, each with its further columns; raises UserError as ``read_prompts`` does."""
    path = Path(path)
    rows = prompts_of_records(parquet_records(path) if path.suffix == ".parquet" else _line_records(path))
    if not rows:
        raise UserError(f"{path} holds no prompts; write one JSON object with text and answer per line")
    return rows


def _line_records(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for number, line in lines_of(path, "prompts"):
        where = f"{path}, line {number}"
        yield where, number, json_object(line, where, FORM, parse_float=NumberText, parse_int=NumberText)


def prompts_of_records(
    records: Iterable[tuple[str, int, Mapping[str, Any] | Prompt]],
) -> list[tuple[Prompt, dict[str, str]]]:
    """Prompts and their further columns, of (what messages begin with, number, record or prompt).

    A warning counts rows of MIB without a counterfactual, which MIB leaves out, too. Raises UserError as
    ``read_prompts`` does.
    """
    rows: list[tuple[Prompt, dict[str, str]]] = []
    taken: dict[str, int] = {}
    single = 0
    for where, number, record in records:
        if isinstance(record, Prompt):
            prompt, more = record, dict[str, str]()
        elif lacks_pair(record):
            single += 1
            continue
        else:
            prompt, more = prompt_of(record, number, where)
        take_id(prompt, number, where, taken)
        rows.append((prompt, more))
    if single:
        logger.warning(f"{single} of {single + len(rows)} rows have no counterfactual and are left out")
    return rows


def take_id(prompt: Prompt, number: int, where: str, taken: dict[str, int]) -> None:
    """Note which row has the prompt's id; raises UserError where an earlier one has it, naming that one's place."""
    earlier = taken.setdefault(prompt.prompt_id, number)
    if earlier != number:  # kept as numbers, since 200,000 texts take 25 MB: a place ends in the row's own number
        place = re.sub(r"\d+(?=]?$)", lambda own: f"{int(own[0]) - number + earlier}", where.rpartition(", ")[2])
        raise UserError(f"{where}: prompt_id '{prompt.prompt_id}' is already that of {place}; give each prompt its own")


def write_prompts(prompts: Sequence[Prompt], path: str | Path) -> None:
    """Write a prompt file that :func:`read_prompts` gives back unchanged; whole or not at all.

    Fields that are None and the default separator are left out. Raises UserError if the file cannot be written.
    """
    write_json_lines(map(_record, prompts), Path(path), "prompts")


def _once(name: str, text: str) -> str:
    """Texts that repeat from prompt to prompt as one object."""
    return text if name in UNLIKE else sys.intern(str(text))


def prompt_of(record: Mapping[str, object], number: int, where: str) -> tuple[Prompt, dict[str, str]]:
    """A prompt and its further columns, as text, from one row; None is as good as absent.

    Args:
        record: field -> JSON value; numbers are NumberText.
        number: of the row, the prompt_id of one that has none.
        where: what a UserError begins with.
    """
    record = fields_of(record, where) if is_row(record) else record
    given = {name: value for name, value in record.items() if value is not None}
    for name in given.keys() - FIELDS:
        if difflib.get_close_matches(name, FIELDS, n=1, cutoff=NEARLY):
            raise UserError(f"{where}: unknown field '{name}'; the fields are {', '.join(FIELDS)}")
    values: dict[str, Any] = {
        name: OTHERWISE[name](value, where) if name in OTHERWISE else _once(name, _text(name, value, where))
        for name, value in given.items()
        if name in FIELDS
    }
    for name in REQUIRED:
        if name not in values:
            raise UserError(f"{where}: the field '{name}' is missing")
    if values.get("operation") == RESERVED_OPERATION:
        raise UserError(
            f"{where}: operation 'all' stands for the mean over all operations in results; name it otherwise"
        )
    more = {name: _column_text(name, value, where) for name, value in given.items() if name not in FIELDS}
    return Prompt(**{"prompt_id": str(number), **values}), more


def _column_text(name: str, value: object, where: str) -> str:
    text = scalar_text(value, numbers=True, flags=True)
    text = full_text(value) if text is None else text
    check_characters(text, where, name)
    return text


def _text(name: str, value: object, where: str) -> str:
    text = scalar_text(value, numbers=name in NUMERIC or name in NAMES, flags=name in NAMES)
    if text is None:
        also = " or a number" if name in NUMERIC else ", a number, true or false" if name in NAMES else ""
        raise UserError(f"{where}: '{name}' must be text{also}, not {shown(value)}")
    if name != "separator" and not text.strip():
        raise UserError(f"{where}: '{name}' is empty")
    check_characters(text, where, name)
    return text


def _types(value: object, where: str) -> tuple[tuple[str, str], ...]:
    """Names of token types and their words; raises UserError for anything but a JSON object of texts."""
    if not isinstance(value, Mapping) or not all(isinstance(words, str) and words.strip() for words in value.values()):
        raise UserError(f"{where}: '{TYPES}' must be an object of names and words of the text, not {shown(value)}")
    for name, words in value.items():
        check_characters(str(name), where, TYPES)
        check_characters(words, where, TYPES)
        if not re.fullmatch(r"\w+", str(name)) or name in RESERVED_TYPES:
            raise UserError(f"{where}: '{TYPES}' names a type '{name}'; take a word of its own, such as subject")
    return tuple((str(name), words) for name, words in value.items())


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{where}: '{ONE_TOKEN}' must be true or false, not {shown(value)}")
    return value


OTHERWISE = {TYPES: _types, ONE_TOKEN: _flag}  # fields that are no text, and how they are read


def _record(prompt: Prompt) -> dict[str, Any]:
    record = {name: value for name, value in asdict(prompt).items() if value is not None}
    if prompt.separator == DEFAULT_SEPARATOR:
        del record["separator"]
    if not prompt.one_token:
        del record[ONE_TOKEN]
    record[TYPES] = dict(prompt.token_types)
    return {name: value for name, value in record.items() if name != TYPES or value}
