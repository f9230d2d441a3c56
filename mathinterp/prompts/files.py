"""Prompt files: JSON lines in and out.

Knows the fields of a prompt file and what a user may get wrong in one; knows nothing about tokenizers or models.
Fields: ``text`` and ``answer`` required; ``prompt_id`` (else the line number, as text), ``operation``, ``operand_a``,
``operand_b``, ``template``, ``counterfactual`` and ``separator`` (else one space) optional. null is as good as absent.
A number keeps the text that it is written with (1.0 is "1.0"); names take true and false too.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from mathinterp.errors import UserError
from mathinterp.prompts.json_lines import NumberText, check_characters, json_object, lines_of, scalar_text, shown
from mathinterp.prompts.prompt import Prompt

FIELDS = tuple(field.name for field in fields(Prompt))
REQUIRED = ("text", "answer")
NUMERIC = ("answer", "operand_a", "operand_b")  # may be JSON numbers, of which the text is kept
NAMES = ("prompt_id", "operation", "template")  # may be any JSON scalar, of which the text is kept
FORM = '; write {"text": ..., "answer": ...}'
DEFAULT_SEPARATOR = " "
RESERVED_OPERATION = "all"  # in the views: the mean over operations


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompt file (JSON lines, UTF-8; blank lines are skipped but counted).

    Raises UserError, naming file and line, for: a missing or empty file, text that is not UTF-8, broken JSON, an
    unknown, missing, empty or repeated field, a value that is no text (or number, or name), a prompt_id used twice.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in lines_of(path, "prompts"):
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


def _prompt(line: str, number: int, where: str) -> Prompt:
    record = json_object(line, where, FORM, parse_float=NumberText, parse_int=NumberText)
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


def _text(name: str, value: object, where: str) -> str:
    text = scalar_text(value, numbers=name in NUMERIC or name in NAMES, flags=name in NAMES)
    if text is None:
        also = " or a number" if name in NUMERIC else ", a number, true or false" if name in NAMES else ""
        raise UserError(f"{where}: '{name}' must be text{also}, not {shown(value)}")
    if name != "separator" and not text.strip():
        raise UserError(f"{where}: '{name}' is empty")
    check_characters(text, where, name)
    return text


def _record(prompt: Prompt) -> dict[str, str]:
    record = {name: value for name, value in asdict(prompt).items() if value is not None}
    if prompt.separator == DEFAULT_SEPARATOR:
        del record["separator"]
    return record
