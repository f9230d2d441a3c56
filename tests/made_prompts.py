"""Prompts of two operations and two templates, as token ids, with counterfactuals, shared texts and shared ENDs."""

import numpy as np

from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt


def tokenized(
    name: str, text: tuple[int, ...], neutral: tuple[int, ...], answer: tuple[int, ...], kind: tuple[str, str]
) -> TokenizedPrompt:
    ids = (1, *text, *answer)
    scored = tuple(ScoredToken(p, len(ids) - len(answer) + p, t, "", "digit", None) for p, t in enumerate(answer))
    operation, template = kind
    prompt = Prompt(name, "text", "0", operation=operation, template=template, counterfactual="neutral")
    return TokenizedPrompt(prompt, ids, scored, (1, *neutral, *answer))


def make_prompts() -> list[TokenizedPrompt]:
    """Two operations x two templates; the last ones are what goes wrong when nodes are shared too far."""
    rng = np.random.default_rng(5)
    prompts = []
    for i in range(10):
        kind = (("add", "sub")[i % 2], ("words", "symbols")[i // 2 % 2])
        stem = {"words": (20, 21), "symbols": (30,)}[kind[1]]
        operand_a, operand_b = (int(x) for x in rng.integers(60, 64, size=2))
        answer = tuple(int(x) for x in rng.integers(60, 70, size=1 + i % 3))
        text, neutral = ((*stem, operand_a, sign, operand_b, 50) for sign in ({"add": 40, "sub": 41}[kind[0]], 42))
        prompts.append(tokenized(f"p{i}", text, neutral, answer, kind))
    kind = ("add", "words")
    prompts.append(tokenized("same-1", (20, 21, 9, 40, 8, 50), (20, 21, 9, 43, 8, 50), (60, 61), kind))
    prompts.append(tokenized("same-2", (20, 21, 9, 40, 8, 50), (20, 21, 9, 44, 8, 50), (60, 61), kind))
    # END of same-1 and same-2 is an earlier token of this one, and then one of its answer
    prompts.append(tokenized("longer", (20, 21, 9, 40, 8, 50, 60), (20, 21, 9, 44, 8, 50, 60), (61, 62), kind))
    return prompts


PROMPTS = make_prompts()
