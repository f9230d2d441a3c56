"""Counterfactual sentences: the same operands with a neutral word in the operator's place (paper B, sec. 4.1).

Knows operator words and signs, their neutral words, and how to keep the number of tokens; knows nothing about models.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mathinterp.errors import UserError
from mathinterp.prompts.alignment import Encoding, check_tokenizer, encode, same_alignment, tokens_of, unknown_words
from mathinterp.prompts.prompt import Prompt, ScoredToken, TokenizedPrompt
from mathinterp.prompts.word_problems import WORD_PROBLEMS

if TYPE_CHECKING:  # importing transformers takes a second, and reading a store needs none
    from transformers import PreTrainedTokenizerBase

WORDS_FILE = Path(__file__).with_name("neutral_words.json")

# operation -> operator word or sign -> neutral words, tried in this order
NEUTRAL_WORDS: dict[str, dict[str, list[str]]] = json.loads(WORDS_FILE.read_text(encoding="utf-8"))


def with_counterfactuals(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> list[Prompt]:
    """Fill ``counterfactual``: each operator word or sign becomes its first neutral word that keeps positions aligned.

    Aligned means: as many tokens, the same answer tokens, and no word the tokenizer does not know. A counterfactual
    that a prompt already has is kept.

    Raises:
        UserError: an operation without neutral words, a text without its operator, or no neutral word that aligns
            (both tokenizations are shown). The message names the prompt.
    """
    check_tokenizer(tokenizer)
    open_prompts = [prompt for prompt in prompts if prompt.counterfactual is None]
    references = iter(encode([(prompt, prompt.text) for prompt in open_prompts], tokenizer))
    return [
        prompt
        if prompt.counterfactual is not None
        else replace(prompt, counterfactual=_neutral_text(prompt, next(references), tokenizer))
        for prompt in prompts
    ]


def operator_spans(prompt: Prompt) -> list[tuple[int, int]]:
    """Where the operator words and signs of the prompt's operation stand in its text, as character ranges.

    The "-" of a negative number and the hyphen of a word are no operators.
    Raises UserError if the operation has no list of operators or the text has none of them, and for a word problem:
    a "total" or "times" in one is no operator between its operands.
    """
    if prompt.template in WORD_PROBLEMS:
        raise UserError(
            f"prompt '{prompt.prompt_id}': a word problem ({prompt.template}) has no operator to make neutral; take "
            "another set, or write this one to a file (mathinterp prompts `out`) and add the field counterfactual there"
        )
    operators = NEUTRAL_WORDS.get(prompt.operation or "")
    if operators is None:
        raise UserError(
            f"prompt '{prompt.prompt_id}': it has no counterfactual, and none can be made for operation"
            f" {prompt.operation!r}: write the field counterfactual, a text with as many tokens (or, of arithmetic, the"
            f" field operation: {', '.join(NEUTRAL_WORDS)}); for an ablation, dataset_mean needs none"
        )
    spans = sorted(span for operator in operators for span in _occurrences(operator, prompt.text))
    if not spans:
        raise UserError(
            f"prompt '{prompt.prompt_id}': none of the operators {', '.join(operators)} is in the text "
            f"{prompt.text!r}; write the field counterfactual yourself"
        )
    return spans


def first_digit(item: TokenizedPrompt) -> ScoredToken:
    """The token that a pair is scored on: the answer's first with a digit, after a space token and a minus sign.

    Of an answer without digits ("twelve", "Paris") its first scored token.
    """
    return next((token for token in item.scored if token.kind == "digit"), item.scored[0])


def _occurrences(operator: str, text: str) -> list[tuple[int, int]]:
    if operator.isalpha():
        return [match.span() for match in re.finditer(rf"\b{operator}\b", text, re.IGNORECASE)]
    return [match.span() for match in re.finditer(re.escape(operator), text) if _is_operator_sign(text, match.start())]


def _is_operator_sign(text: str, index: int) -> bool:
    before, after = text[max(index - 1, 0) : index], text[index + 1 : index + 2]
    hyphen = before.isalpha() and after.isalpha()
    number_sign = after.isdecimal() and not (before.isalnum() or before == ")")
    return not hyphen and not number_sign


def _neutral_text(prompt: Prompt, reference: Encoding, tokenizer: "PreTrainedTokenizerBase") -> str:
    text = prompt.text
    for start, stop in reversed(operator_spans(prompt)):  # from the right, so that earlier ranges stay true
        text = _replace_operator(prompt, text, start, stop, reference, tokenizer)
    return text


def _replace_operator(
    prompt: Prompt, text: str, start: int, stop: int, reference: Encoding, tokenizer: "PreTrainedTokenizerBase"
) -> str:
    operator = text[start:stop]
    assert prompt.operation is not None
    candidates = NEUTRAL_WORDS[prompt.operation][operator.lower()]
    tried = []
    for word in candidates:
        neutral = text[:start] + (word.capitalize() if operator[0].isupper() else word) + text[stop:]
        encoding = encode([(prompt, neutral)], tokenizer)[0]
        known = len(unknown_words(encoding, tokenizer)) <= len(unknown_words(reference, tokenizer))
        if known and same_alignment(reference, encoding):
            return neutral
        tried.append(encoding)
    raise UserError(
        f"prompt '{prompt.prompt_id}': none of the neutral words {', '.join(candidates)} for {operator!r} aligns: "
        f"{len(reference.input_ids)} tokens {tokens_of(reference, tokenizer)} against, with {candidates[0]!r}, "
        f"{len(tried[0].input_ids)} tokens {tokens_of(tried[0], tokenizer)}; write the field counterfactual yourself"
    )
