"""What made a row beside its inputs: versions of the packages, this code's revision, the kind of device.

Knows installed packages and the checkout; knows nothing about runs. None of it is part of a run's id: a run may be
resumed by another version, which is then recorded and told. All of it is plain JSON, name -> text.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mathinterp
from mathinterp.text import one_line

PACKAGE = Path(mathinterp.__file__).resolve().parent
PACKAGES = ("transformers", "tokenizers", "torch")  # decide token ids or numbers of every run
MAKES_RUNS = frozenset(  # commands
    ("chain", "edit", "evaluate", "knockout", "league", "maskkeep", "mib", "pipeline", "reproduce", "scan", "stability",
     "tune")
)  # fmt: skip
OF_THE_CALLER = ("address", "service", "trust-remote-code")  # options
PROGRAM = PACKAGE / "__main__.py"  # what `python -m mathinterp` runs, in a submitted job too
SOURCE_SUFFIXES = {".py", ".sql", ".yaml", ".jsonl"}

Versions = Mapping[str, str]


def versions(packages: Iterable[str] = (), device: str | None = None) -> dict[str, str]:
    """What is installed here, of PACKAGES and ``packages``; what is absent is left out.

    Args:
        packages: others that decide rows, for example "peft".
        device: "cuda" or "cpu", where rows are computed.
    """
    found = {"mathinterp": mathinterp.__version__, "source": source_digest(), **checkout()}
    for name in dict.fromkeys([*PACKAGES, *packages]):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = _torch_version()  # the metadata do not always name the build
    found["torch"] = torch["__version__"]
    if torch["cuda"] is not None:
        found["cuda"] = torch["cuda"]
    return found if device is None else {**found, "device": device}


@cache
def _torch_version() -> dict[str, Any]:
    """What torch/version.py says, without the seconds that it takes to import torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch is not installed"
    assert spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def code_version() -> str:
    """The package's version and its revision: the commit of a checkout, else a digest of the source files."""
    commit, files = checkout(), f"files.{source_digest()}"
    if not commit:
        return f"{mathinterp.__version__}+{files}"
    dirty = f".dirty.{files}" if commit["dirty"] == "yes" else ""
    return f"{mathinterp.__version__}+git.{commit['commit'][:12]}{dirty}"


@cache
def source_digest(package: Path = PACKAGE) -> str:
    """12 hex digits of the package's source files, alike wherever they lie."""
    digest = hashlib.sha256()
    for file in sorted(file for file in package.rglob("*") if file.suffix in SOURCE_SUFFIXES):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(package).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:12]


def own_source(kind: type) -> dict[str, str]:
    """Of a class from outside this package, a digest of the package it is in, or of its one file; else nothing."""
    top = kind.__module__.partition(".")[0]
    module = sys.modules.get(top)
    if top == PACKAGE.name or module is None or getattr(module, "__file__", None) is None:
        return {}
    file = Path(str(module.__file__))
    if hasattr(module, "__path__"):
        return {f"source of {top}": source_digest(file.parent)}
    return {f"source of {top}": hashlib.sha256(file.read_bytes()).hexdigest()[:12]}


@cache
def checkout(package: Path = PACKAGE) -> dict[str, str]:
    """The checkout's commit, and whether the package's files differ from it; nothing where there is no checkout."""
    if not (package.parent / ".git").exists():
        return {}
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain", "--", package.name)
    if not commit or changes is None:
        return {}
    return {"commit": commit, "dirty": "yes" if changes else "no"}


def _git(package: Path, *command: str) -> str | None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(package.parent), *command], capture_output=True, text=True, timeout=20, env=plain
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def differences(known: Sequence[Versions], here: Versions) -> str:
    """What of ``here`` is another version than some of ``known``, as "torch 2.11.0 and 2.13.0"; empty if nothing is.

    What only one side names is not compared, nor are commits, which may differ over the same source files.
    """
    found = []
    for name in here:
        if name in ("commit", "dirty"):
            continue
        seen = dict.fromkeys([entry[name] for entry in known if name in entry] + [here[name]])
        if len(seen) > 1:
            label = {"source": "mathinterp's source files"}.get(name, name)
            found.append(f"{label} {' and '.join(seen)}")
    return ", ".join(found)


def merged(known: Sequence[Versions], here: Versions) -> list[dict[str, str]]:
    """``known`` with ``here`` unless an entry says as much; an entry that says less is replaced."""
    entries = [dict(entry) for entry in known]
    if any(here.items() <= entry.items() for entry in entries):
        return entries
    return [*(entry for entry in entries if not entry.items() <= here.items()), dict(here)]


def command() -> str | None:
    """The command line of this process, where it is a command or a job of this package; else None."""
    program = Path(sys.argv[0])
    if program.name == "mathinterp" or program.resolve() == PROGRAM:
        return shlex.join(["mathinterp", *sys.argv[1:]])
    job = program.suffix == ".py" and program.parent.name == "ray_jobs"
    return shlex.join(["python", f"ray_jobs/{program.name}", *sys.argv[1:]]) if job else None


def repeatable(stored: str | None, scan: str) -> str | None:
    """What ``command`` gave, as it may be shown to be typed again, though anybody could have written it into a record.

    A command of this package that makes runs, its words quoted so that a shell obeys none of them, without what would
    run code or call on a machine that the record names: ``module:Class`` becomes the name of the scan, OF_THE_CALLER
    are left out. None: it is no such command.
    """
    try:
        words = shlex.split(stored or "")
    except ValueError:
        return None
    at = _command_at(words)
    job = words[:1] == ["python"] and at == 1 and re.fullmatch(r"ray_jobs/\w+\.py", words[1])
    known = words[:1] == ["mathinterp"] and at < len(words) and words[at] in MAKES_RUNS
    if not (job or known) or one_line(stored or "") != stored:
        return None
    kept, value_of = words[: at + 1], ""
    for word in words[at + 1 :]:
        option, equals, _ = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        if option not in OF_THE_CALLER and value_of not in OF_THE_CALLER:
            kept.append(scan if words[at] == "scan" and re.fullmatch(r"[\w.]+:\w+", word) and not value_of else word)
        value_of = "" if equals or option == "trust-remote-code" else option
    return shlex.join(kept)


def is_command(stored: str, name: str) -> bool:
    """Whether what ``command`` gave is the command of that name."""
    words = shlex.split(stored)
    at = _command_at(words)
    return words[at : at + 1] == [name]


def with_option(stored: str, option: str, value: str) -> str:
    """What ``command`` gave, with an option at its end, where it counts; once."""
    said = f"--{option} {value}"
    return stored if said in stored else f"{stored} {said}"


def _command_at(words: Sequence[str]) -> int:
    """The index of the first word after the program and the options that say how much is told."""
    at = 1
    while at < len(words):
        option, equals, _ = words[at][2:].partition("=") if words[at].startswith("--") else ("", "", "")
        if option == "log-format":
            at += 1 if equals else 2
        elif option in ("quiet", "verbose") or re.fullmatch("-[qv]+", words[at]):
            at += 1
        else:
            break
    return at
