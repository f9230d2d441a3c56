"""Work in batches that fit: where GPU memory runs out, half as much at once, for good."""

from collections.abc import Callable

import torch


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
            torch.cuda.empty_cache()
    return at_once
