"""Fewer searches for garbage while a process imports.

Of the million objects that torch and transformers make none is garbage; searching through them, again and again, takes
a third of the processor time of a start. The searches that are left out are those of old objects: Python makes one
after every 10 of middle-aged ones. It also waits until there are a quarter more of the old ones, so that later, with a
million, RARE changes little.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARE = 100  # searches of middle-aged objects between two of old ones, at least


def search_rarely() -> None:
    """For the rest of this process, which must be one of our own."""
    gc.set_threshold(*gc.get_threshold()[:2], RARE)


@contextmanager
def searched_rarely() -> Iterator[None]:
    """Within the block, in any process."""
    before = gc.get_threshold()
    search_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*before)
