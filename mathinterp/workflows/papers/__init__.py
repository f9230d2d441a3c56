"""The tables and figures of papers A and B as data: what each measures, what makes it, and the numbers it prints."""

from collections.abc import Sequence

from mathinterp.errors import UserError, did_you_mean
from mathinterp.workflows.papers.item import Item
from mathinterp.workflows.papers.paper_a import PAPER_A
from mathinterp.workflows.papers.paper_b import PAPER_B

ITEMS: tuple[Item, ...] = (*PAPER_A, *PAPER_B)


def find_items(only: Sequence[str] = ()) -> tuple[Item, ...]:
    """The items of these ids, in the papers' order; all of them where none is named. Raises UserError."""
    known = {item.id: item for item in ITEMS}
    for name in only:
        if name not in known:
            raise UserError(f"`only`: there is no table or figure '{name}'.{did_you_mean(name, known)}")
    return tuple(item for item in ITEMS if not only or item.id in only)
