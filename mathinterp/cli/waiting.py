"""How far the start of a service is: a line on stderr at once, and one every ten seconds."""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mathinterp.cli.output import is_quiet
from mathinterp.cli.verbosity import say_on_stderr

LINE_SECONDS = 10.0
_READY = re.compile(r"(\d+) of (\d+) replicas ready")
Found = tuple[int, int | None]  # replicas that are ready, and how many there will be where that is known


class Waiting:
    """Tells it; nothing under --quiet.

    Args:
        log: of the process that starts, which is then named; None: it is this process.
    """

    def __init__(self, log: Path | None = None):
        self._log = log
        self._began, self._due = time.monotonic(), 0.0

    def tell(self, look: Callable[[], Found]) -> None:
        """Say where it stands, if it is time to; ``look`` is asked only then."""
        seconds = time.monotonic() - self._began
        if seconds < self._due or is_quiet():
            return
        self._due += LINE_SECONDS
        ready, replicas = look()
        line = "the service starts: " + ("" if replicas is None else f"{ready} of {replicas} replicas ready, ")
        facts: dict[str, Any] = {"replicas_ready": ready, "replicas": replicas}
        if self._log is None:
            say_on_stderr(f"{line}{seconds:.0f} s so far", **facts)
        else:
            say_on_stderr(f"{line}{seconds:.0f} s so far; its log is {self._log}", **facts, log=str(self._log))


def found_in(log: Path, replicas: int | None) -> Found:
    """What the process that starts has told last; ``replicas`` as they were asked for, as long as it has not."""
    told = _READY.findall(log.read_text(errors="replace"))
    return (int(told[-1][0]), int(told[-1][1])) if told else (0, replicas)


def last_word(log: Path) -> str:
    """What a process that ended said last, in whatever form."""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = said[-1] if said else "it said nothing"
    with suppress(ValueError, KeyError, TypeError):
        last = str(json.loads(last)["message"])
    return last.removeprefix("mathinterp: ")
