"""Files of this machine that a job's command line names: they travel beside the uploaded folder.

Knows which options name files to read, and paths; opens no file. A path within the current folder keeps its name in
the upload, any other gets one there and is replaced on the command line.
"""

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mathinterp.cluster.uploads import MOST_BYTES, is_secret
from mathinterp.errors import UserError

READS = {  # options whose values may be files
    "prompts", "data", "held-out", "circuit", "tasks", "text", "concepts", "against", "data-dir", "adapter", "model",
    "beside", "cases", "test", "transfer",
}  # fmt: skip
LASTS = {"store": "a full path or a URL", "out": "a full path"}  # options of what must outlive the job
FOLDER = "sent-files"  # in the upload, for paths that lead out of the current folder


def require_lasting(args: Sequence[str]) -> None:
    """Raise UserError for results that would lie in the job's own folder, which Ray deletes after it."""
    for option, _, value in _words(args):
        if option in LASTS and "://" not in value and not value.startswith(("/", "~")):
            where = "would be in the job's own folder, which Ray deletes after it"
            raise UserError(f"`{option}` {value}: {where}; give {LASTS[option]}")


def _words(args: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Of each word the option that it, or what follows its =, is the value of, what precedes the value, and the value.

    Words that are no option's value have the option "".
    """
    option = ""
    for word in args:
        given, equals, value = word.partition("=")
        if equals and _option(given):
            yield _option(given), given + equals, value
        else:
            yield option, "", word
        option = _option(word)


@dataclass
class GivenFiles:
    """What a command line names.

    Args:
        folder: that is uploaded.
        packed: names in its upload.
        listed: names of the files of another folder that may travel, relative to it.
    """

    folder: Path
    packed: Collection[str]
    listed: Callable[[Path], Sequence[str]]
    files: dict[str, Path] = field(default_factory=dict)  # name in the upload -> file here
    named: list[str] = field(default_factory=list)  # what travels, as it was given
    nodes_own: list[str] = field(default_factory=list)  # what does not: folders and models by their full path
    absent: list[str] = field(default_factory=list)  # what looks like a file and is none here

    def arguments(self, args: Sequence[str]) -> list[str]:
        """The command line as the job needs it; raises UserError for a file that cannot be sent."""
        return [
            before + (self._value(option, value) if option in READS else value)
            for option, before, value in _words(args)
        ]

    def module(self, job: str) -> None:
        """Take along the module or package of ``module:Class`` if it is in the current folder."""
        for word in job.split():
            top = word.partition(":")[0].partition(".")[0]
            for name in (top, f"{top}.py") if ":" in word and top else ():
                self._take("", name)

    def _value(self, option: str, value: str) -> str:
        """An option's value: a path, FILE:WEIGHT, kind:PATH, or several of them."""
        if option == "tasks":
            return ",".join(self._piece(option, piece) for piece in value.split(","))
        return self._piece(option, value)

    def _piece(self, option: str, text: str) -> str:
        kind, _, after = text.partition(":")
        before, _, weight = text.rpartition(":")
        if os.path.lexists(text) or ":" not in text:
            return self._take(option, text)
        if after and os.path.lexists(after):
            return f"{kind}:{self._take(option, after)}"
        if _is_like_a_file("model" if kind == "model" else option, after):
            self.absent.append(text)
            return text
        return f"{self._take(option, before)}:{weight}" if before else text

    def _take(self, option: str, text: str) -> str:
        """The path's name in the upload; ``text`` itself if there is no such file here."""
        here = Path(text)
        if not text or not os.path.lexists(here):
            self.absent += [text] if option and _is_like_a_file(option, text) else []
            return text
        outside = here.is_absolute() or ".." in here.parts
        if here.is_absolute() and (here.is_dir() or option == "model"):
            self.nodes_own.append(text)
            return text
        name = os.path.normpath(text)
        if outside:
            name = f"{FOLDER}/{len(self.named)}/{os.path.basename(os.path.abspath(here))}"
        elif any(each == name or each.startswith(f"{name}/") for each in self.packed):
            if not os.path.samefile(here, self.folder / name):
                raise UserError(f"'{text}' is a file here and another one in {self.folder}; give its full path")
            if not here.is_dir():  # of a folder the weights, for example, may be left out by .gitignore
                return text
        before = len(self.files)
        self._add(text, here, name)
        self.named += [text] if len(self.files) > before else []
        return name if outside else text

    def _add(self, text: str, here: Path, name: str) -> None:
        _require_no_secret(text, here)
        try:
            found = here.stat()
            if stat.S_ISDIR(found.st_mode):
                names = {f"{name}/{below}": here / below for below in self.listed(here)}
                self.files |= {each: path for each, path in names.items() if each not in self.packed}
                return
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"'{text}' is no regular file, so it cannot be sent with the job")
            with open(here, "rb"):
                self.files[name] = here
        except OSError as error:
            raise UserError(f"'{text}' cannot be sent with the job: {error.strerror or error}") from error
        if found.st_size > MOST_BYTES:
            raise UserError(
                f"'{text}' has {found.st_size / 2**30:.1f} GiB, too much to send with a job; put it where all nodes see"
                " it, and give its path there, with `no_send`"
            )


def _is_like_a_file(option: str, text: str) -> bool:
    """Rather than a URL, a name of this package or, of a model, one of the hub."""
    if text.startswith("//"):
        return False
    if option == "model":
        return text.startswith(("/", "./", "../", "~")) or text.endswith(".gguf")
    return "/" in text or re.search(r"\.[A-Za-z]\w*$", text) is not None


def _option(word: str) -> str:
    """An option's name without its dashes; nothing for any other word."""
    return word[2:] if word.startswith("--") else ""


def _require_no_secret(text: str, here: Path) -> None:
    """Of what is named, and of what a link leads to, nothing on the way from here may be hidden or like a secret."""
    target = os.path.relpath(os.path.realpath(here), os.path.realpath("."))
    for part in {*Path(text).parts, *Path(target).parts} - {".", "..", "/"}:
        if part.startswith(".") or is_secret(Path(part)):
            raise UserError(
                f"'{text}' is not sent: '{part}' is hidden or named like a secret, and such files never leave this"
                " machine; copy what the job needs to another name"
            )
