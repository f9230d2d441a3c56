"""Work in batches that fit: where GPU memory runs out, half as much at once, for good.

And sentences in batches in which none changes what another one gives.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from mathinterp.models.positions import Positions

evaluated = 0.0  # forward evaluations of this process, where the engine counts them: for progress alone
halved = 0  # how often that happened in this process: a product's last bits depend on the shape of its batch


def in_batches(count: int, at_once: int, run: Callable[[int, int], None], evaluations: float = 0.0) -> int:
    """``run(start, stop)`` over range(count), ``at_once`` items a call; returns how many a call it came down to.

    Args:
        evaluations: forward evaluations in one item, counted in ``evaluated``.

    Raises torch.cuda.OutOfMemoryError if a single item does not fit.
    """
    global evaluated
    start = 0
    while start < count:
        stop = min(start + at_once, count)
        try:
            run(start, stop)
            evaluated += (stop - start) * evaluations
            start = stop
        except torch.cuda.OutOfMemoryError:
            if stop - start == 1:
                raise
            at_once = (stop - start) // 2
            free_memory()
    return at_once


def free_memory() -> None:
    """Give unused GPU memory back before half as much is tried; counts in ``halved``."""
    global halved
    halved += 1
    torch.cuda.empty_cache()


def like_lengths(lengths: Sequence[int], positions: Positions, at_once: int) -> list[list[int]]:
    """Indices of sentences in batches of at most ``at_once``: sorted by length, and of one kind of positions each."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    kinds = [list(members) for _, members in groupby(order, key=lambda i: positions.kind(lengths[i]))]
    return [members[start : start + at_once] for members in kinds for start in range(0, len(members), at_once)]
