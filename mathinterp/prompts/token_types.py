"""What each token of a prompt is: BOS, operand A or B, operator, equals, other; and the operands' first digit tokens.

Knows sentences and character offsets; knows nothing about models. Token types are those of paper B's Figure 5.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mathinterp.errors import UserError
from mathinterp.prompts.alignment import Encoding, encode
from mathinterp.prompts.pairs import operator_spans
from mathinterp.prompts.prompt import Prompt, TokenizedPrompt

if TYPE_CHECKING:  # importing transformers takes a second, and reading a store needs none
    from transformers import PreTrainedTokenizerBase

TOKEN_TYPES = ("bos", "operand_a", "operand_b", "operator", "equals", "other")
SCHEMES = ("arithmetic", "words", "position")
EQUALS = re.compile(r"=|\bequals?\b(?: to\b)?|\bis\b(?: equal to\b)?", re.IGNORECASE)

Span = tuple[int, int]  # characters, from first to one after the last


@dataclass(frozen=True)
class TypedTokens:
    """A prompt's tokens up to END, with their types.

    types: one of ``type_names`` per token, index 0 to END.
    first_digit: "operand_a" and "operand_b", and the types that the prompt names -> index of the first token with a
        digit, or of the first token if it is written in words.
    """

    types: tuple[str, ...]
    first_digit: dict[str, int]


def scheme_of(prompts: Sequence[Prompt]) -> str:
    """ "arithmetic" if any prompt names an operand or has an operator of its operation, else "words"."""
    arithmetic = any(p.operand_a is not None or p.operand_b is not None or _operators(p) for p in prompts)
    return "arithmetic" if arithmetic else "words"


def type_names(prompts: Sequence[TokenizedPrompt], scheme: str) -> tuple[str, ...]:
    """All types that tokens of the prompts may have; bos is the first."""
    named = dict.fromkeys(name for item in prompts for name, _ in item.prompt.token_types)
    if scheme == "arithmetic":
        return (*TOKEN_TYPES, *named)
    if scheme == "words":
        return ("bos", *named, "first", "last", "other")
    return ("bos", *(_from_end(place) for place in range(max(item.end for item in prompts) + 1)))


def typed_tokens(
    prompts: Sequence[TokenizedPrompt], tokenizer: "PreTrainedTokenizerBase", scheme: str = "arithmetic"
) -> list[TypedTokens]:
    """Types of all tokens up to END, prompt by prompt, under one of SCHEMES.

    arithmetic:

    - bos: the tokenizer's BOS as the first token. A tokenizer that adds none has none, whatever token is first.
    - operand_a, operand_b: every token that holds a character of the operand, as the prompt writes it. Where a number
      stands more than once, its first place counts; equal operands are A, then B.
    - operator: the words and signs that a counterfactual replaces (pairs.operator_spans); a word problem has none.
    - equals: "=", "is", "equals", "equal to", "is equal to" after both operands.
    - other: everything else, white space that is a token of its own too.
    words: bos; the types that the prompts name (field ``token_types``), wherever their words stand; last: END; first:
    the first token but for the BOS; other. The named types come before those of arithmetic, too.
    position: bos; end, end-1, end-2, ...: counted back from END.
    A token of two kinds is the first of them in this order.

    Raises:
        UserError: an operand or words that are not in the text, or have no token of their own; the message names the
            prompt.
    """
    blank: dict[int, bool] = {}
    encodings = encode([(item.prompt, item.prompt.text) for item in prompts], tokenizer)
    if scheme == "position":
        return [_by_position(item, tokenizer) for item in prompts]
    return [_typed(item, encoding, tokenizer, blank, scheme) for item, encoding in zip(prompts, encodings, strict=True)]


def _from_end(place: int) -> str:
    return f"end-{place}" if place else "end"


def _by_position(item: TokenizedPrompt, tokenizer: "PreTrainedTokenizerBase") -> TypedTokens:
    types = [_from_end(item.end - index) for index in range(item.end + 1)]
    if item.input_ids[0] == tokenizer.bos_token_id:
        types[0] = "bos"
    return TypedTokens(tuple(types), {})


def _typed(
    item: TokenizedPrompt,
    encoding: Encoding,
    tokenizer: "PreTrainedTokenizerBase",
    blank: dict[int, bool],
    scheme: str,
) -> TypedTokens:
    assert encoding.input_ids == item.input_ids, f"prompt '{item.prompt.prompt_id}' was tokenized by another tokenizer"
    prompt = replace(item.prompt, text=encoding.sentence[: encoding.answer_start])
    named = named_spans(prompt)
    places = operand_spans(prompt) if scheme == "arithmetic" else {}
    kinds: list[tuple[str, list[Span]]] = [*named.items()]
    if scheme == "arithmetic":
        kinds += [
            *((name, [span]) for name, span in places.items()),
            ("operator", _operators(prompt)),
            ("equals", _equals(prompt.text, list(places.values()))),
        ]
    else:
        begin = int(item.input_ids[0] == tokenizer.bos_token_id)
        kinds += [("last", [encoding.spans[item.end]]), ("first", [encoding.spans[begin]])]
    types = []
    for index, token_id in enumerate(item.input_ids[: item.end + 1]):
        if token_id not in blank:
            blank[token_id] = not str(tokenizer.decode([token_id])).strip()
        if index == 0 and token_id == tokenizer.bos_token_id:
            types.append("bos")
        elif blank[token_id] or not encoding.token_text(index).strip():
            types.append("other")  # Llama-2's space token at the start claims the first character too
        else:
            types.append(next((kind for kind, spans in kinds if _overlap(encoding.spans[index], spans)), "other"))
    return TypedTokens(
        tuple(types), {name: _first_digit(name, types, encoding, item.prompt) for name in (*places, *named)}
    )


def named_spans(prompt: Prompt) -> dict[str, list[Span]]:
    """Where the words of the types that the prompt names stand in its text; raises UserError if they do not."""
    places = {name: _number_places(words, prompt.text) for name, words in prompt.token_types}
    for name, words in prompt.token_types:
        if not places[name]:
            raise UserError(
                f"prompt '{prompt.prompt_id}': the words {words!r} of the token type '{name}' do not stand in the text"
                f" {prompt.text!r}; write them as the text does"
            )
    return places


def operand_spans(prompt: Prompt) -> dict[str, Span]:
    """Where "operand_a" and "operand_b" stand in the text; one that the prompt does not name is left out.

    The longer one is placed first, so that neither "5" in "-5" nor "two" in "one hundred two" passes for an operand.
    Raises UserError if one cannot be found.
    """
    named = {"operand_a": prompt.operand_a, "operand_b": prompt.operand_b}
    given = {name: value for name, value in named.items() if value is not None}
    places: dict[str, Span] = {}
    for name, value in sorted(given.items(), key=lambda entry: -len(entry[1])):  # equal lengths: A first
        free = [span for span in _number_places(value, prompt.text) if not _overlap(span, list(places.values()))]
        if not free:
            raise UserError(
                f"prompt '{prompt.prompt_id}': {name} {value!r} does not stand in the text {prompt.text!r} as a number"
                " of its own; write the field as the text does"
            )
        places[name] = free[0]
    return {name: places[name] for name in given}


def _number_places(value: str, text: str) -> list[Span]:
    """Occurrences that are no part of a longer word, number (4 in 4.2 or 4,200) or hyphenated number word."""
    before = r"(?<!\w)(?<![^\W\d_]-)" if value[0].isalpha() else r"(?<!\d)(?<!\d[.,])"
    after = r"(?!\w)(?!-[^\W\d_])" if value[-1].isalpha() else r"(?!\d)(?![.,]\d)"
    return [match.span() for match in re.finditer(before + re.escape(value) + after, text, re.IGNORECASE)]


def _operators(prompt: Prompt) -> list[Span]:
    try:
        return operator_spans(prompt)
    except UserError:  # a word problem, or an operation without a list of operators
        return []


def _equals(text: str, operands: list[Span]) -> list[Span]:
    """ "What is 3 plus 5?" asks with its "is"; only one after the operands stands for equality."""
    after = max((stop for _, stop in operands), default=0)
    return [match.span() for match in EQUALS.finditer(text) if match.start() >= after]


def _overlap(one: Span, others: Sequence[Span]) -> bool:
    return any(one[0] < stop and start < one[1] for start, stop in others)


def _first_digit(name: str, types: Sequence[str], encoding: Encoding, prompt: Prompt) -> int:
    own = [index for index, kind in enumerate(types) if kind == name]
    if not own:
        text = dict(prompt.token_types).get(name) or getattr(prompt, name)
        raise UserError(
            f"prompt '{prompt.prompt_id}': {name} {text!r} shares its tokens with another operand or named type, so"
            " that they cannot be told apart; put spaces between them"
        )
    return next((i for i in own if any(c.isdecimal() for c in encoding.token_text(i))), own[0])
