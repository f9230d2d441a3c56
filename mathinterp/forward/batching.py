"""Work in batches that fit: where GPU memory runs out, half as much at once, for good."""

from collections.abc import Callable

import torch

halved = 0  # how often that happened in this process: a product's last bits depend on the shape of its batch


def in_batches(count: int, at_once: int, run: Callable[[int, int], None]) -> int:
    """``run(start, stop)`` over range(count), ``at_once`` items a call; returns how many a call it came down to.

    Raises torch.cuda.OutOfMemoryError if a single item does not fit.
    """
    start = 0
    while start < count:
        stop = min(start + at_once, count)
        try:
            run(start, stop)
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
