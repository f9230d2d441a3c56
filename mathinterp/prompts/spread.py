"""Fewer prompts, evenly spread over operations and templates.

Knows the grouping of prompts; knows nothing about where they come from.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeVar

from mathinterp.errors import UserError
from mathinterp.prompts.prompt import Prompt

T = TypeVar("T")


def even_spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most ``limit`` prompts, as evenly as can be over (operation, template), in their original order.

    Inside a group the prompts taken are about evenly spaced, so an exhaustive set is not cut to its small operands.
    The choice depends on the arguments alone, and a smaller limit takes some of what a larger one takes. Raises
    UserError if ``limit`` is below 1.
    """
    if limit is None:
        return list(prompts)
    if limit < 1:
        raise UserError(f"the limit on prompts must be at least 1, not {limit}")
    groups: dict[str | None, dict[str | None, list[int]]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt.operation, {}).setdefault(prompt.template, []).append(i)
    by_operation = [_in_turn([_scattered(members) for members in _scattered([*g.values()])]) for g in groups.values()]
    return [prompts[i] for i in sorted(_in_turn(by_operation)[:limit])]


def _in_turn(parts: Sequence[Sequence[int]]) -> list[int]:
    """The first of each part, then the second of each, and so on."""
    return [i for one_round in zip_longest(*parts) for i in one_round if i is not None]


def _scattered(items: Sequence[T]) -> list[T]:
    """In an order of which every beginning is spread over the whole: places by their reversed binary digits."""
    digits = max(1, (len(items) - 1).bit_length())
    return [items[i] for i in sorted(range(len(items)), key=lambda i: int(f"{i:0{digits}b}"[::-1], 2))]
