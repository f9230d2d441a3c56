"""Ordinary text in passages, to see what an edit costs where it should change nothing.

Knows plain text files and the passages that come along (ordinary_text.jsonl, written for this project: short English
pieces on everyday things, none about professions of men or women); knows nothing about models.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mathinterp.errors import UserError
from mathinterp.prompts.alignment import adds_bos
from mathinterp.prompts.json_lines import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUNDLED_TEXT = Path(__file__).with_name("ordinary_text.jsonl")
LONGEST = 256  # tokens of a passage; longer ones are cut into several


def read_passages(path: Path | None) -> list[str]:
    """The passages of a plain text file, separated by blank lines; None: those that come along.

    Raises UserError for a file that is missing, empty or not UTF-8.
    """
    if path is None:
        return [json.loads(line)["text"] for line in BUNDLED_TEXT.read_text(encoding="utf-8").splitlines()]
    blocks = read_text(path, "text").replace("\r\n", "\n").split("\n\n")
    passages = [" ".join(block.split()) for block in blocks if block.strip()]
    if not passages:
        raise UserError(f"{path} holds no text")
    return passages


def encode_passages(
    passages: Sequence[str], tokenizer: "PreTrainedTokenizerBase", longest: int = LONGEST
) -> tuple[tuple[int, ...], ...]:
    """Token ids of each passage, in pieces of 2 to ``longest`` tokens; each begins with the BOS, if any.

    Raises UserError for a word that the tokenizer does not know.
    """
    pieces: list[tuple[int, ...]] = []
    bos = tokenizer("a")["input_ids"][: int(adds_bos(tokenizer))]
    for passage in passages:
        encoded = tokenizer(passage, add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = encoded["input_ids"], encoded["offset_mapping"]
        unknown = [passage[start:stop] for token, (start, stop) in zip(ids, spans, strict=True)
                   if tokenizer.unk_token_id is not None and token == tokenizer.unk_token_id
                   and passage[start:stop] != tokenizer.unk_token]  # fmt: skip
        if unknown:
            raise UserError(f"the tokenizer does not know {unknown[0]!r} in {passage[:40]!r}; give another text")
        room = longest - len(bos)
        pieces += [(*bos, *ids[start : start + room]) for start in range(0, len(ids), room)]
    return tuple(piece for piece in pieces if len(piece) > 1)
