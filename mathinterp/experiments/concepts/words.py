"""Concepts: number and operation words, as a list of spellings, and which tokens of a vocabulary spell them.

A concept file is one JSON object: a category's name -> a list of concepts. A concept is one spelling, or a list of
spellings that count as one, the first of which names it. ``concepts.json`` beside this file is the default.

A token spells a concept if its decoded text, without white space around it (nor the word mark of a tokenizer that keeps
one), is the spelling. A spelling without capital letters is found in any case ("two": two, Two, TWO); one with capital
letters only as it is written ("II", but not ii). Special tokens and single bytes spell nothing.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError
from mathinterp.prompts.json_lines import json_object, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_LABEL = "default"
WORD_MARKS = " ▁Ġ\t\n\r"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class ConceptList:
    """Concepts in the order of their file, each with its spellings."""

    label: str
    concepts: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> list[str]:
        """The first spelling of each concept."""
        return [spellings[0] for spellings in self.concepts]

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the concepts, whatever the file is called."""
        return hashlib.sha256(json.dumps(self.concepts).encode()).hexdigest()[:16]

    def numbers(self, texts: Sequence[str | None]) -> list[int | None]:
        """The number of the concept that each text spells; None where it spells none."""
        written = {spelling: number for number, spellings in enumerate(self.concepts) for spelling in spellings}
        any_case = {spelling: number for spelling, number in written.items() if spelling == spelling.lower()}
        found: list[int | None] = []
        for text in texts:
            word = "" if text is None else text.strip(WORD_MARKS)
            found.append(written.get(word, any_case.get(word.lower())))
        return found


def token_texts(tokenizer: "PreTrainedTokenizerBase", vocabulary: int) -> list[str | None]:
    """The text of each token id below ``vocabulary``; None for special tokens, single bytes and ids without a token."""
    special = set(tokenizer.all_special_ids)
    special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = min(vocabulary, len(tokenizer))
    pieces = tokenizer.convert_ids_to_tokens(list(range(known)))
    texts: list[str | None] = [None] * vocabulary
    for number, piece in enumerate(pieces):
        if number not in special and piece is not None and not BYTE_TOKEN.fullmatch(piece):
            texts[number] = str(tokenizer.decode([number]))
    return texts


def read_concepts(path: str | Path | None = None) -> ConceptList:
    """The concepts of a file, or the default ones.

    Raises UserError, naming the file and what is wrong with it, for a file that is missing, no UTF-8, no JSON object
    of lists of spellings, that has an empty spelling or one with white space around it, or a spelling twice.
    """
    if path is None:
        content = (package_files("mathinterp.experiments.concepts") / "concepts.json").read_text(encoding="utf-8")
        return ConceptList(DEFAULT_LABEL, _concepts(content, "concepts.json"))
    path = Path(path)
    return ConceptList(path.name, _concepts(read_text(path, "concepts"), str(path)))


def _concepts(content: str, where: str) -> tuple[tuple[str, ...], ...]:
    concepts = []
    category_of: dict[str, str] = {}
    form = '; write {"numbers": ["one", ["two", "twice"]]}'
    for category, items in json_object(content, where, form).items():
        if not isinstance(items, list):
            raise UserError(f"{where}: category '{category}' must be a list of concepts, not {_kind(items)}")
        for item in items:
            spellings = item if isinstance(item, list) else [item]
            _check_spellings(spellings, item, category, where)
            for spelling in spellings:
                if spelling in category_of:
                    raise UserError(
                        f"{where}: '{spelling}' stands in category '{category_of[spelling]}' and again in '{category}';"
                        " a spelling belongs to one concept"
                    )
                category_of[spelling] = category
            concepts.append(tuple(spellings))
    if not concepts:
        raise UserError(f"{where} has no concepts{form}")
    return tuple(concepts)


def _check_spellings(spellings: Sequence[Any], item: Any, category: str, where: str) -> None:
    if not spellings or not all(isinstance(spelling, str) for spelling in spellings):
        shown = json.dumps(item, ensure_ascii=False)
        raise UserError(f"{where}, category '{category}': {shown} is neither a spelling nor a list of spellings")
    for spelling in spellings:
        if not spelling or spelling != spelling.strip(WORD_MARKS):
            raise UserError(
                f"{where}, category '{category}': '{spelling}' is empty or has white space around it;"
                " tokens are compared without"
            )


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
