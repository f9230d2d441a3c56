"""Paths of this machine: links that go round, and files that are there whole or not at all."""

import errno
import os
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
    temporary = path.with_name(f".{uuid4().hex}.tmp{path.suffix}")  # matplotlib goes by the suffix
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
