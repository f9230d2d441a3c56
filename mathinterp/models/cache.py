"""The user's cache folder (XDG): small things that are slow to work out and can always be worked out again.

Knows where the folder is and how to write there safely; knows nothing about what is kept.
"""

import contextlib
import hashlib
import os
from pathlib import Path

from mathinterp.local_files import whole_file


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/mathinterp``, by default ``~/.cache/mathinterp``; not created here.

    For a user without a home it is one that cannot be written.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mathinterp"
    try:
        return Path.home() / ".cache" / "mathinterp"
    except RuntimeError:
        return Path(os.devnull) / "mathinterp"


def write_atomic(file: Path, text: str) -> None:
    """Write a cache entry under a temporary name and rename it; a cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as temporary:
            temporary.write_text(text, encoding="utf-8")


def keep_sealed(file: Path, key: str, text: str) -> None:
    """Write a cache entry that ``read_sealed`` gives back for this key alone."""
    write_atomic(file, f"{text} {_seal(key, text)}")


def read_sealed(file: Path, key: str) -> str | None:
    """What ``keep_sealed`` kept; None: nothing, something damaged, or something for another key."""
    try:
        text, _, seal = file.read_bytes().decode().rpartition(" ")  # as text, "\r" would come back as "\n"
    except (OSError, ValueError):
        return None
    return text if seal == _seal(key, text) else None


def _seal(key: str, text: str) -> str:
    return hashlib.blake2b(f"{key}|{text}".encode(), digest_size=8).hexdigest()


def is_marked(kind: str, key: str) -> bool:
    """Whether ``mark`` was called with this key, in this process or an earlier one."""
    return (cache_folder() / kind / key).is_file()


def mark(kind: str, key: str) -> None:
    """Keep that something was found true of what ``key`` is a hash of."""
    write_atomic(cache_folder() / kind / key, "")
