"""Batches of a model that lies on several cards, as many at once as there are cards, so that none waits for another.

While one batch is in a layer on one card, the next one is in a layer on another. Each has a CUDA stream of its own on
every card, and the host only queues work. On one card, and on a CPU, batches run one after another.

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
def _streams(cards: tuple[torch.device, ...]) -> list[list[torch.cuda.Stream]]:
    """Always the same ones: each keeps memory of its own. A list for each turn, one stream a card."""
    return [[torch.cuda.Stream(card) for card in cards] for _ in cards]


@contextmanager
def in_flight(cards: Sequence[torch.device]) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within the block each batch runs inside ``turn()``; afterwards whatever follows waits for all of them.

    What batches share must have been made before the block, or on every turn anew.
    """
    if len(cards) < 2 or any(card.type != "cuda" for card in cards):
        yield nullcontext
        return
    made = [torch.cuda.current_stream(card) for card in cards]
    turns = _streams(tuple(cards))
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
