"""The gate for text, JSON and JSON-lines files: read whole, with one clear line for what is wrong with them.

A number may keep the text that it is written with: 1.0 is not 1, and 007 or a long integer stays what it is.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mathinterp.errors import UserError
from mathinterp.gates import check_file, check_place, real
from mathinterp.local_files import whole_file

MOST_DEPTH = 100  # of lists and objects within each other


class NumberText(str):
    """A JSON number as it is written in its file: "1.0", "8", "1e3"."""


def exists(name: str | Path) -> bool:
    """Whether there is such a file or folder; a name that none can have (too long, a null byte) is not there."""
    try:
        return Path(name).exists()
    except (OSError, ValueError, RuntimeError):
        return False


def read_text(path: Path, what: str, *, by_line: bool = False) -> str:
    """A UTF-8 file of ``what`` ("prompts"), byte order mark left out; ``by_line``: errors name the line.

    Raises UserError if it cannot be read or is not UTF-8.
    """
    check_place(path, what)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # reading it might never end
            raise UserError(f"cannot read {what} from {path}: a device or a pipe; give a file")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {what} from {path}: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = f", line {data[: error.start].count(10) + 1}" if by_line else ""
        raise UserError(f"{path}{line}: not UTF-8; save the file as UTF-8") from error


def lines_of(path: Path, what: str) -> Iterator[tuple[int, str]]:
    """Line numbers, from 1, and the lines that are not blank.

    Only line feeds end a line: a JSON string may hold other line separators of Unicode.
    """
    for number, line in enumerate(read_text(path, what, by_line=True).split("\n"), start=1):
        if line.strip():
            yield number, line


def json_object(line: str, where: str, form: str, parse_float: Any = None, parse_int: Any = None) -> dict[str, Any]:
    """The JSON object of a line; ``parse_float`` and ``parse_int`` as of json.loads.

    Raises UserError, which begins with ``where``, as ``json_value`` does, and for anything but an object: ``form`` says
    what it should be.
    """
    row = json_value(line, where, parse_float, parse_int)
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object{form}")
    return row


def json_file(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; raises UserError as ``read_text`` and ``json_object`` do."""
    return json_object(read_text(path, "JSON"), f"'{path}'", "")


def json_value(
    text: str, where: str, parse_float: Any = None, parse_int: Any = None, *, constants: bool = False
) -> Any:  # fmt: skip
    """The value of a JSON text; ``constants``: NaN and infinities are values, which the caller judges.

    Raises UserError, which begins with ``where``, for broken JSON, NaN, infinities and numbers that would become one, a
    field given twice, nesting too deep to read and an integer too long for Python. Broken JSON of several lines names
    its line.
    """
    constant = None if constants else _no_constant(where)
    try:
        value = json.loads(
            text, parse_float=parse_float or real, parse_int=parse_int, parse_constant=constant,
            object_pairs_hook=lambda pairs: _without_repeats(pairs, where),
        )  # fmt: skip
        if text.count("[") + text.count("{") > MOST_DEPTH and is_deeper(value, MOST_DEPTH):
            raise RecursionError
        return value
    except json.JSONDecodeError as error:
        place = f", line {error.lineno}" if "\n" in text else ""
        raise UserError(f"{where}{place}: broken JSON ({error.msg} at column {error.colno})") from error
    except UserError:
        raise
    except RecursionError as error:
        raise UserError(f"{where}: lists or objects are nested too deep to read") from error
    except ValueError as error:  # more digits than Python reads, or beyond what a float holds
        long = "digits" in str(error) or "..." in str(error)
        raise UserError(f"{where}: a number is too {'long' if long else 'large'} to read; write it as text") from error


def is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects are nested in more than ``most`` levels."""
    level = [value]
    for _ in range(most + 1):
        inner = [each for each in level if isinstance(each, list | dict)]
        level = [part for each in inner for part in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def json_lines(
    path: Path, what: str, form: str, parse_float: Any = None, parse_int: Any = None
) -> list[tuple[int, dict[str, Any]]]:
    """Line number, from 1, and JSON object of every line that is not blank; arguments and errors as above."""
    return [
        (number, json_object(line, f"{path}, line {number}", form, parse_float, parse_int))
        for number, line in lines_of(path, what)
    ]


def write_json_lines(records: Iterable[Mapping[str, Any]], path: Path, what: str) -> None:
    """Write one JSON object a line, whole or not at all; raises UserError if that cannot be."""
    check_file(path, what)
    try:
        with whole_file(path) as temporary, temporary.open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    except OSError as error:
        raise UserError(f"cannot write {what} to {path}: {error.strerror}") from error


def as_json_value(value: Any) -> Any:
    """As a JSON line would have it: numbers as text that says so, missing values None, NumPy's scalars Python's."""
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()
    if value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return NumberText(json.dumps(value))
    return value


def scalar_text(value: object, *, numbers: bool, flags: bool = False) -> str | None:
    """The text of a JSON scalar: a string, where ``numbers`` a number, where ``flags`` true and false; else None."""
    if isinstance(value, NumberText):
        return str(value) if numbers else None
    if isinstance(value, bool):
        return json.dumps(value) if flags else None
    return value if isinstance(value, str) else None


def shown(value: object) -> str:
    """A JSON value for a message, numbers as they were written; at most 80 characters."""
    return full_text(value)[:80]


def check_characters(text: str, where: str, field: str) -> None:
    """Raise UserError for a text that UTF-8 cannot hold, which no tokenizer can read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: '{field}' holds half of a surrogate pair, which is no character") from error


def full_text(value: object) -> str:
    """A JSON value as text, numbers as they were written."""
    if isinstance(value, NumberText):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(full_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {full_text(each)}" for name, each in value.items()) + "}"
    return json.dumps(value, default=str)


def _no_constant(where: str) -> Callable[[str], Any]:
    def refuse(name: str) -> Any:
        raise UserError(f"{where}: {name} is no JSON; write a number or text")

    return refuse


def _without_repeats(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise UserError(f"{where}: the field '{name}' is given twice")
        found[name] = value
    return found
