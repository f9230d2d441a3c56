"""Folders that fine-tuning leaves: written whole or not at all, and what they say of themselves. Needs no torch."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.fs

from mathinterp.errors import UserError, first_line_of
from mathinterp.gates import check_writable
from mathinterp.local_files import whole_folder
from mathinterp.models.fingerprint import file_digests
from mathinterp.prompts.json_lines import json_file

TUNING_FILE = "tuning.json"  # in what a fine-tuning leaves: run, base, settings, figures
EDIT_FILE = "edit.json"  # in a model with columns at zero: which, of which base


def check_storage(storage: str) -> None:
    """Raise UserError unless checkpoints can be written there, through Arrow, as Ray Train writes them."""
    if "://" not in storage:
        check_writable(storage, "`storage`")
        return
    try:
        files, place = pyarrow.fs.FileSystem.from_uri(storage)
        probe = f"{place}/.probe-{uuid4().hex}"
        files.create_dir(place)
        with files.open_output_stream(probe) as stream:
            stream.write(b" ")
        files.delete_file(probe)
    except (OSError, pa.ArrowException, ValueError) as error:
        why = first_line_of(error)[:300]
        raise UserError(f"`storage` '{storage}' cannot be written ({why}); give a folder or a URL that can") from error


def is_free(out: Path) -> bool:
    """Whether nothing is at ``out``, or an empty folder."""
    return not out.exists() or (out.is_dir() and not any(out.iterdir()))


def check_free(out: Path) -> None:
    """Raise UserError if something is at ``out`` already."""
    if not is_free(out):
        raise UserError(f"`out` '{out}' exists already; give a new folder")


def check_free_or_ours(out: Path, *files: str) -> None:
    """Raise UserError if something is at ``out`` already that lacks one of ``files``, and so is none of ours."""
    if not all((out / file).is_file() for file in files):
        check_free(out)


def written_or_same(out: Path, write: Callable[[Path], None]) -> bool:
    """Fill the folder ``out`` with ``write``, whole or not at all; False: it is there already, the same byte for byte.

    Raises UserError if something else is there.
    """
    if not out.exists() or not any(out.iterdir()):
        with whole_folder(out) as part:
            write(part)
        return True
    with tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=f".{out.name}.") as again:
        write(Path(again))
        if _contents(Path(again)) != _contents(out):
            raise UserError(f"`out` '{out}' exists already and holds something else; give a new folder")
    return False


def _contents(folder: Path) -> dict[Path, str]:
    files = [file for file in sorted(folder.rglob("*")) if not file.is_dir()]
    return dict(zip((file.relative_to(folder) for file in files), file_digests(files), strict=True))


def read_about(file: Path, *fields: str) -> dict[str, Any]:
    """What ``file`` (tuning.json and the like) says; raises UserError if it is broken or lacks one of ``fields``."""
    try:
        found = json_file(file)
    except UserError as error:
        raise UserError(f"{error}; give another folder") from error
    missing = [name for name in fields if name not in found]
    if missing:
        raise UserError(f"'{file}' does not say its {missing[0]}: not written by this program; give another folder")
    return found
