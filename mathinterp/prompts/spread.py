"""Fewer prompts, evenly spread over operations and templates.

Knows the grouping of prompts; knows nothing about where they come from.
"""

from collections.abc import Sequence
from itertools import zip_longest

from mathinterp.errors import UserError
from mathinterp.prompts.prompt import Prompt


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
    groups = [[members[i] for i in _scattered(len(members))] for members in _groups(prompts)]
    rounds = zip_longest(*(groups[g] for g in _scattered(len(groups))))  # one of each group, then one more, ...
    taken = [i for one_round in rounds for i in one_round if i is not None][:limit]
    return [prompts[i] for i in sorted(taken)]


def _groups(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Indices of the prompts of each (operation, template), templates of one operation side by side."""
    by_operation: dict[str | None, dict[str | None, list[int]]] = {}
    for i, prompt in enumerate(prompts):
        by_operation.setdefault(prompt.operation, {}).setdefault(prompt.template, []).append(i)
    return [members for templates in by_operation.values() for members in templates.values()]


def _scattered(n: int) -> list[int]:
    """range(n) in an order of which every beginning is spread over the whole: by reversed binary digits."""
    digits = max(1, (n - 1).bit_length())
    return sorted(range(n), key=lambda i: int(f"{i:0{digits}b}"[::-1], 2))
