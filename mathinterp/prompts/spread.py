"""Fewer prompts, evenly spread over operations and templates.

Knows the grouping of prompts; knows nothing about where they come from.
"""

from collections.abc import Sequence

from mathinterp.errors import UserError
from mathinterp.prompts.prompt import Prompt


def even_spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most ``limit`` prompts, as evenly as can be over (operation, template), in their original order.

    Inside a group the prompts taken are evenly spaced, so an exhaustive set is not cut to its small operands.
    The choice depends on the arguments alone. Raises UserError if ``limit`` is below 1.
    """
    if limit is None:
        return list(prompts)
    if limit < 1:
        raise UserError(f"the limit on prompts must be at least 1, not {limit}")
    groups = _groups(prompts)
    taken = []
    for members, quota in zip(groups, _quotas([len(members) for members in groups], limit), strict=True):
        taken += [members[i] for i in _spaced(len(members), quota)]
    return [prompts[i] for i in sorted(taken)]


def _groups(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Indices of the prompts of each (operation, template), templates of one operation side by side."""
    by_operation: dict[str | None, dict[str | None, list[int]]] = {}
    for i, prompt in enumerate(prompts):
        by_operation.setdefault(prompt.operation, {}).setdefault(prompt.template, []).append(i)
    return [members for templates in by_operation.values() for members in templates.values()]


def _quotas(sizes: list[int], limit: int) -> list[int]:
    """How many to take of each group: equal shares, where a small group's surplus goes to the others."""
    quotas = [0] * len(sizes)
    left = min(limit, sum(sizes))
    while left:
        open_groups = [g for g, size in enumerate(sizes) if quotas[g] < size]
        share = left // len(open_groups)
        receivers = open_groups if share else [open_groups[i] for i in _spaced(len(open_groups), left)]
        for g in receivers:
            step = min(max(share, 1), sizes[g] - quotas[g])
            quotas[g] += step
            left -= step
    return quotas


def _spaced(n: int, k: int) -> list[int]:
    """``k`` evenly spaced indices of range(n), k <= n."""
    return [i * n // k for i in range(k)]
