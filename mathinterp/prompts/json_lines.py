"""Text and JSON-lines files read whole, with one clear line for what is wrong with them."""

import json
from pathlib import Path
from typing import Any

from mathinterp.errors import UserError


def read_text(path: Path, what: str) -> str:
    """A UTF-8 file of ``what`` ("prompts"); raises UserError if it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {what} from {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8; save the file as UTF-8") from error


def json_lines(path: Path, what: str, form: str, parse_float: Any = None) -> list[tuple[int, dict[str, Any]]]:
    """Line number, from 1, and JSON object of every line that is not blank.

    Only line feeds end a line: a JSON string may hold other line separators of Unicode.

    Args:
        form: what a line should be, for the message about one that is no object.
        parse_float: as of json.loads.
    Raises:
        UserError: as ``read_text``; and naming the line, for broken JSON or anything but an object.
    """
    rows = []
    for number, line in enumerate(read_text(path, what).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line, parse_float=parse_float)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: broken JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: not a JSON object{form}")
        rows.append((number, row))
    return rows
