"""The prompts room: sentences, their answers, and which token is what.

Knows text and tokenizers; knows nothing about models, interventions or clusters. The module itself can be called:
``mathinterp.prompts("two_digit")`` is ``prompts_of("two_digit")``.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mathinterp.prompts.arithmetic import PROMPT_SETS, prompt_set
from mathinterp.prompts.files import read_prompts, write_prompts
from mathinterp.prompts.given import Prompts, prompts_of
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from mathinterp.prompts.spread import even_spread
from mathinterp.prompts.word_problems import WORD_PROBLEMS, read_word_problems

__all__ = [
    "PROMPT_SETS",
    "WORD_PROBLEMS",
    "Prompt",
    "Prompts",
    "ScoredToken",
    "TokenizedPrompt",
    "even_spread",
    "load_prompts",
    "prompt_set",
    "prompts_of",
    "read_prompts",
    "read_word_problems",
    "write_prompts",
]


def load_prompts(name_or_path: str | Path, *, seed: int = 0, limit: int | None = None) -> list[Prompt]:
    """The prompts of a named set, a file, a public file of word problems ("svamp:PATH") or a set of MIB on the hub.

    A set's name goes before a file of that name, which goes before a set on the hub; WORD_PROBLEMS lists the public
    files.
    ``limit`` keeps an even spread over (operation, template). ``seed`` draws a set's operands; a file has none.
    Raises UserError if there is neither such a set nor such a file, if the file is faulty, or if ``limit`` is below 1.
    """
    return list(prompts_of(name_or_path, seed=seed, limit=limit).items)


class _Callable(ModuleType):
    """The room under the name that the package's face gives to ``prompts_of``."""

    def __call__(self, source: Any, **options: Any) -> Prompts:
        return prompts_of(source, **options)


sys.modules[__name__].__class__ = _Callable
