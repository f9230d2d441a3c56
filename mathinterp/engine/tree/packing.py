"""How prompts are laid out for the packed engine: which pack size, which packs run together, where answers are.

P packs of N tree nodes run together as one group; under E edits a group is a batch of E * P rows, edit by edit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from mathinterp.engine.scores import Answers
from mathinterp.engine.tree.forest import Forest, Planter, plant
from mathinterp.models.anatomy import Anatomy

CPU_TOKENS = 1024  # token rows in one batch: a width-256 layer's activations stay in the cache
GPU_TOKENS = 26400  # 200 a multiprocessor of an H100; from 12,000 on a layer's time per row is flat
MASK_ALIGNMENT = 8  # a GPU's fused attention wants mask rows in multiples of eight elements
LARGEST_PACK = 2112
LARGEST_SHARED_PACK = 264  # where few prompts must fill it as well as many
# Masked attention costs as much as this many times its operations in matrix products: on one H100, at 264 nodes,
# 5.4 % of a 7B layer's time; on a CPU about twice its share of operations.
ATTENTION_COST = {"cuda": 5.0, "cpu": 2.0}
# Of an edit's work, that of the clean attention which a batch of edits computes once: right for some 32 layers, and the
# same for all models, because the few layers that are compiled ahead must be laid out as the whole model.
CLEAN_SHARE = 1 / 32


@dataclass(frozen=True)
class Group:
    """Packs that run in one batch, and the answer tokens in them."""

    packs: np.ndarray  # consecutive
    answers: torch.Tensor  # A' indices into the answers
    gold: torch.Tensor  # A' gold token ids
    answer_packs: torch.Tensor  # A' pack (within the group) of each answer token
    answer_slots: torch.Tensor  # A' column of each answer token in slots_PM
    slots_PM: torch.Tensor  # nodes at which the last layer's output is wanted, padded with node 0

    @property
    def span(self) -> slice:
        """The packs as a slice, which indexes without a copy."""
        return slice(int(self.packs[0]), int(self.packs[-1]) + 1)


@dataclass(frozen=True)
class BatchShape:
    """One shape for the batches of several sets of prompts, so that they compile once: ``rows`` packs times edits."""

    pack_size: int
    rows: int
    slots: int  # answer slots of a pack, where no set needs more

    def edits_for(self, packs: int, wanted: float, most: int) -> int:
        """Of the numbers that divide a batch, that with the fewest batches for ``wanted`` edits of ``packs``."""

        def batches(edits: int) -> int:
            return math.ceil(wanted / edits) * math.ceil(packs * edits / self.rows)

        return min((n for n in range(1, most + 1) if self.rows % n == 0), key=lambda n: (batches(n), n))


def shape_of_batches(
    anatomy: Anatomy,
    sequences: Sequence[Sequence[int]],
    answers: Answers,
    *,
    private_from: Sequence[int] | None,
    max_tokens: int,
    dense_masks: bool = True,
) -> BatchShape:
    """The shape for parts of ``sequences``: a quarter of ``max_tokens``, as a part has few, in many divisible rows."""
    kinds = [anatomy.shape.positions.kind(len(sequence)) for sequence in sequences]
    size, together, _ = best_packing(
        anatomy,
        sequences,
        private_from,
        kinds,
        edits=1,
        max_tokens=max_tokens // 4,
        on_gpu=True,
        dense_masks=dense_masks,
        largest=LARGEST_SHARED_PACK,
    )
    rows = max(n for n in (1, 2, *(3 * 2**power for power in range(16))) if n <= max(together, 1))
    forest = plant(
        sequences, pack_size=size, private_from=private_from, kinds=kinds, alignment=MASK_ALIGNMENT, exact=True
    )
    return BatchShape(size, rows, _most_wanted(forest, answers))


@dataclass(frozen=True)
class Layout:
    """All packs of a prompt set, in groups."""

    forest: Forest
    groups: list[Group]
    edits_per_batch: int  # how many edits of one group make a full batch; on a GPU a divisor of those asked for


def lay_out(
    anatomy: Anatomy,
    sequences: Sequence[Sequence[int]],
    answers: Answers,
    *,
    private_from: Sequence[int] | None,
    edits: int,
    max_tokens: int,
    pack_size: int | None,
    dense_masks: bool = True,
    shape: BatchShape | None = None,
) -> Layout:
    """Pack and group ``sequences`` so that ``edits`` edits of a group fill about ``max_tokens`` token rows.

    On a GPU all groups have one shape: each shape costs a compilation, and half-precision results depend on it.

    Args:
        shape: of batches of ``edits`` edits, which divide its rows; None: the one of least work.
    """
    on_gpu = anatomy.device.type == "cuda" or shape is not None
    kinds = [anatomy.shape.positions.kind(len(sequence)) for sequence in sequences]
    if shape is not None:
        assert shape.rows % edits == 0, (shape, edits)
        pack_size, together = shape.pack_size, shape.rows // edits
    elif pack_size is None:
        pack_size, together, edits = best_packing(
            anatomy,
            sequences,
            private_from,
            kinds,
            edits=edits,
            max_tokens=max_tokens,
            on_gpu=on_gpu,
            dense_masks=dense_masks,
        )
    else:
        together = max(1, max_tokens // (pack_size * edits))
    forest = plant(
        sequences,
        pack_size=pack_size,
        private_from=private_from,
        kinds=kinds,
        packs_multiple_of=together if on_gpu else 1,
        alignment=MASK_ALIGNMENT if on_gpu else 1,
        exact=shape is not None,
    )
    if shape is not None:
        return Layout(forest, _group(forest, answers, together, anatomy.device, shape.slots), edits)
    together = min(together, forest.n_packs)
    edits_per_batch = max(1, min(edits, max_tokens // (forest.pack_size * together)))
    return Layout(forest, _group(forest, answers, together, anatomy.device), edits_per_batch)


def best_packing(
    anatomy: Anatomy,
    sequences: Sequence[Sequence[int]],
    private_from: Sequence[int] | None,
    kinds: Sequence[int] | None = None,
    *,
    edits: int,
    max_tokens: int,
    on_gpu: bool,
    dense_masks: bool = True,
    largest: int = LARGEST_PACK,
) -> tuple[int, int, int]:
    """The pack size, the number of packs together and of edits a batch with the least work.

    Large packs pay for dense masks, small ones repeat shared prefixes, on a GPU the last group is filled up with empty
    packs, and each batch of edits computes its layer's clean attention once. Work per node is 1 + a * N, with a from
    ATTENTION_COST, 4 D' operations a node pair and 2 a weight.
    """
    shape = anatomy.shape
    weights = sum(p.numel() for p in anatomy.layers[0].parameters())
    cost = ATTENTION_COST["cuda" if on_gpu else "cpu"] if dense_masks else 0.0
    per_node = cost * 4 * shape.n_heads * shape.d_head / (2 * weights)
    longest = max(len(s) for s in sequences)
    planter = Planter(sequences, private_from, kinds)
    smallest = -(-longest // MASK_ALIGNMENT) * MASK_ALIGNMENT
    best: tuple[float, int, int, int] | None = None
    for size in range(smallest, max(smallest, largest) + 1, MASK_ALIGNMENT):
        counts = planter.counts(size)
        packs = sum(counts)
        at_once = _edits_at_once(edits, max_tokens // size) if on_gpu else edits
        most = min(packs, max(1, max_tokens // (size * at_once)))
        fewest = -(-most * 2 // 3) if on_gpu else most  # a GPU wants large batches, and one shape for all of them
        for together in range(fewest, most + 1):
            run = sum(-(-count // together) * together for count in counts) if on_gpu else packs
            work = run * size * (1 + per_node * size) * (1 + CLEAN_SHARE / at_once)
            if best is None or work < best[0]:
                best = (work, size, together, at_once)
        if packs == len(counts):
            break
    assert best is not None
    return best[1:]


def _edits_at_once(edits: int, fitting: int) -> int:
    """The most edits that fit a batch and divide ``edits`` evenly: on a GPU a ragged last batch is one more shape."""
    return max((n for n in range(1, edits + 1) if edits % n == 0 and n <= fitting), default=1)


def _places(forest: Forest, answers: Answers) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Pack and node of each answer, and the nodes that each pack has answers at."""
    node_A = np.array([forest.node_of[p][r] for p, r in zip(answers.prompt_A, answers.row_A, strict=True)])
    pack_A, within_A = node_A // forest.pack_size, node_A % forest.pack_size
    return pack_A, within_A, [np.unique(within_A[pack_A == pack]) for pack in range(forest.n_packs)]


