"""When an adaptive scan looks: each look is the end of a block of prompts that runs through the model."""

import math

import numpy as np

from mathinterp.experiments.adaptive.judge import OPEN, Rule, judge

STEP = 8  # prompts: looks are multiples of it
GROWTH = 1.3
SHORTEST = 16


def looks(population: int, rule: Rule) -> tuple[int, ...]:
    """Prompts in before each look; the last is the whole population.

    The first comes when a node that does nothing at all can be decided, which no earlier look could. The number then
    grows by 30 %, near the end by half of what is left: there, little by little, nodes become certain.
    """
    counts = [_up(max(first_decision(population, rule), SHORTEST), population)]
    while counts[-1] < population:
        now = counts[-1]
        counts.append(_up(min(now * GROWTH, (now + population) / 2), population))
    return tuple(counts)


def first_decision(population: int, rule: Rule) -> int:
    """Prompts after which a node of no effect is decided, if the other nodes are decided with it."""
    nothing_NP = np.zeros((1, population))
    fewest, enough = 0, population
    while enough - fewest > 1:
        middle = (fewest + enough) // 2
        is_open = judge(rule, nothing_NP, (middle, population), 1).decision_N[0] == OPEN
        fewest, enough = (middle, enough) if is_open else (fewest, middle)
    return enough


def _up(count: float, population: int) -> int:
    """The next multiple of STEP; the population if less than a tenth of it would be left."""
    multiple = math.ceil(count / STEP) * STEP
    return population if population - multiple < population / 10 else multiple
