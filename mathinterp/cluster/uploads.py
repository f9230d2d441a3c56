"""What of a working directory travels to a cluster, and what never does: secrets, and links that lead out of it.

Knows names, links and sizes, and Ray's rules for ignore files; opens no other file.
"""

import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pathspec import PathSpec

from mathinterp.errors import UserError

# Names of files and folders, in any case and at any depth; .rayignore has the same for `ray job submit` and `ray up`.
# Tokenizers and Python modules (tokenizer.json, added_tokens.json, next_token.py) are none: a secret's name ends in
# "token" before its suffix, or says what the token is for.
SECRETS = (
    ".env*", "*.env", ".netrc", "*credentials*",
    "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
    "*token", "*token.[!p]*", "*token.p[!y]*", "tokens.txt", "tokens.json", "tokens.y*ml",
    "*api[-_]token*[!y]", "*auth[-_]token*[!y]", "*access[-_]token*[!y]", "*refresh[-_]token*[!y]", "*hf[-_]token*[!y]",
)  # fmt: skip
IGNORE_FILES = (".gitignore", ".rayignore")
MOST_BYTES = 2**30  # of one file or of all: what is larger never fits and would take minutes to find out
MOST_FILES = 50_000
NAMED = 5  # names that a line has room for


@dataclass(frozen=True)
class LeftOut:
    """Names relative to the folder, of what would otherwise be uploaded."""

    secrets: tuple[str, ...] = ()
    links: tuple[str, ...] = ()  # and pipes, sockets, devices

    def __str__(self) -> str:
        """`` without ...``, to go on a line with; nothing if nothing is left out."""
        kinds = {"secrets": self.secrets, "links and special files": self.links}
        said = [f"the {kind} {listed(names)}" for kind, names in kinds.items() if names]
        return f" without {' and '.join(said)} (rename what the job needs)" if said else ""


def uploaded(folder: Path, excludes: Sequence[str]) -> tuple[dict[str, int], LeftOut]:
    """What of ``folder`` travels, as with `ray job submit`: by ``excludes`` and all .gitignore and .rayignore below.

    Returns:
        name relative to the folder -> bytes, with empty folders (0 bytes); and secrets, links and special files. A link
        stays if it points to a file of the folder that is no secret and not hidden.
    Raises:
        UserError: far more than any job may send, told before all of it is looked at; or a folder that cannot be read.
    """
    found: dict[str, int] = {}
    secrets: list[str] = []
    links: list[str] = []
    waiting = [(folder, [_rule(folder, excludes)])]
    while waiting:
        here, above = waiting.pop()
        with _readable(folder, here):
            rules = above + [_rule(here, lines) for name in IGNORE_FILES if (lines := _lines(here / name))]
            below = sorted(here.iterdir())
            if not below and here != folder:
                found[str(here.relative_to(folder))] = 0
            for path in below:
                name = str(path.relative_to(folder))
                if (secret := is_secret(path)) or not _plain(folder, path):
                    (secrets if secret else links).append(name)
                elif not any(rule(path) for rule in rules):
                    if path.is_dir():
                        waiting.append((path, rules))
                    else:
                        found[name] = path.stat().st_size
        _require_fit(folder, found)
    return found, LeftOut(tuple(sorted(secrets)), tuple(sorted(links)))


@contextmanager
def _readable(folder: Path, here: Path) -> Iterator[None]:
    """What of a folder cannot be read, as a UserError of one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"'{error.filename or here}' cannot be read ({error.strerror or error}), so {folder} cannot be uploaded;"
            " list in .rayignore what the job does not need, or give another `working_dir`"
        ) from error


def _rule(folder: Path, lines: Sequence[str]) -> Callable[[Path], bool]:
    """Whether an ignore file in ``folder`` leaves a path out."""
    spec = PathSpec.from_lines("gitignore", lines)
    return lambda path: spec.match_file(path.relative_to(folder))


def _lines(file: Path) -> list[str]:
    return (
        file.read_text(encoding="utf-8", errors="surrogateescape").splitlines(keepends=True) if file.is_file() else []
    )


def _require_fit(folder: Path, found: Mapping[str, int]) -> None:
    """Raise UserError once it is clear that this is no folder of a job, but a disk or somebody's home, for example."""
    total = sum(found.values())
    if total <= MOST_BYTES and len(found) <= MOST_FILES:
        return
    largest = sorted(found, key=lambda name: -found[name])[:NAMED]
    raise UserError(
        f"{folder} holds more than a job can send ({total / 2**30:.1f} GiB in the first {len(found):,} files, among"
        f" them {', '.join(largest)}; Ray takes less than 100 MiB): give the job's own folder as"
        " `working_dir`, or list what it does not need in .rayignore"
    )


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
