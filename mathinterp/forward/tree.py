"""Prompts that share prefixes, packed into trees.

A decoder is causal, so a prefix that several prompts share is computed once: each pack is one sequence of
tree nodes (token, depth, parent), run with the depth as position id and a mask that lets a node see its
ancestors and itself. Knows token ids only; knows nothing about models, tensors or answers.
"""

import itertools
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


def plant(
    sequences: Sequence[Sequence[int]],
    *,
    pack_size: int,
    private_from: Sequence[int] | None = None,
    packs_multiple_of: int = 1,
    alignment: int = 1,
) -> Forest:
    """Pack ``sequences`` into trees of about ``pack_size`` nodes, all of one size and evenly filled.

    Args:
        sequences: token ids of each prompt as fed to the model.
        pack_size: nodes aimed at; a pack is larger only if one sequence alone is longer.
        private_from: per sequence, the index from which its nodes are shared with no other sequence
            (needed where an intervention differs between prompts of the same text).
        alignment: the pack size is a multiple of this.
        packs_multiple_of: the number of packs is made a multiple of this where there are that many sequences.
    """
    assert len(sequences) > 0
    assert all(len(s) > 0 for s in sequences)
    limits = [len(s) for s in sequences] if private_from is None else list(private_from)
    order = sorted(range(len(sequences)), key=lambda i: tuple(sequences[i]))
    longest = max(len(s) for s in sequences)
    capacity = -(-max(pack_size, longest) // alignment) * alignment
    fewest = len(_fill(sequences, limits, order, capacity))
    wanted = min(-(-fewest // packs_multiple_of) * packs_multiple_of, len(sequences))
    while capacity - alignment >= longest and len(_fill(sequences, limits, order, capacity - alignment)) <= wanted:
        capacity -= alignment
    return _build(sequences, limits, _fill(sequences, limits, order, capacity), capacity)


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


def _fill(
    sequences: Sequence[Sequence[int]], limits: Sequence[int], order: Sequence[int], capacity: int
) -> list[list[int]]:
    """Cut the sorted sequences into runs whose trees fit ``capacity`` nodes."""
    packs: list[list[int]] = []
    nodes = capacity + 1
    for previous, current in zip([None, *order], order, strict=False):
        new = len(sequences[current])
        if previous is not None:
            shared = _common_prefix(sequences[previous], sequences[current])
            new -= min(shared, limits[previous], limits[current])
        if nodes + new > capacity:
            packs.append([])
            nodes, new = 0, len(sequences[current])
        packs[-1].append(current)
        nodes += new
    return packs


def _build(sequences: Sequence[Sequence[int]], limits: Sequence[int], packs: list[list[int]], capacity: int) -> Forest:
    shape = (len(packs), capacity)
    token_ids, depths = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    parents, used = np.full(shape, -1, np.int64), np.zeros(len(packs), np.int64)
    node_of: list[np.ndarray] = [np.empty(0, np.int64)] * len(sequences)
    for pack, members in enumerate(packs):
        path: list[int] = []  # nodes of the previous sequence
        before: int | None = None
        for current in members:
            sequence = sequences[current]
            shared = 0
            if before is not None:
                shared = min(_common_prefix(sequences[before], sequence), limits[before], limits[current])
            path = path[:shared]
            for depth in range(shared, len(sequence)):
                node = int(used[pack])
                used[pack] += 1
                token_ids[pack, node], depths[pack, node] = sequence[depth], depth
                parents[pack, node] = path[-1] if path else -1
                path.append(node)
            node_of[current] = pack * capacity + np.array(path, np.int64)
            before = current
    return Forest(token_ids, depths, parents, used, tuple(node_of))
