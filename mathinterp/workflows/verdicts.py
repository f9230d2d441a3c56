"""Ours beside a paper's number: in our interval, outside, or not comparable and why.

Knows numbers and reasons; knows nothing about models or stores. Values are in the unit in which they are printed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mathinterp.workflows.papers.item import Cell, Item

FEWEST_PROMPTS = 12  # of the smallest operation: below, intervals are rough (docs/statistics.md)
NOT_AT_HAND = "the paper's number is not at hand"
NOT_MEASURED = "nothing was measured"
NO_ROW = "ours has no such row"  # in runs that are there: a layer too many, a prompt that a limit left out


class Verdict(StrEnum):
    """How ours and the paper's number stand to each other."""

    INSIDE = "in the interval"
    OUTSIDE = "outside"
    NOT_COMPARABLE = "not comparable"


COMPARED = (Verdict.INSIDE, Verdict.OUTSIDE)


@dataclass(frozen=True)
class Measured:
    """One of our numbers, with its 95 % interval where it has one. n: prompts of the smallest operation."""

    what: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str = ""
    rank: int = 0


@dataclass(frozen=True)
class Compared:
    """One line: ours, the paper's, the verdict and, where it is "not comparable", why."""

    what: str
    ours: Measured | None
    paper: Cell | None
    verdict: Verdict
    why: str = ""


def judge(
    ours: Measured | None, paper: Cell | None, reasons: Sequence[str] = (), *, exact: bool = False,
    absent: str = NOT_MEASURED,
) -> Compared:  # fmt: skip
    """The verdict on one number.

    A printed number stands for all that round to it, half of its last digit to both sides; where nothing is drawn at
    random (``exact``) ours may differ by one in that digit. The paper's own sampling error is not in the interval.

    Args:
        reasons: why nothing of the item compares; the first of all that apply is the item's own.
        absent: why there is nothing of ours, where there is not.
    """
    what = paper.what if paper is not None else ours.what if ours is not None else ""
    found = list(reasons)
    if paper is None:
        found.append(NOT_AT_HAND)
    if ours is None or ours.value is None:
        found.append(absent)
    elif ours.low is None or ours.high is None:
        found.append("ours has no interval")
    elif not exact and ours.n is not None and ours.n < FEWEST_PROMPTS:
        found.append(f"too few prompts ({ours.n} of the smallest operation)")
    if found or ours is None or paper is None or ours.low is None or ours.high is None:
        return Compared(what, ours, paper, Verdict.NOT_COMPARABLE, "; ".join(dict.fromkeys(found)))
    slack = paper.last_digit * (1.0 if exact else 0.5) * (1 + 1e-9)
    inside = ours.low - slack <= paper.value <= ours.high + slack
    return Compared(what, ours, paper, Verdict.INSIDE if inside else Verdict.OUTSIDE)


def compare(
    item: Item, measured: Sequence[Measured], reasons: Sequence[str], same_model: bool, *, ran: bool = True
) -> tuple[Compared, ...]:
    """Every printed number beside ours; where the paper prints none, ours alone. ran: whether its runs are there.

    On the paper's model a head or neuron is compared with itself; on another one the first beside the first.
    """
    if not item.cells:
        measured = sorted(measured, key=lambda m: natural(m.what))
        return tuple(judge(ours, None, (*reasons, *item.reasons(ours.what))) for ours in measured)
    compared, absent = [], NO_ROW if ran else NOT_MEASURED
    for cell in item.cells:
        by_unit = same_model or not cell.rank
        ours = next(
            (m for m in measured if m.what == cell.what and (m.unit == cell.unit if by_unit else m.rank == cell.rank)),
            None,
        )
        why = (*reasons, *item.reasons(cell.what))
        compared.append(judge(ours, cell, why, exact=item.exact, absent=absent))
    taken = {id(line.ours) for line in compared}
    ranks = {cell.rank for cell in item.cells}
    more = [m for m in measured if id(m) not in taken and (not m.rank or m.rank in ranks)]
    more.sort(key=lambda m: (m.rank, natural(m.what)))
    return (*compared, *(judge(ours, None, reasons) for ours in more))


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts k=2 before k=10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def said(lines: Sequence[Compared]) -> str:
    """An item's verdict in a few words."""
    of_paper = [line for line in lines if line.paper is not None]
    counts = {verdict: sum(line.verdict is verdict for line in of_paper) for verdict in Verdict}
    compared = counts[Verdict.INSIDE] + counts[Verdict.OUTSIDE]
    if compared:
        left = f", {rest} {Verdict.NOT_COMPARABLE}" if (rest := counts[Verdict.NOT_COMPARABLE]) else ""
        return f"{counts[Verdict.INSIDE]} of {compared} in the interval, {counts[Verdict.OUTSIDE]} outside{left}"
    printed = [line.why.split("; ") for line in of_paper or lines]
    shared = [why for why in printed[0] if all(why in whys for whys in printed)] if printed else []
    return f"{Verdict.NOT_COMPARABLE}: {'; '.join(shared) or NOT_MEASURED}"
