"""What worker 0 says while it trains, handed on by the driver, and why it would not train at all.

Knows Ray; knows nothing about what is said. Ray's own forwarding would print every process's output twice over.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray


class Lines:
    """What worker 0 says, for the driver."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._refusal: str | None = None

    def say(self, line: str) -> None:
        """Add a line."""
        self._lines.append(line)

    def since(self, count: int) -> list[str]:
        """All lines but the first ``count``."""
        return self._lines[count:]

    def refuse(self, why: str) -> None:
        """Give up: what was asked for cannot be done, and trying again would not help."""
        self._refusal = why

    def refusal(self) -> str | None:
        """Why, or None."""
        return self._refusal


def new_lines() -> Any:
    """A handle to a ``Lines`` actor, which lives as long as the handle."""
    return ray.remote(num_cpus=0)(Lines).remote()


@contextmanager
def followed(lines: Any, say: Callable[[str], None]) -> Iterator[None]:
    """Hand the lines to ``say``, within a second, as long as the block lasts."""
    done = threading.Event()

    def follow() -> None:
        said = 0
        while True:
            last = done.wait(1.0)
            for line in ray.get(lines.since.remote(said)):
                say(line)
                said += 1
            if last:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=10)
