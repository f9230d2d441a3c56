"""Where a local Ray keeps its session: in the user's temporary folder if Ray can work there, else in a short one.

Knows the names of Ray's sockets and the system's limit for such names; starts nothing.
"""

import logging
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mathinterp.errors import UserError

VARIABLE = "RAY_TMPDIR"  # Ray's own; it comes before TMPDIR
SESSION = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # the longest socket below it
MOST = 103 if sys.platform == "darwin" else 107  # bytes of a socket's name
LONGEST = MOST - len(SESSION)
SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # where a folder of the user's own is made

logger = logging.getLogger(__name__)


@contextmanager
def ray_folder() -> Iterator[None]:
    """Within the block Ray's folder is one that it can work in: as the environment says, else a short one, told in one
    line. Raises UserError if there is none.
    """
    folder = usable_folder()
    earlier = os.environ.get(VARIABLE)
    os.environ.update({} if folder is None else {VARIABLE: folder})
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        os.environ.update({} if earlier is None else {VARIABLE: earlier})


def usable_folder() -> str | None:
    """The folder that Ray must be given in place of the environment's; None if that one will do."""
    name = VARIABLE if VARIABLE in os.environ else "TMPDIR"
    asked = os.environ.get(name, "/tmp")
    why = _fault(asked)
    if why is None:
        return None
    for parent in SHORT:
        if (own := _own_folder(parent)) is not None:
            said = f"{name} '{asked}'" if name in os.environ else f"'{asked}'"
            logger.warning(f"{said} {why}, so Ray's session is in {own}")
            return own
    raise UserError(
        f"Ray needs a folder for its session, and '{asked}' {why}; set {VARIABLE} to a folder of at most {LONGEST}"
        " bytes that may be written"
    )


def require_scratch() -> None:
    """Raise UserError unless Python finds a place for temporary files (TMPDIR, else /tmp and the like)."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise UserError(f"no temporary folder can be written ({error}); set TMPDIR to one that can") from error


def _fault(folder: str) -> str | None:
    """Why Ray cannot work below ``folder``, or None."""
    if len(os.fsencode(os.path.abspath(folder))) > LONGEST:
        return f"is too long for Ray's sockets ({len(os.fsencode(folder))} bytes, at most {LONGEST})"
    if not os.path.isdir(folder):
        return "is not a folder that exists"
    below = os.path.join(folder, "ray")
    for place in (below, folder):  # Ray's own folder, where somebody made it before
        if os.path.exists(place):
            return None if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK) else "may not be written to"
    raise AssertionError("the folder was there")


def _own_folder(parent: str) -> str | None:
    """A folder of this user in ``parent`` that nobody else can write to; None if it cannot be had."""
    folder = Path(parent, f"mathinterp-{os.getuid()}")
    if len(os.fsencode(folder)) > LONGEST or not private(folder):
        return None
    return str(folder) if _fault(str(folder)) is None else None


def private(folder: Path) -> bool:
    """Whether ``folder``, made here where it is not there yet, is this user's and nobody else can reach into it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # not what a link that somebody else left there points to
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
