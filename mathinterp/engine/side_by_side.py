"""Pieces of work two at a time on one GPU: while one waits for a result or works on the CPU, the other feeds the GPU.

Each thread has a stream of its own; results do not depend on which thread made them. On a CPU there is nothing to
gain, and pieces run one after another.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

AT_ONCE = 2

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class SideBySide:
    """Threads of one device, kept from call to call (so that they keep their streams' memory)."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = ThreadPoolExecutor(AT_ONCE, initializer=self._take_stream) if device.type == "cuda" else None

    def map(self, work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
        """The work's result for each piece, in order; the first exception is raised.

        What the pieces share must have been made before: it is waited for.
        """
        if self._pool is None:
            return [work(piece) for piece in pieces]
        torch.cuda.current_stream(self._device).synchronize()
        return list(self._pool.map(work, pieces))

    def _take_stream(self) -> None:
        torch.cuda.set_stream(torch.cuda.Stream(self._device))
