"""Prompt files: JSON lines in and out.

Knows the fields of a prompt file and what a user may get wrong in one; knows nothing about tokenizers or models.
Fields: ``text`` and ``answer`` required; ``prompt_id`` (else the line number, as text), ``operation``, ``operand_a``,
``operand_b``, ``template``, ``counterfactual`` and ``separator`` (else one space) optional.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mathinterp.errors import UserError
from mathinterp.prompts.prompt import Prompt

FIELDS = tuple(field.name for field in fields(Prompt))
REQUIRED = ("text", "answer")
NUMERIC = ("answer", "operand_a", "operand_b")  # whole numbers are taken and turned to text
DEFAULT_SEPARATOR = " "
RESERVED_OPERATION = "all"  # in the views: the mean over operations


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompt file (JSON lines, UTF-8; blank lines are skipped but counted).

    Raises UserError, naming file and line, for: a missing or empty file, text that is not UTF-8, broken JSON, an
    unknown, missing, empty or repeated field, a value that is not text, a prompt_id used twice.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in _lines(path):
        prompt = _prompt(line, number, f"{path}, line {number}")
        if prompt.prompt_id in line_of:
            raise UserError(
                f"{path}, line {number}: prompt_id '{prompt.prompt_id}' is already that of line "
                f"{line_of[prompt.prompt_id]}; give each prompt its own"
            )
        line_of[prompt.prompt_id] = number
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path} holds no prompts; write one JSON object with text and answer per line")
    return prompts


def write_prompts(prompts: Sequence[Prompt], path: str | Path) -> None:
    """Write a prompt file that :func:`read_prompts` gives back unchanged; whole or not at all.

    Fields that are None and the default separator are left out. Raises UserError if the file cannot be written.
    """
    path = Path(path)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.writelines(json.dumps(_record(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write prompts to {path}: {error.strerror}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers, from 1, and lines that are not blank."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read prompts from {path}: {error.strerror}") from error
    # Only line feeds end a line: a JSON string may hold other line separators of Unicode.
    for number, raw in enumerate(data.split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number}: not UTF-8; save the file as UTF-8") from error
        if line:
            yield number, line


def _prompt(line: str, number: int, where: str) -> Prompt:
    try:
        record = json.loads(line, object_pairs_hook=lambda pairs: _without_repeats(pairs, where))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: broken JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise UserError(f'{where}: not a JSON object; write {{"text": ..., "answer": ...}}')
    unknown = [name for name in record if name not in FIELDS]
    if unknown:
        raise UserError(f"{where}: unknown field '{unknown[0]}'; the fields are {', '.join(FIELDS)}")
    values = {name: _text(name, value, where) for name, value in record.items() if value is not None}
    for name in REQUIRED:
        if name not in values:
            raise UserError(f"{where}: the field '{name}' is missing")
    if values.get("operation") == RESERVED_OPERATION:
        raise UserError(
            f"{where}: operation 'all' stands for the mean over all operations in results; name it otherwise"
        )
    return Prompt(**{"prompt_id": str(number), **values})


def _without_repeats(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{where}: the field '{name}' is given twice")
    return dict(pairs)


def _text(name: str, value: object, where: str) -> str:
    if name in NUMERIC and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        also = " or a whole number" if name in NUMERIC else ""
        raise UserError(f"{where}: '{name}' must be text{also}, not {json.dumps(value)}")
    if name != "separator" and not value.strip():
        raise UserError(f"{where}: '{name}' is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: '{name}' holds half of a surrogate pair, which is no character") from error
    return value


def _record(prompt: Prompt) -> dict[str, str]:
    record = {name: value for name, value in asdict(prompt).items() if value is not None}
    if prompt.separator == DEFAULT_SEPARATOR:
        del record["separator"]
    return record
