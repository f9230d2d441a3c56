"""The operand pairs of a run as a grid, and the heuristics that may hold of them. Knows numbers and prompts, no model.

Shape legend: P pair, C heuristic.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mathinterp.errors import UserError
from mathinterp.experiments.operand_map.tables import FAMILIES, POWERS
from mathinterp.prompts.prompt import TokenizedPrompt

LARGEST = 99  # operand
FEWEST_PAIRS = 100  # 43 columns of sinusoids would fit fewer by chance
FEWEST_HOLDING = 10  # pairs for which a heuristic must hold, and must not
RANGES = {"a": (4, 2), "b": (4, 2), "result": (20, 10, 4, 2)}  # numbers of ranges, of about as many pairs each


@dataclass(frozen=True)
class Grid:
    """Operand pairs sorted by (a, b)."""

    operation: str | None
    order_P: np.ndarray  # index of each pair's prompt
    a_P: np.ndarray
    b_P: np.ndarray
    result_P: np.ndarray

    def __len__(self) -> int:
        return len(self.a_P)

    @property
    def complete(self) -> bool:
        """Whether every pair of operands is there."""
        return len(self) == (LARGEST + 1) ** 2


def grid_of(prompts: Sequence[TokenizedPrompt]) -> Grid:
    """The grid; raises UserError for prompts that are none: each is told by what it lacks."""
    rows = np.array([_numbers(item) for item in prompts]).reshape(-1, 3)
    kinds = {(item.prompt.operation, item.prompt.template) for item in prompts}
    if len(kinds) > 1:
        told = ", ".join(sorted(f"{operation or 'none'} ({template or 'none'})" for operation, template in kinds))
        raise UserError(
            f"an operand map is of one operation and one template, and the prompts are of {told}; take the prompt set"
            " operands_add, operands_sub, operands_mul or operands_div, or a file of one form"
        )
    order_P = np.lexsort((rows[:, 1], rows[:, 0]))
    a_P, b_P, result_P = rows[order_P].T
    twice = np.flatnonzero((np.diff(a_P) == 0) & (np.diff(b_P) == 0))
    if len(twice):
        first = int(twice[0])
        one, other = (prompts[int(order_P[place])].prompt.prompt_id for place in (first, first + 1))
        raise UserError(
            f"prompts '{one}' and '{other}' both ask for {a_P[first]} and {b_P[first]}; give each pair once"
        )
    if len(rows) < FEWEST_PAIRS:
        raise UserError(f"an operand map needs {FEWEST_PAIRS} pairs or more, and the prompts are {len(rows)}")
    return Grid(prompts[0].prompt.operation, order_P, a_P, b_P, result_P)


def _numbers(item: TokenizedPrompt) -> tuple[int, int, int]:
    prompt = item.prompt
    for name in ("operand_a", "operand_b"):
        if not re.fullmatch(r"[0-9]{1,2}", getattr(prompt, name) or ""):
            raise UserError(
                f"prompt '{prompt.prompt_id}': {name} {getattr(prompt, name)!r} is no number from 0 to {LARGEST} in"
                " digits, which the axes of an operand map are; take a prompt set like operands_add"
            )
    if not re.fullmatch(r"-?[0-9]{1,9}", prompt.answer):
        raise UserError(f"prompt '{prompt.prompt_id}': the answer {prompt.answer!r} is no whole number in digits")
    return int(prompt.operand_a or ""), int(prompt.operand_b or ""), int(prompt.answer)


# ---- heuristics ----


@dataclass(frozen=True)
class Heuristics:
    """What may hold of a pair: classes of partitions, of several partitions a family.

    Families follow arXiv 2410.21272, sections 4.1 and appendix E: operand and result modulo n, digits, ranges, equal
    operands; and carries. Left out of theirs: heuristics of both operands at once, and few single results.
    """

    labels: tuple[str, ...]
    family_C: np.ndarray  # index into FAMILIES
    partition_C: np.ndarray
    holds_CP: np.ndarray  # bool


def heuristics_of(grid: Grid) -> Heuristics:
    """Every heuristic that holds for some pairs of the grid and not for some others, FEWEST_HOLDING each."""
    labels, families, partitions, holds = [], [], [], []
    for partition, (family, classes) in enumerate(_partitions(grid)):
        for label, holds_P in classes:
            if FEWEST_HOLDING <= holds_P.sum() <= len(grid) - FEWEST_HOLDING:
                labels.append(label)
                families.append(FAMILIES.index(family))
                partitions.append(partition)
                holds.append(holds_P)
    return Heuristics(tuple(labels), np.array(families), np.array(partitions), np.array(holds))


Classes = list[tuple[str, np.ndarray]]


def _partitions(grid: Grid) -> Iterator[tuple[str, Classes]]:
    numbers = {"a": grid.a_P, "b": grid.b_P, "result": grid.result_P}
    for name, values_P in numbers.items():
        for n in (2, 5, 10):
            yield f"{name}_mod_{n}", _values(f"{name} mod {n} =", values_P % n)
        yield f"{name}_tens", _values(f"tens digit of {name} =", np.abs(values_P) // 10 % 10)
        for count in RANGES[name]:
            yield f"{name}_range", _ranges(name, values_P, count)
    if grid.operation in ("add", "sub"):
        a_P, b_P = grid.a_P % 10, grid.b_P % 10
        word, carried_P = ("carry", a_P + b_P > 9) if grid.operation == "add" else ("borrow", a_P < b_P)
        yield "carry", [(f"units {word}", carried_P), (f"no units {word}", ~carried_P)]
    if grid.operation == "add":
        hundreds_P = grid.a_P + grid.b_P > 99
        yield "carry", [("carry into the hundreds", hundreds_P), ("no carry into the hundreds", ~hundreds_P)]
    equal_P = grid.a_P == grid.b_P
    yield "equal", [("a = b", equal_P), ("a and b differ", ~equal_P)]


def _values(label: str, values_P: np.ndarray) -> Classes:
    return [(f"{label} {value}", values_P == value) for value in np.unique(values_P)]


def _ranges(name: str, values_P: np.ndarray, count: int) -> Classes:
    """At most ``count`` ranges of about as many pairs each; equal numbers stay together."""
    edges = np.unique(np.quantile(values_P, np.arange(1, count) / count, method="higher"))
    range_P = np.searchsorted(edges, values_P, side="right")
    found = []
    for number in np.unique(range_P):
        holds_P = range_P == number
        found.append((f"{name} from {values_P[holds_P].min()} to {values_P[holds_P].max()}", holds_P))
    return found


# ---- sinusoids ----

_PHASE: dict[str, Callable[[Grid], np.ndarray]] = {
    "a": lambda grid: grid.a_P,
    "b": lambda grid: grid.b_P,
    "sum": lambda grid: grid.a_P + grid.b_P,
    "difference": lambda grid: grid.a_P - grid.b_P,
}


def sinusoids(grid: Grid) -> dict[str, np.ndarray]:
    """Orthonormal rows that span the sinusoids of each direction and period, and of each period: name -> R P.

    On a complete grid they are the 2-D Fourier transform at frequencies 0 and 100 / period along a and b, so that a
    map's share in them is its share of power there, and a period's share is the sum of its directions'. Where pairs
    are missing the transform is not defined: there it is the share of variance that a least-squares fit explains. The
    periods are those of arXiv 2502.00873.
    """
    found, columns = {}, {}
    for direction, period in POWERS:
        angle_P = 2 * np.pi * (_PHASE[direction](grid) % period) / period
        columns[direction, period] = [np.cos(angle_P)] if period == 2 else [np.cos(angle_P), np.sin(angle_P)]
        found[f"power_{direction}_{period}"] = _orthonormal(columns[direction, period])
    for period in dict.fromkeys(period for _, period in POWERS):
        found[f"power_{period}"] = _orthonormal([c for key, own in columns.items() if key[1] == period for c in own])
    return found


def _orthonormal(columns: Sequence[np.ndarray]) -> np.ndarray:
    centred_PR = np.stack(columns, axis=1)
    centred_PR = centred_PR - centred_PR.mean(axis=0)
    left, size, _ = np.linalg.svd(centred_PR, full_matrices=False)
    return left[:, size > 1e-9 * np.sqrt(len(left))].T