def _most_wanted(forest: Forest, answers: Answers) -> int:
    return max(map(len, _places(forest, answers)[2]))


def _group(
    forest: Forest, answers: Answers, packs_together: int, device: torch.device, least_slots: int | None = None
) -> list[Group]:
    pack_A, within_A, wanted = _places(forest, answers)
    most = max([least_slots or 0, *map(len, wanted)])
    groups = []
    for packs in _runs(forest, packs_together):
        start = packs[0]
        one_shape = device.type == "cuda" or least_slots is not None
        width = most if one_shape else max(len(wanted[pack]) for pack in packs)
        slots = np.zeros((len(packs), width), np.int64)
        for row, pack in enumerate(packs):
            slots[row, : len(wanted[pack])] = wanted[pack]
        chosen = np.flatnonzero((pack_A >= packs[0]) & (pack_A <= packs[-1]))
        columns = np.array([np.searchsorted(wanted[pack_A[a]], within_A[a]) for a in chosen], np.int64)
        arrays = (chosen, answers.gold_A[chosen], pack_A[chosen] - start, columns, slots)
        groups.append(Group(packs, *(torch.from_numpy(a).to(device) for a in arrays)))
    return groups


def _runs(forest: Forest, packs_together: int) -> Iterator[np.ndarray]:
    """Packs that run together: consecutive, at most so many, and of one kind."""
    for _, members in groupby(range(forest.n_packs), key=lambda pack: int(forest.kinds_P[pack])):
        packs = np.array(list(members))
        for start in range(0, len(packs), packs_together):
            yield packs[start : start + packs_together]
