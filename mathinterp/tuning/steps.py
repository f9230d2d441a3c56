"""Which samples each step trains, on each worker: fixed by the seed alone, so that a resumed run sees the same.

Knows numbers of samples and their lengths; knows nothing about models or tokens.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

Mixture = tuple[tuple[int, float], ...]  # samples of each source, one source after the other, and its weight


def sample_order(count: int, places: int, seed: int, mixture: Mixture = ()) -> np.ndarray:
    """The indices of the first ``places`` samples that training sees.

    Without a mixture: epochs of all ``count`` samples in random orders of their own, one after the other. With one:
    the source of each place is drawn with its weight, and every source goes through epochs of its own.
    """
    mixture = mixture or ((count, 1.0),)
    assert sum(size for size, _ in mixture) == count, "the mixture's sources are not the samples"
    weights = np.array([weight for _, weight in mixture])
    drawn = np.random.default_rng((seed, len(mixture))).choice(len(mixture), size=places, p=weights / weights.sum())
    order = np.empty(places, np.int64)
    start = 0
    for source, (size, _) in enumerate(mixture):
        wanted = int((drawn == source).sum())
        epochs = [np.random.default_rng((seed, source, epoch)).permutation(size) for epoch in range(-(-wanted // size))]
        order[drawn == source] = start + np.concatenate([*epochs, np.empty(0, np.int64)])[:wanted]
        start += size
    return order


class StepSampler(Sampler[list[int]]):
    """The micro-batches of one worker, as indices of samples, in the order they train: a batch sampler.

    A step's samples are shared out by length, so that little is padded and all workers have about the same to do.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        steps: int,
        batch_size: int,
        micro_batch: int,
        seed: int,
        mixture: Mixture = (),
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """``lengths``: tokens of each sample. ``batch_size`` counts all workers' samples of a step."""
        assert batch_size % world_size == 0, f"a batch of {batch_size} does not divide over {world_size} workers"
        self.lengths = np.array(lengths)
        self.steps, self.batch_size, self.micro_batch = steps, batch_size, micro_batch
        self.rank, self.world_size = rank, world_size
        self._order = sample_order(len(lengths), steps * batch_size, seed, mixture)

    @property
    def per_step(self) -> int:
        """Micro-batches of a step on one worker: gradients of so many are accumulated."""
        return -(-self.batch_size // self.world_size // self.micro_batch)

    def __len__(self) -> int:
        return self.steps * self.per_step

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.steps):
            yield from self.micro_batches(step)

    def samples_of(self, step: int) -> np.ndarray:
        """What all workers train in ``step``, counted from 0."""
        return self._order[step * self.batch_size : (step + 1) * self.batch_size]

    def micro_batches(self, step: int) -> list[list[int]]:
        """This worker's share of a step, in pieces of samples of about the same length."""
        chosen = self.samples_of(step)
        share = chosen[np.argsort(self.lengths[chosen], kind="stable")][self.rank :: self.world_size]
        return self._pieces(share)

    def _pieces(self, share: np.ndarray) -> list[list[int]]:
        return [share[first : first + self.micro_batch].tolist() for first in range(0, len(share), self.micro_batch)]

    def tokens(self, first: int, last: int) -> int:
        """Tokens of the samples of steps ``first`` to ``last`` - 1, all workers together, padding not counted."""
        return int(self.lengths[self._order[first * self.batch_size : last * self.batch_size]].sum())


class FreshSteps(StepSampler):
    """As StepSampler for samples that are drawn as they are read: each once, in order, lengths unknown before."""

    def __init__(
        self, mean_length: float, *, steps: int, batch_size: int, micro_batch: int, rank: int = 0, world_size: int = 1
    ) -> None:
        """``mean_length``: tokens of a sample, for ``tokens`` alone."""
        assert batch_size % world_size == 0, f"a batch of {batch_size} does not divide over {world_size} workers"
        self.mean_length = mean_length
        self.steps, self.batch_size, self.micro_batch = steps, batch_size, micro_batch
        self.rank, self.world_size = rank, world_size

    def samples_of(self, step: int) -> np.ndarray:
        """What all workers train in ``step``, counted from 0."""
        return np.arange(step * self.batch_size, (step + 1) * self.batch_size)

    def micro_batches(self, step: int) -> list[list[int]]:
        """This worker's share of a step, in pieces."""
        return self._pieces(self.samples_of(step)[self.rank :: self.world_size])

    def tokens(self, first: int, last: int) -> int:
        """About as many tokens as steps ``first`` to ``last`` - 1 have."""
        return round((last - first) * self.batch_size * self.mean_length)
