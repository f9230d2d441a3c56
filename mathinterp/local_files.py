"""Paths of this machine: links that go round, and files and folders that are there whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from mathinterp.errors import UserError


def resolved(path: str | os.PathLike[str], name: str) -> Path:
    """The absolute path without links; raises UserError, with ``name`` for the path, where links go round in a loop."""
    try:
        found = Path(path).resolve()
        found.stat()
    except FileNotFoundError:
        return found
    except (RuntimeError, OSError) as error:  # RuntimeError: what Python before 3.13 makes of a loop
        if isinstance(error, RuntimeError) or error.errno == errno.ELOOP:
            raise UserError(f"{name} '{path}' is a link that leads round in a loop; give another place") from error
        return found
    return found


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to, which takes the place of ``path`` when the block ends without an error.

    A link at ``path`` is replaced; what it points to is left alone. Raises OSError.
    """
    temporary = path.with_name(f".{uuid4().hex}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` to write into, which takes the place of ``out`` when the block ends without an error.

    What ``out`` held is then gone; until then, also where the process is killed, it is at ``out`` or, for the moment
    between two renames, beside it as ``.NAME.replaced``, from where the next call brings it back. Raises OSError.
    """
    part, old = out.with_name(f".{out.name}.part"), out.with_name(f".{out.name}.replaced")
    if old.exists() and not out.exists():
        os.replace(old, out)  # a call was killed between its renames
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        if out.exists():
            os.replace(out, old)
        try:
            os.replace(part, out)
        except OSError:
            if old.exists():
                os.replace(old, out)
            raise
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
