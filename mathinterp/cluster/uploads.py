"""What of a working directory never travels to a cluster: secrets, and links that lead out of it.

Knows names and links, and how Ray walks a folder; opens no file.
"""

import fnmatch
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

# Names of files and folders, in any case and at any depth; .rayignore has the same for `ray job submit` and `ray up`.
# Tokenizers and Python modules (tokenizer.json, added_tokens.json, next_token.py) are none: a secret's name ends in
# "token" before its suffix, or says what the token is for.
SECRETS = (
    ".env*", "*.env", ".netrc", "*credentials*",
    "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
    "*token", "*token.[!p]*", "*token.p[!y]*", "tokens.txt", "tokens.json", "tokens.y*ml",
    "*api[-_]token*[!y]", "*auth[-_]token*[!y]", "*access[-_]token*[!y]", "*refresh[-_]token*[!y]", "*hf[-_]token*[!y]",
)  # fmt: skip
NAMED = 5  # names that a line has room for


@dataclass(frozen=True)
class LeftOut:
    """Names relative to the folder, of what would otherwise be uploaded."""

    secrets: tuple[str, ...] = ()
    links: tuple[str, ...] = ()  # and pipes, sockets, devices

    @property
    def patterns(self) -> list[str]:
        """For Ray's excludes, in the syntax of .gitignore."""
        return ["/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", name) for name in (*self.secrets, *self.links)]

    def __str__(self) -> str:
        """`` without ...``, to go on a line with; nothing if nothing is left out."""
        kinds = {"secrets": self.secrets, "links and special files": self.links}
        said = [f"the {kind} {listed(names)}" for kind, names in kinds.items() if names]
        return f" without {' and '.join(said)} (rename what the job needs)" if said else ""


def left_out(folder: Path, excludes: list[str]) -> LeftOut:
    """Secrets, links and special files below ``folder``.

    A link stays if it points to a file of the folder that is no secret and not hidden.
    """
    secrets: list[str] = []
    links: list[str] = []

    def out(path: Path) -> bool:
        if path == folder:
            return False
        secret = is_secret(path)
        if left := secret or not _plain(folder, path):
            (secrets if secret else links).append(str(path.relative_to(folder)))
        return left

    _dir_travel(folder, [out, _get_excludes(folder, excludes)], lambda path: None, True, logging.getLogger(__name__))
    return LeftOut(tuple(sorted(secrets)), tuple(sorted(links)))


def is_secret(path: Path) -> bool:
    """By its name; a Python package is none."""
    named = any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in SECRETS)
    return named and not (path / "__init__.py").is_file()


def _plain(folder: Path, path: Path) -> bool:
    """A file or folder, or a link to a file of the upload."""
    if not path.is_symlink():
        return path.is_file() or path.is_dir()
    target = Path(os.path.realpath(path))
    if not target.is_file() or not target.is_relative_to(folder):
        return False
    parts = target.relative_to(folder).parts
    return not any(part.startswith(".") or is_secret(Path(part)) for part in parts)


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
