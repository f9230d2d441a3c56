"""What a prompt is, before and after tokenization.

Knows the columns of a prompt file; knows nothing about models or about where prompts come from.
"""

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sentence, arithmetic or other, and its answer (method.md section 1).

    The answer follows ``text`` after ``separator``: "3 plus 5 is" + " " + "8", or "3+5=" + "" + "8".
    """

    prompt_id: str
    text: str
    answer: str
    operation: str | None = None  # add, sub, mul, div, or any word
    operand_a: str | None = None
    operand_b: str | None = None
    template: str | None = None
    counterfactual: str | None = None  # X_c: the same sentence with a neutral operator, or whatever the file gives
    separator: str = " "
    distractor: str | None = None  # a wrong answer, whose logit is compared with that of the answer
    token_types: tuple[tuple[str, str], ...] = ()  # name of a type -> the words of the text that are of it
    one_token: bool = False  # left out where answer or distractor is not one token, or sentences do not align (mib.py)

    @property
    def further_fields(self) -> dict[str, str]:
        """Fields that not every prompt has a column for, as text; of those that it has."""
        more = {"distractor": self.distractor, "token_types": json.dumps(dict(self.token_types), ensure_ascii=False)}
        return {name: value for name, value in more.items() if value is not None and value != "{}"}


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One answer token that is scored: a digit token, a sign or a leading point, never the space token."""

    position: int  # index among the prompt's scored tokens, 0 = first
    index: int  # index of the token itself in input_ids; the logits at index - 1 predict it
    token_id: int
    token: str  # decoded text
    kind: str  # "digit", "sign", "point" (that a number begins with), "text" (answers without a digit), "distractor"
    carry_class: str | None  # "memorize", "change-one", "mixed" (a token of several columns), or None


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt tokenized jointly with its answer; exactly one BOS iff the tokenizer adds one."""

    prompt: Prompt
    input_ids: tuple[int, ...]  # BOS? + text + separator + answer
    scored: tuple[ScoredToken, ...]
    counterfactual_ids: tuple[int, ...] | None = None  # X_c + the same answer tokens, same length, or None
    distractor: ScoredToken | None = None  # where it first differs from the answer; position -1 - that of the answer's

    def as_fields(self) -> dict[str, Any]:
        """All that identifies it, as plain JSON; fields that later versions added are left out where they are empty."""
        found: dict[str, Any] = plain(self)
        if self.distractor is None:
            del found["distractor"]
        del found["prompt"]["one_token"]  # says which prompts are read, and nothing about one that is
        for name in ("distractor", "token_types"):
            if not found["prompt"][name]:
                del found["prompt"][name]
        return found

    @property
    def fed(self) -> tuple[int, ...]:
        """The tokens a forward pass reads: all up to the one that predicts the last scored token."""
        return self.input_ids[: self.scored[-1].index]

    @property
    def end(self) -> int:
        """END: index of the position whose logits predict the first scored token."""
        return self.scored[0].index - 1


def with_distractors(prompts: Sequence[TokenizedPrompt]) -> list[TokenizedPrompt]:
    """The prompts with their distractors among the scored tokens, each just before the answer token it stands against.

    An engine then scores both in one pass: a distractor's rows have negative positions, -1 against position 0.
    """
    found = []
    for item in prompts:
        scored = list(item.scored)
        if item.distractor is not None:
            scored.insert(-1 - item.distractor.position, item.distractor)
        found.append(item if item.distractor is None else replace(item, scored=tuple(scored)))
    return found


def plain(item: Any) -> Any:
    """``dataclasses.asdict`` for what is in this file, ten times as quick: nothing in it can change, nor is copied."""
    if isinstance(item, Prompt | ScoredToken | TokenizedPrompt):
        return {name: plain(getattr(item, name)) for name in _names(cast(Hashable, type(item)))}
    return tuple(map(plain, item)) if isinstance(item, tuple) and item and not isinstance(item[0], int) else item


@cache
def _names(kind: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cast(Any, kind)))
