"""The gates for numbers and places, which people write by hand: one for each kind, for options, fields and files alike.

Knows text. JSON has its gate in prompts/json_lines.py, a model's config in models/config_files.py, an adapter's in
models/adapter_options.py.
"""

import math
import os
import re
import tempfile
import unicodedata
from pathlib import Path
from typing import TypeVar

from mathinterp.errors import UserError
from mathinterp.local_files import resolved

Number = TypeVar("Number", int, float)
MOST = 2**31 - 1  # of a whole number, where nothing smaller is asked for
MOST_SEED = 2**63 - 1
MOST_LAYERS = 10_000  # more than any model has
MOST_DRAWS = 1_000  # random controls: each is a run of its own
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of one part and of all
PROTOCOLS = ("file", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "hf", "memory")
URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]+|):/")  # pathlib leaves one slash of two
_WHOLE = re.compile(r"[+-]?[0-9]{1,4000}")
_REAL = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?|\.[0-9]{1,400})([eE][+-]?[0-9]{1,4})?")


def whole(given: object, least: int = 0, most: float = MOST) -> int:
    """A whole number from ``least`` to ``most``, or its text in the digits 0-9; raises ValueError for anything else."""
    if isinstance(given, str):
        if not _WHOLE.fullmatch(given.strip()):
            raise ValueError(f"{shortened(given)} is not a whole number")
        number = int(given)
    elif isinstance(given, bool) or not hasattr(given, "__index__"):
        raise ValueError(f"{given!r} is not a whole number")
    else:
        number = given.__index__()
    return _within(number, least, most)


def real(given: object, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number, or its text in the digits 0-9; raises ValueError for anything else."""
    if isinstance(given, str):
        if not _REAL.fullmatch(given.strip()):
            raise ValueError(f"{shortened(given)} is not a finite number")
        number = float(given)
    elif isinstance(given, bool) or not hasattr(given, "__float__"):
        raise ValueError(f"{given!r} is not a number")
    else:
        number = float(given)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return _within(number, least, most)


def _within(number: Number, least: float, most: float) -> Number:
    if number < least:
        raise ValueError(f"{shortened(number)} is too small; give {least:g} or more")
    if number > most:
        raise ValueError(f"{shortened(number)} is too large; give at most {most:,}")
    return number


def shortened(given: object, most: int = 60) -> str:
    """``given`` for a message: as it is, or the beginning of a long text."""
    text = str(given)
    return text if len(text) <= most else f"{text[:most]}..."


def check_place(place: str | os.PathLike[str], what: str) -> None:
    """Raise UserError, which begins with ``what``, for what can be no name of a file, a folder or a URL.

    That is: nothing, line breaks and control characters (a tab may stay), bytes that are not UTF-8, names longer than
    any system takes, links in a loop, ``~`` of nobody, and URLs that name a protocol that is not known, or no place.
    """
    text = os.fspath(place)
    if not text.strip():
        raise UserError(f"{what} is empty; give a name")
    if any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") and letter != "\t" for letter in text):
        raise UserError(f"{what} {text[:80]!a} has a line break, a control character or bytes not UTF-8; rename it")
    parts = text.encode().split(b"/")
    if len(text.encode()) > LONGEST_PATH or any(len(part) > LONGEST_NAME for part in parts):
        raise UserError(f"{what} '{shortened(text)}' is too long for a file's name")
    if (url := URL.match(text)) is not None:
        _check_url(text, url["protocol"], what)
        return
    try:
        whole_path = Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{what} '{text}': there is no home folder of that name; write ./{text}") from error
    resolved(whole_path, what)


def _check_url(text: str, protocol: str, what: str) -> None:
    if not re.match(r"[^:]*://[^/\s]" if protocol != "file" else r"file:///", text):
        raise UserError(f"{what} '{text}' is no URL of a place; write a folder, or like s3://bucket/folder")
    if protocol not in PROTOCOLS and not _registered(protocol):
        raise UserError(f"{what} '{text}': Protocol not known: {protocol}; write a folder, or like s3://bucket/folder")


def _registered(protocol: str) -> bool:
    """Whether someone registered a filesystem of their own for it."""
    from fsspec.registry import known_implementations, registry

    return protocol in registry and protocol not in known_implementations


def check_writable(place: str | os.PathLike[str], what: str) -> None:
    """Raise UserError unless a folder of that name can be made, or is there and can be written to; leaves nothing."""
    above = Path(place).expanduser().absolute()
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise UserError(f"{what} '{place}' cannot be made: '{above}' is a file; give another folder")
    try:
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        raise UserError(
            f"{what} '{place}' cannot be made: '{above}' may not be written to ({error.strerror}); give another folder"
        ) from error


def check_file(place: str | os.PathLike[str], what: str) -> None:
    """Raise UserError unless a file of that name can be written: a device or a pipe would be replaced, or wait."""
    check_place(place, what)
    path = Path(place).expanduser()
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise UserError(f"{what} '{place}' is {kind}; give a file")
    check_writable(path.parent, what)
