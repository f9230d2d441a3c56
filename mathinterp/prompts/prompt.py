"""What a prompt is, before and after tokenization.

Knows the columns of a prompt file; knows nothing about models or about where prompts come from.
"""

from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Prompt:
    """One arithmetic sentence and its answer (method.md section 1).

    The answer follows ``text`` after ``separator``: "3 plus 5 is" + " " + "8", or "3+5=" + "" + "8".
    """

    prompt_id: str
    text: str
    answer: str
    operation: str | None = None  # add, sub, mul, div, or any word
    operand_a: str | None = None
    operand_b: str | None = None
    template: str | None = None
    counterfactual: str | None = None  # X_c: the same sentence with a neutral operator
    separator: str = " "


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One answer token that is scored: a digit token, a sign or a leading point, never the space token."""

    position: int  # index among the prompt's scored tokens, 0 = first
    index: int  # index of the token itself in input_ids; the logits at index - 1 predict it
    token_id: int
    token: str  # decoded text
    kind: str  # "digit", "sign", "point" (that a number begins with), or "text" (answers without a digit)
    carry_class: str | None  # "memorize", "change-one", "mixed" (a token of several columns), or None


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt tokenized jointly with its answer; exactly one BOS iff the tokenizer adds one."""

    prompt: Prompt
    input_ids: tuple[int, ...]  # BOS? + text + separator + answer
    scored: tuple[ScoredToken, ...]
    counterfactual_ids: tuple[int, ...] | None = None  # X_c + the same answer tokens, same length, or None

    @property
    def fed(self) -> tuple[int, ...]:
        """The tokens a forward pass reads: all up to the one that predicts the last scored token."""
        return self.input_ids[: self.scored[-1].index]

    @property
    def end(self) -> int:
        """END: index of the position whose logits predict the first scored token."""
        return self.scored[0].index - 1


def plain(item: Any) -> Any:
    """``dataclasses.asdict`` for what is in this file, ten times as quick: nothing in it can change, nor is copied."""
    if isinstance(item, Prompt | ScoredToken | TokenizedPrompt):
        return {name: plain(getattr(item, name)) for name in _names(cast(Hashable, type(item)))}
    return tuple(map(plain, item)) if isinstance(item, tuple) and item and not isinstance(item[0], int) else item


@cache
def _names(kind: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cast(Any, kind)))
