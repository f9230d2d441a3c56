"""Random heads to hold a ranking against: as many as are knocked out, none of them a key head (method.md section 4).

Knows lists of heads and seeds; knows nothing about models.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from mathinterp.models.units import Head


def random_heads(every: Sequence[Head], key: Sequence[Head], seed: int, never: Iterable[Head] = ()) -> list[Head]:
    """As many heads as ``key`` has, drawn from all but these and ``never``; one seed is one order of all heads.

    Raises AssertionError if there are not as many others.
    """
    return _others(every, key, seed, never)[: len(key)]


def layer_matched_heads(
    every: Sequence[Head], key: Sequence[Head], seed: int, never: Iterable[Head] = ()
) -> list[Head]:
    """As many others in each layer as ``key`` has there, none of ``never``.

    A layer with too few others gives all it has; what it lacks comes from the layers nearest to it (the lower one
    first) that have others left. Raises AssertionError if there are not as many others in all.
    """
    left: dict[int, list[Head]] = {}
    for head in _others(every, key, seed, never):
        left.setdefault(head[0], []).append(head)
    drawn, short = [], []
    for layer, count in sorted(Counter(layer for layer, _ in key).items()):
        own = left.get(layer, [])
        drawn += own[:count]
        short += [layer] * (count - len(own))
        left[layer] = own[count:]
    for layer in short:
        nearest = min((other for other, heads in left.items() if heads), key=lambda other: (abs(other - layer), other))
        drawn.append(left[nearest].pop(0))
    return drawn


def _others(every: Sequence[Head], key: Sequence[Head], seed: int, never: Iterable[Head]) -> list[Head]:
    """All heads but ``key`` and ``never``, in the seed's order."""
    order, excluded = np.random.default_rng(seed).permutation(len(every)), {*key, *never}
    others = [every[i] for i in order if every[i] not in excluded]
    assert len(others) >= len(key), f"{len(key)} key heads leave only {len(others)} others"
    return others
