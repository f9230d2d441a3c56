"""Folders that fine-tuning leaves: written whole or not at all, and what they say of themselves. Needs no torch."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mathinterp.errors import UserError

TUNING_FILE = "tuning.json"  # in what a fine-tuning leaves: run, base, settings, figures
EDIT_FILE = "edit.json"  # in a model with columns at zero: which, of which base


def check_free(out: Path) -> None:
    """Raise UserError if something is at ``out`` already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"`out` '{out}' exists already; give a new folder")


@contextlib.contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of ``out`` at the end of the block, or of nothing if it raises.

    What ``out`` held is gone then: ask ``check_free`` before where that matters.
    """
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # of a call that was killed
    part.mkdir(parents=True)
    yield part
    shutil.rmtree(out, ignore_errors=True)
    part.replace(out)


def read_about(file: Path, *fields: str) -> dict[str, Any]:
    """What ``file`` (tuning.json and the like) says; raises UserError if it is broken or lacks one of ``fields``."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON or UTF-8
        raise UserError(f"'{file}' is no JSON ({error}); give another folder") from error
    missing = [name for name in fields if not isinstance(found, dict) or name not in found]
    if missing:
        raise UserError(f"'{file}' does not say its {missing[0]}: not written by this program; give another folder")
    return found
