"""The tokenizer of a Hugging Face folder: the one that its tokenizer.json describes, and no other.

transformers may build a tokenizer from a class, chosen by ``tokenizer_class`` or by the model's type, which takes the
vocabulary from tokenizer.json and brings a pre-tokenizer, a normalizer and special tokens of its own: digits are then
grouped, or spaces put in front, as the class says and not as the model was trained. Here such a class only names the
special tokens; texts are cut by the file. Knows tokenizers; knows nothing about prompts or weights.
"""

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mathinterp.errors import UserError, one_line_of
from mathinterp.models.fast_tokenizer import fast_tokenizer, options_of, specials_of
from mathinterp.models.sources import TOKENIZER_FILES
from mathinterp.prompts.json_lines import json_file

# Numbers of every length, signs, spaces, lines and scripts: what pre-tokenizers are known to cut in different ways.
PROBES = (
    "7", "47", "347", "2047", "12345678", " 7", "  47 ", "007", "3.14", "-5", "- 5", "3+5=8", "3 + 5 = 8", "12,345",
    "The sum of 35 and 447 is 482", "Café naïve \u0065\u0301 \uff13\uff15", "数学 ２＋３", "½ × ٣ − −7", "🙂 ok",
    "a\nb\r\n\n 1\t2", "It's 5 o'clock", "x  =   1", "def f(x):\n    return x - 1\n",
)  # fmt: skip
# Classes that are the definition of these models' tokenizers, where a folder has only vocab.json and merges.txt.
_DEFINING_CLASSES = {
    "gpt2": "GPT2Tokenizer", "gptj": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer",
}  # fmt: skip


def folder_tokenizer(folder: Path, model_type: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of ``folder``, whose ids are those of its tokenizer.json through the ``tokenizers`` library.

    Raises:
        UserError: a file of it that is a folder or leads nowhere, a tokenizer.json that cannot be read, one that
            tokenizer_config.json contradicts, a folder without one where nothing else says how the model's texts are
            cut, and code of the model's own that cuts texts in another way.
        OSError, ValueError, KeyError, TypeError, ImportError: as transformers raises them.
    """
    for name in TOKENIZER_FILES:
        if os.path.lexists(folder / name) and not os.path.isfile(folder / name):  # transformers takes it for absent
            raise UserError(f"'{folder / name}' is not a file; put the tokenizer's own there")
    file = folder / "tokenizer.json"
    own = _read_tokenizer(file) if file.is_file() else None
    named = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if own is None:
        _check_without_file(folder, named, model_type)
        return named
    fields = json_file(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    _check_added_tokens(folder, fields, own)
    _check_special_tokens(folder, fields, own)
    _check_ends(folder, fields, own, named)
    if trust_remote_code and "auto_map" in fields:
        _check_same(folder, named, own)
        return named
    tokenizer = with_backend(named, own)
    _check_same(folder, tokenizer, _read_tokenizer(file))
    return tokenizer


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers has no exception class of its own
        raise UserError(f"'{file}' cannot be read: {one_line_of(error)}") from error
    # How long batches were when it was saved; a prompt is never cut or filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def with_backend(
    named: PreTrainedTokenizerBase, own: Tokenizer, specials: dict[str, Any] | None = None
) -> PreTrainedTokenizerFast:
    """The chat template of ``named``, with texts cut by ``own`` and nothing added to it.

    ``specials`` are its special tokens, by default those of ``named``; one that ``own`` does not know is left out.
    """
    specials = specials_of(named) if specials is None else specials
    specials = {name: token for name, token in specials.items() if token and own.token_to_id(str(token)) is not None}
    return fast_tokenizer(own, {**options_of(named), **specials})


def _check_same(folder: Path, tokenizer: PreTrainedTokenizerBase, own: Tokenizer) -> None:
    for text in PROBES:
        found, expected = list(tokenizer(text)["input_ids"]), own.encode(text).ids
        if found != expected:
            raise UserError(
                f"model folder '{folder}': {type(tokenizer).__name__} reads {text!r} as ids {found}, its "
                f"tokenizer.json through the tokenizers library as {expected}; take auto_map out of "
                "tokenizer_config.json to read texts as tokenizer.json does"
            )


def _check_added_tokens(folder: Path, fields: dict[str, Any], own: Tokenizer) -> None:
    """A token that only other files add would get an id that tokenizer.json never gives."""
    added = {int(index): str(token["content"]) for index, token in (fields.get("added_tokens_decoder") or {}).items()}
    places = {token: (index, "tokenizer_config.json") for index, token in added.items()}
    if (folder / "added_tokens.json").is_file():
        listed = json_file(folder / "added_tokens.json")
        places = {token: (index, "added_tokens.json") for token, index in listed.items()} | places
    for token, (index, where) in places.items():
        found = own.token_to_id(token)
        if found != index:
            gives = "does not know it" if found is None else f"gives it {found}"
            raise UserError(
                f"model folder '{folder}': {where} gives token {token!r} the id {index}, but tokenizer.json {gives}: "
                "put the tokenizer.json there that was saved with this model"
            )


def _check_special_tokens(folder: Path, fields: dict[str, Any], own: Tokenizer) -> None:
    for name in ("bos_token", "eos_token"):
        token = fields.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token and own.token_to_id(token) is None:
            raise UserError(
                f"model folder '{folder}': tokenizer_config.json names {name} {token!r}, which tokenizer.json does not "
                "know: put the tokenizer.json there that was saved with this model"
            )


def _check_ends(folder: Path, fields: dict[str, Any], own: Tokenizer, named: PreTrainedTokenizerBase) -> None:
    """Versions of transformers differ in which of the two they follow, so a contradiction has no safe reading."""
    bare, whole = own.encode("7", add_special_tokens=False).ids, own.encode("7").ids
    for flag, token, at in (("add_bos_token", named.bos_token, 0), ("add_eos_token", named.eos_token, -1)):
        told = fields.get(flag)
        if not isinstance(told, bool):
            continue
        token_id = None if token is None else own.token_to_id(str(token))
        adds = len(whole) > len(bare) and token_id is not None and whole[at] == token_id
        if told != adds:
            raise UserError(
                f"model folder '{folder}': tokenizer_config.json says {flag} {str(told).lower()}, but tokenizer.json "
                f"{'adds' if adds else 'does not add'} {token or 'such a token'} ('7' becomes {_tokens(own, whole)}): "
                f"take {flag} out of tokenizer_config.json to read texts as tokenizer.json does, or set the "
                "post_processor of tokenizer.json"
            )


def _check_without_file(folder: Path, tokenizer: PreTrainedTokenizerBase, model_type: str) -> None:
    """vocab.json and the like say which tokens there are, not where texts are cut: only a known class says that."""
    name = type(tokenizer).__name__.removesuffix("Fast")
    if _DEFINING_CLASSES.get(model_type) != name:
        raise UserError(
            f"model folder '{folder}' has no tokenizer.json, and nothing says that {name}, which transformers would "
            "build, cuts texts as this model was trained: put the model's own tokenizer.json into the folder"
        )


def _tokens(own: Tokenizer, ids: list[int]) -> list[str | None]:
    return [own.id_to_token(index) for index in ids]
