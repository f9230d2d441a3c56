"""A GGUF file's tokenizer, as llama.cpp reads the file; what is not known here is refused by name.

transformers takes the tokens and merges, but cuts texts for pre-tokenizers that it does not know as GPT-2 does, and
does not look at the flag for a space in front. Knows the settings under ``tokenizer.``; nothing about models.
"""

import json
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mathinterp.errors import UserError
from mathinterp.models.gguf_metadata import GgufMetadata
from mathinterp.models.tokenizer_files import PROBES, with_backend

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How texts are cut before merging; of several names for one kind, those of the families that can be loaded.
_KINDS = {
    "gpt-2": "gpt-2", "phi-2": "gpt-2", "olmo": "gpt-2", "mpt": "gpt-2", "jina-en": "gpt-2",
    "smollm": "smollm", "starcoder": "smollm", "refact": "smollm", "codeshell": "smollm",
    "llama-bpe": "llama-bpe", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe",
    "qwen2": "qwen2", "deepseek-r1-qwen": "qwen2",
    "tekken": "tekken",
}  # fmt: skip
_WHOLE_WORDS_AND_BOS = ("llama-bpe", "tekken")  # a word that is a token is not merged; BOS where no flag says otherwise
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' names and the file's
_MUST_BE_OFF = ("add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap")


def file_tokenizer(metadata: GgufMetadata, built: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """``built``, which transformers made of the same file, with texts cut as the file says.

    Raises UserError for a tokenizer or a setting of one that is not known here.
    """
    own = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.settings.items()
        if key.startswith("tokenizer.ggml.")
    }
    for name in _MUST_BE_OFF:
        if own.get(name):
            raise UserError(f"GGUF file '{metadata.file}' sets tokenizer.ggml.{name}, which is not known here")
    backend = _without_additions(built.backend_tokenizer, len(own["tokens"]))
    kind = own.get("model")
    if kind == "gpt2":
        _cut_bytes(metadata, own, backend)
    elif kind == "llama":
        _put_space_in_front(metadata, own, backend)
    else:
        raise UserError(f"GGUF file '{metadata.file}' has a tokenizer of kind {kind!r} (known: gpt2, llama)")
    _add_ends(metadata, own, backend)
    ids = {name: own.get(f"{setting}_token_id") for name, setting in _SPECIAL.items()}
    specials = {f"{name}_token": backend.id_to_token(index) for name, index in ids.items() if index is not None}
    tokenizer = with_backend(built, backend, specials)
    _check_tokens(metadata, own, tokenizer)
    return tokenizer


def _without_additions(backend: Tokenizer, n_tokens: int) -> Tokenizer:
    """Leave out the special tokens of a class that the file does not list: their ids belong to no weight."""
    if backend.get_vocab_size() <= n_tokens:
        return backend
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < n_tokens]
    return Tokenizer.from_str(json.dumps(content))


def _cut_bytes(metadata: GgufMetadata, own: dict[str, Any], backend: Tokenizer) -> None:
    """Byte-level BPE: where a text is cut depends on ``tokenizer.ggml.pre``."""
    named = own.get("pre")
    if named is None:
        _check_indifferent(metadata, backend)
        named = "gpt-2"
    if named not in _KINDS:
        raise UserError(
            f"GGUF file '{metadata.file}' cuts texts by tokenizer.ggml.pre '{named}', which is not known here (known: "
            f"{', '.join(_KINDS)}): give the model as a Hugging Face folder"
        )
    backend.pre_tokenizer = _pre_tokenizer(_KINDS[named])
    if _KINDS[named] == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.model.ignore_merges = _KINDS[named] in _WHOLE_WORDS_AND_BOS


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = Regex({"llama-bpe": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}[kind])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])


def _check_indifferent(metadata: GgufMetadata, backend: Tokenizer) -> None:
    """A file may leave the kind out where its merges are so few that every kind gives the same tokens."""
    readings = set()
    for kind in dict.fromkeys(_KINDS.values()):
        backend.pre_tokenizer = _pre_tokenizer(kind)
        readings.add(tuple(tuple(backend.encode(text, add_special_tokens=False).ids) for text in PROBES))
    if len(readings) > 1:
        raise UserError(
            f"GGUF file '{metadata.file}' does not say how texts are cut (tokenizer.ggml.pre), and it matters for "
            "digits: convert the model anew, or give it as a Hugging Face folder"
        )


def _put_space_in_front(metadata: GgufMetadata, own: dict[str, Any], backend: Tokenizer) -> None:
    """SentencePiece: a space goes before a text unless the file says no."""
    wanted = own.get("add_space_prefix", True)
    if _has_space_in_front(backend) == wanted:
        return
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        scheme = "first" if wanted else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if _has_space_in_front(backend) != wanted:
        raise UserError(
            f"GGUF file '{metadata.file}' {'puts a' if wanted else 'puts no'} space in front of a text "
            f"(tokenizer.ggml.add_space_prefix), and transformers' {metadata.architecture} tokenizer "
            f"{'none' if wanted else 'one'}: give the model as a Hugging Face folder"
        )


def _has_space_in_front(backend: Tokenizer) -> bool:
    return "".join(backend.encode("a", add_special_tokens=False).tokens).startswith("▁")


def _add_ends(metadata: GgufMetadata, own: dict[str, Any], backend: Tokenizer) -> None:
    """BOS and EOS by the file's flags; llama.cpp adds a BOS to some kinds where the flag is left out."""
    bos_by_default = own["model"] == "llama" or _KINDS.get(own.get("pre", "")) in _WHOLE_WORDS_AND_BOS
    ends = {"bos": own.get("add_bos_token", bos_by_default), "eos": own.get("add_eos_token", False)}
    tokens = {}
    for end in [end for end, wanted in ends.items() if wanted]:
        token_id = own.get(f"{end}_token_id")
        token = None if token_id is None else backend.id_to_token(token_id)
        if token is None:
            raise UserError(f"GGUF file '{metadata.file}' adds {end.upper()} but has no tokenizer.ggml.{end}_token_id")
        tokens[end] = (token, token_id)
    single = [name for name in (tokens.get("bos", ("",))[0], "$A", tokens.get("eos", ("",))[0]) if name]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(set(tokens.values())))


def _check_tokens(metadata: GgufMetadata, own: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """No two entries became one, none was added, and the named ones have the file's ids."""
    if len(tokenizer) != len(own["tokens"]):
        raise UserError(
            f"GGUF file '{metadata.file}' lists {len(own['tokens'])} tokens, of which transformers makes "
            f"{len(tokenizer)}: give the model as a Hugging Face folder"
        )
    for name, setting in _SPECIAL.items():
        wanted, found = own.get(f"{setting}_token_id"), getattr(tokenizer, f"{name}_token_id")
        if wanted != found:
            raise UserError(
                f"GGUF file '{metadata.file}' sets tokenizer.ggml.{setting}_token_id to {wanted}, transformers takes "
                f"{found}: give the model as a Hugging Face folder"
            )
