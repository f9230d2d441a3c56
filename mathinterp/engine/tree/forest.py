"""Prompts that share prefixes, packed into trees.

A decoder is causal, so a prefix that several prompts share is computed once: each pack is one sequence of
tree nodes (token, depth, parent), run with the depth as position id and a mask that lets a node see its
ancestors and itself. Knows token ids only; knows nothing about models, tensors or answers.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Forest:
    """Packs of equal size. P packs, N nodes a pack (the last ones padding, which nothing else sees).

    ``node_of[i][t]`` is the flat index ``pack * N + node`` of token t of sequence i.
    """

    token_ids_PN: np.ndarray  # int64; padding 0
    depths_PN: np.ndarray  # int64, the position ids; padding 0
    parents_PN: np.ndarray  # int64 index in the pack, -1 for roots and padding
    used_P: np.ndarray  # nodes in use
    node_of: tuple[np.ndarray, ...]
    kinds_P: np.ndarray  # what sequences a pack holds, see ``plant``

    @property
    def n_packs(self) -> int:
        """Number of packs P."""
        return int(self.token_ids_PN.shape[0])

    @property
    def pack_size(self) -> int:
        """Nodes a pack N, padding included."""
        return int(self.token_ids_PN.shape[1])

    @property
    def n_nodes(self) -> int:
        """Nodes in use over all packs."""
        return int(self.used_P.sum())

    def ancestors(self, pack: int, window: int | None = None) -> np.ndarray:
        """Boolean N x N: may node i (row) attend to node j (column)? Itself and its ancestors.

        Args:
            pack: index of the pack.
            window: sliding attention window: only positions less than ``window`` back are seen.
        """
        size, depths = self.pack_size, self.depths_PN[pack]
        allowed = np.eye(size, dtype=bool)
        for node in range(int(self.used_P[pack])):  # parents come before their children
            parent = self.parents_PN[pack, node]
            if parent >= 0:
                allowed[node] |= allowed[parent]
        if window is not None:
            allowed &= (depths[:, None] - depths[None, :]) < window
        return allowed

    def subtree_ends(self, pack: int) -> np.ndarray:
        """N: the first node after each node's subtree. Nodes are in depth-first order, so node i sees node j iff
        j <= i < end of j; padding is seen by itself alone.
        """
        ends = np.arange(1, self.pack_size + 1)
        for node in range(int(self.used_P[pack]) - 1, -1, -1):  # children come after their parents
            parent = self.parents_PN[pack, node]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[node])
        return ends


def plant(
    sequences: Sequence[Sequence[int]],
    *,
    pack_size: int,
    private_from: Sequence[int] | None = None,
    kinds: Sequence[int] | None = None,
    packs_multiple_of: int = 1,
    alignment: int = 1,
    exact: bool = False,
) -> Forest:
    """Pack ``sequences`` into trees of about ``pack_size`` nodes, all of one size and evenly filled.

    Args:
        sequences: token ids of each prompt as fed to the model.
        pack_size: nodes aimed at; a pack is larger only if one sequence alone is longer.
        private_from: per sequence, the index from which its nodes are shared with no other sequence
            (needed where an intervention differs between prompts of the same text).
        kinds: per sequence, its kind; each pack holds one kind, and packs of a kind are consecutive. None: all alike.
        packs_multiple_of: the number of packs of each kind is made a multiple of this, with empty ones where need be.
        alignment: the pack size is a multiple of this.
        exact: packs are not made smaller where as many smaller ones would do.
    """
    planter = Planter(sequences, private_from, kinds)
    longest = max(len(s) for s in sequences)
    capacity = -(-max(pack_size, longest) // alignment) * alignment
    if exact:
        return planter.build(capacity, packs_multiple_of)
    wanted = planter.count(capacity, packs_multiple_of)
    while capacity - alignment >= longest and planter.count(capacity - alignment, packs_multiple_of) <= wanted:
        capacity -= alignment
    return planter.build(capacity, packs_multiple_of)


class Planter:
    """Sequences in sorted order, ready to be cut into packs of any size."""

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        private_from: Sequence[int] | None = None,
        kinds: Sequence[int] | None = None,
    ):
        assert len(sequences) > 0
        assert all(len(s) > 0 for s in sequences)
        self._sequences = sequences
        self._kinds = [0] * len(sequences) if kinds is None else list(kinds)
        limits = [len(s) for s in sequences] if private_from is None else list(private_from)
        self._order = sorted(range(len(sequences)), key=lambda i: (self._kinds[i], tuple(sequences[i])))
        self._shared = [0]  # tokens that each sequence shares with the one before it
        for before, current in itertools.pairwise(self._order):
            shared = _common_prefix(sequences[before], sequences[current])
            alike = self._kinds[before] == self._kinds[current]
            self._shared.append(min(shared, limits[before], limits[current]) if alike else 0)

    def count(self, capacity: int, packs_multiple_of: int = 1) -> int:
        """How many packs of ``capacity`` nodes hold all sequences, rounded up for each kind."""
        return sum(_round_up(count, packs_multiple_of) for count in self.counts(capacity))

    def counts(self, capacity: int) -> list[int]:
        """How many packs of ``capacity`` nodes hold the sequences of each kind."""
        return list(Counter(self._kinds[self._order[start]] for start in self._cut(capacity)).values())

    def _cut(self, capacity: int) -> list[int]:
        """Where packs start, as indices into the sorted order: runs of one kind whose trees fit ``capacity`` nodes."""
        starts: list[int] = []
        room, kind = 0, None
        for index, (current, shared) in enumerate(zip(self._order, self._shared, strict=True)):
            length = len(self._sequences[current])
            if self._kinds[current] != kind:
                room, kind = -1, self._kinds[current]
            if length - shared > room:
                starts.append(index)
                room = capacity - length
            else:
                room -= length - shared
        return starts

    def build(self, capacity: int, packs_multiple_of: int = 1) -> Forest:
        """The packs of ``capacity`` nodes."""
        starts = self._cut(capacity)
        kinds = self._pack_kinds(starts, packs_multiple_of)
        shape = (len(kinds), capacity)
        token_ids, depths = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        parents, used = np.full(shape, -1, np.int64), np.zeros(shape[0], np.int64)
        node_of: list[np.ndarray] = [np.empty(0, np.int64)] * len(self._sequences)
        pack = -1
        for start, stop in itertools.pairwise([*starts, len(self._order)]):
            pack = kinds.index(self._kinds[self._order[start]], pack + 1)  # behind the empty ones of the kind before
            path: list[int] = []  # nodes of the previous sequence
            for index in range(start, stop):
                sequence = self._sequences[self._order[index]]
                shared = self._shared[index] if index > start else 0
                path = path[:shared]
                for depth in range(shared, len(sequence)):
                    node = int(used[pack])
                    used[pack] += 1
                    token_ids[pack, node], depths[pack, node] = sequence[depth], depth
                    parents[pack, node] = path[-1] if path else -1
                    path.append(node)
                node_of[self._order[index]] = pack * capacity + np.array(path, np.int64)
        return Forest(token_ids, depths, parents, used, tuple(node_of), np.array(kinds))

    def _pack_kinds(self, starts: Sequence[int], packs_multiple_of: int) -> list[int]:
        """The kind of each pack, empty ones included."""
        counts = Counter(self._kinds[self._order[start]] for start in starts)
        return [kind for kind, count in counts.items() for _ in range(_round_up(count, packs_multiple_of))]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def count_nodes(sequences: Sequence[Sequence[int]]) -> int:
    """Nodes of the unlimited tree: the fewest token positions that cover all sequences."""
    ordered = sorted(tuple(s) for s in sequences)
    shared = sum(_common_prefix(a, b) for a, b in itertools.pairwise(ordered))
    return sum(len(s) for s in ordered) - shared


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
