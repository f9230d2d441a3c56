"""Pairs that differ in their operands: X_c is another task of the same template, the distractor its answer.

What a head or an MLP takes from X_c then speaks for the distractor (the form of MIB's arithmetic, arXiv 2504.13151).
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from mathinterp.prompts.prompt import Prompt


def operand_pairs(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Each prompt with another of its operation and template, as long, whose answer begins with another digit.

    Prompts for which there is none are left out.
    """
    found = []
    for kind, group in groupby(prompts, key=lambda prompt: (prompt.operation, prompt.template)):
        members = list(group)
        rng = random.Random(f"{seed}/{kind}")
        for prompt in members:
            fitting = [
                other
                for other in members
                if len(other.text) == len(prompt.text) and other.answer[0] != prompt.answer[0]
            ]
            if fitting:
                other = rng.choice(fitting)
                found.append(replace(prompt, counterfactual=other.text, distractor=other.answer))
    return found
