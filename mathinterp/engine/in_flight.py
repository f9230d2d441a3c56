"""Batches of a model that lies on several cards, several at once, so that no card waits for another.

While one batch is in a layer on one card, the next one is in a layer on another. Each has a CUDA stream of its own on
every card, and the host only queues work. On one card, and on a CPU, batches run one after another.

With as many batches as cards, a card is idle while its next batch is copied to it, and where layers take unequal times.
With more it has another one to go on with; each keeps memory of its own.

Where work needs no layer, only what can be copied to each card, each has a share of its own (``on_every``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from itertools import cycle
from typing import TypeVar

import torch

Batch = TypeVar("Batch")
Result = TypeVar("Result")


@cache
def _streams(cards: tuple[torch.device, ...], turn: int) -> list[torch.cuda.Stream]:
    """Always the same ones: each keeps memory of its own. One for each card."""
    return [torch.cuda.Stream(card) for card in cards]


def turns_for(batches: int, cards: int) -> int:
    """How many batches to have in flight: more than cards, at most twice as many and one.

    Those in flight end at about the same time. Of these numbers it is the one that leaves fewest cards idle when the
    last batches are left: after 16 of 17 batches in four turns, one batch would be alone on two cards.
    """

    def time(turns: int) -> int:
        full, left = divmod(batches, turns)
        return full * turns + max(left, cards if left else 0)

    return min(range(cards + 1, 2 * cards + 2), key=time)


@contextmanager
def in_flight(
    cards: Sequence[torch.device], batches: int | None = None
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within the block each batch runs inside ``turn()``; afterwards whatever follows waits for all of them.

    What batches share must have been made before the block, or on every turn anew.

    Args:
        batches: how many there will be, for ``turns_for``; None: as many in flight as cards, where more memory for
            each would not pay.
    """
    if len(cards) < 2 or any(card.type != "cuda" for card in cards):
        yield nullcontext
        return
    made = [torch.cuda.current_stream(card) for card in cards]
    count = len(cards) if batches is None else turns_for(batches, len(cards))
    turns = [_streams(tuple(cards), turn) for turn in range(count)]
    for streams in turns:
        for stream in streams:
            for before in made:
                stream.wait_stream(before)
    following = cycle(turns)

    @contextmanager
    def turn() -> Iterator[None]:
        with ExitStack() as stack:
            for stream in reversed(next(following)):  # home last: its card is the current one
                stack.enter_context(torch.cuda.stream(stream))
            yield

    try:
        yield turn
    finally:
        for streams in turns:
            for stream in streams:
                for after in made:
                    after.wait_stream(stream)


def turns(cards: Sequence[torch.device], batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches one after another, each to be worked on in a turn of its own.

    All are made before the first turn. What is made of one may be read when there is none left.
    """
    made = list(batches)
    with in_flight(cards) as turn:
        for batch in made:
            with turn():
                yield batch


def on_every(cards: Sequence[torch.device], work: Callable[[int], Result]) -> list[Result]:
    """``work(number)`` for each card, without gradients, where its tensors lie on that card alone.

    On several GPUs at the same time, in a thread for each, since such work waits for its card now and then.
    """
    if len(cards) < 2 or any(card.type != "cuda" for card in cards):
        return [work(number) for number in range(len(cards))]

    def run(number: int) -> Result:
        with torch.cuda.device(cards[number]), torch.inference_mode():
            return work(number)

    with ThreadPoolExecutor(len(cards), "card") as threads:
        return list(threads.map(run, range(len(cards))))
