"""The user's cache folder (XDG): small things that are slow to work out and can always be worked out again.

Knows where the folder is and how to write there safely; knows nothing about what is kept.
"""

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/mathinterp``, by default ``~/.cache/mathinterp``; not created here."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mathinterp"


def write_atomic(file: Path, text: str) -> None:
    """Write a cache entry under a temporary name and rename it; a cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".writing-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(temporary, file)
        except OSError:
            os.unlink(temporary)
            raise
