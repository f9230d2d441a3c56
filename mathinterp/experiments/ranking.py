"""How a finished run ranks its nodes, said so that the ranking can be worked out again for other draws of its prompts.

Knows SQL and arrays; knows nothing about stores or models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Means = Mapping[str, Array]  # value -> its mean, ... x nodes


@dataclass(frozen=True)
class Ranking:
    """What nodes are ranked by: means of values of single prompts, the operations one by one and all together.

    An operation's mean is the sum of the value over its prompts, divided by the sum of ``n``; operation ``all`` is the
    unweighted mean of the operations.

    values: SQL with ``$run``: one row per node and prompt. Columns: node (its kind: nodes are ranked among their like),
        layer, unit (number within the layer; null for a whole layer), prompt_id, n, those of ``means``, and known
        (false: the prompt's own value is not stored, and the mean of these stands for it).
    means: the columns that hold values.
    order: from the means, and the run's parameters, the arrays that put nodes in order: smallest first, the first array
        before the second; then the lower layer and unit.
    most: nodes per operation that ``values`` has for sure; those after them are not ranked. None: all.
    """

    values: str
    means: tuple[str, ...]
    order: Callable[[Means, Mapping[str, Any]], Sequence[Array]]
    most: int | None = None


def _by_drop(means: Means, parameters: Mapping[str, Any]) -> Sequence[Array]:
    return -np.round(means["drop"], 12), means["logprob_change"]


BY_DROP = Ranking(
    """SELECT node, layer, head AS unit, prompt_id, n, fell - rose AS drop, logprob_change, true AS known
       FROM ablated_prompts WHERE run_id = $run""",
    ("drop", "logprob_change"),
    _by_drop,
)  # of heads and MLPs ablated one at a time: ties of accuracy by log-probability
