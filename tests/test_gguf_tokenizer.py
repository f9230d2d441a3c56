"""The tokenizer in a GGUF file: texts are cut as the file says, and a kind that is not known is refused.

The twin is a tokenizer built with the ``tokenizers`` library alone, as a model's tokenizer.json would describe it; the
file holds its vocabulary and merges and the name of its kind.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec, resolve
from tests.tiny_gguf import changed_config, drawn_model, write_gguf

SUMS = [f"The sum of {a} and {b} is {a + b}. {a} + {b} = {a + b}" for a in range(5, 9999, 371) for b in range(3, 99, 9)]
TEXTS = [
    *SUMS[:40], "12345678", "  47", "3  +  5\n\n\n8", "It's 5", "a1b22c333", "−5", "x\t7", "3.14 is 12,345", "END 0x2F",
    "1 \n 2",
]  # fmt: skip
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


KINDS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": split(LLAMA_3),
    "qwen2": split(QWEN_2),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def byte_level(kind: str) -> Tokenizer:
    """Learned without any rule for digits, so that its merges make every kind of pre-tokenizer differ."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|end|>", "<|bos|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    words = [f" {word}" for text in SUMS for word in text.split()]
    spaces = ["  ", "\n\n", "\n\n\n", "The", "It's", " =", "12,"] * 200
    tokenizer.train_from_iterator([*words, *spaces, *map(str, range(1000))], trainer)
    tokenizer.pre_tokenizer = KINDS[kind]
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer, **settings: Any) -> dict[str, Any]:
    """The settings under ``tokenizer.ggml.`` for this tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    kinds = [3 if token in special else 1 for token in tokens]
    whole = {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": merges, "bos_token_id": 1}
    whole["eos_token_id"] = 0
    return {key: value for key, value in {**whole, **settings}.items() if value is not None}


def save(folder: Path, vocabulary: dict[str, Any], family: str = "llama") -> Path:
    config = changed_config(family, vocab_size=len(vocabulary["tokens"]))
    return write_gguf(folder / "tiny.gguf", drawn_model(config), tokenizer=vocabulary)


def assert_reads_as(file: Path, expected: Tokenizer) -> None:
    """Fresh and from the cache."""
    for _ in range(2):
        found = resolve(ModelSpec(str(file))).tokenizer
        for text in TEXTS:
            assert found(text).input_ids == expected.encode(text).ids, text


def refusal(file: Path) -> str:
    with pytest.raises(UserError) as error:
        resolve(ModelSpec(str(file)))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"GGUF file '{file}' ")
    return str(error.value).removeprefix(f"GGUF file '{file}' ")


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_cut_as_the_kind_says(kind: str, tmp_path: Path) -> None:
    tokenizer = byte_level(kind)
    tokenizer.model.ignore_merges = kind == "llama-bpe"
    assert_reads_as(save(tmp_path, vocabulary_of(tokenizer, pre=kind, add_bos_token=False)), tokenizer)


@pytest.mark.slow
def test_the_kinds_do_differ() -> None:
    readings = {kind: tuple(tuple(byte_level(kind).encode(text).ids) for text in TEXTS) for kind in KINDS}
    assert len(set(readings.values())) == len(KINDS)


def test_a_kind_that_is_not_known(tmp_path: Path) -> None:
    assert refusal(save(tmp_path, vocabulary_of(byte_level("gpt-2"), pre="deepseek-coder"))) == (
        "cuts texts by tokenizer.ggml.pre 'deepseek-coder', which is not known here (known: gpt-2, phi-2, olmo, mpt, "
        "jina-en, smollm, starcoder, refact, codeshell, llama-bpe, llama3, llama-v3, falcon3, qwen2, deepseek-r1-qwen, "
        "tekken): give the model as a Hugging Face folder"
    )


def test_no_kind_at_all_where_it_matters(tmp_path: Path) -> None:
    """Where it does not, in a file without merges of digits, tests/test_gguf.py loads one."""
    assert refusal(save(tmp_path, vocabulary_of(byte_level("gpt-2")))) == (
        "does not say how texts are cut (tokenizer.ggml.pre), and it matters for digits: convert the model anew, or "
        "give it as a Hugging Face folder"
    )


@pytest.mark.parametrize(
    ("kind", "flags", "single"),
    [
        ("gpt-2", {}, "$A"),
        ("gpt-2", {"add_bos_token": True}, "<|bos|> $A"),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, "<|bos|> $A <|end|>"),
        ("qwen2", {"add_eos_token": True}, "$A <|end|>"),
        ("llama-bpe", {}, "<|bos|> $A"),
        ("llama-bpe", {"add_bos_token": False}, "$A"),
    ],
)
def test_bos_and_eos_as_the_flags_say(kind: str, flags: dict[str, bool], single: str, tmp_path: Path) -> None:
    """Where no flag says otherwise, llama.cpp adds a BOS for Llama 3's kind and none for GPT-2's."""
    tokenizer = byte_level(kind)
    tokenizer.model.ignore_merges = kind == "llama-bpe"
    ends = [("<|bos|>", 1), ("<|end|>", 0)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    assert_reads_as(save(tmp_path, vocabulary_of(tokenizer, pre=kind, **flags)), tokenizer)


def test_a_bos_that_has_no_id(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(byte_level("gpt-2"), pre="gpt-2", add_bos_token=True, bos_token_id=None)
    assert refusal(save(tmp_path, vocabulary)) == "adds BOS but has no tokenizer.ggml.bos_token_id"


@pytest.mark.slow
def test_settings_of_a_tokenizer_that_are_not_known(tmp_path: Path) -> None:
    plain = vocabulary_of(byte_level("gpt-2"), pre="gpt-2")
    for name in ("add_sep_token", "remove_extra_whitespaces"):
        expected = f"sets tokenizer.ggml.{name}, which is not known here"
        assert refusal(save(tmp_path, {**plain, name: True})) == expected
    assert "bert" in refusal(save(tmp_path, {**plain, "model": "bert"}))


def test_no_token_is_added_to_those_of_the_file(tmp_path: Path) -> None:
    """GPT-2's class brings a token of its own, whose id would be the first without a weight."""
    tokenizer = byte_level("smollm")
    file = save(tmp_path, vocabulary_of(tokenizer, pre="smollm"))
    read = resolve(ModelSpec(str(file))).tokenizer
    assert len(read) == tokenizer.get_vocab_size()
    assert read("<|endoftext|> 5").input_ids == tokenizer.encode("<|endoftext|> 5").ids
    assert (read.bos_token, read.eos_token, read.unk_token, read.pad_token) == ("<|bos|>", "<|end|>", None, None)


@pytest.mark.parametrize("space", [True, False])
def test_a_space_in_front_as_the_flag_says(space: bool, tmp_path: Path) -> None:
    """SentencePiece's kind; transformers' class puts one there whatever the file says."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    scheme = "first" if space else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        SUMS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    vocabulary = vocabulary_of(
        tokenizer, model="llama", add_space_prefix=space, eos_token_id=2, unknown_token_id=0,
        scores=[float(-index) for index in range(tokenizer.get_vocab_size())],
    )  # fmt: skip
    file = save(tmp_path, vocabulary)
    read = resolve(ModelSpec(str(file))).tokenizer
    for text in SUMS[:40]:
        assert read(text).input_ids == tokenizer.encode(text).ids, text
    assert read.convert_ids_to_tokens(read("The").input_ids)[1].startswith("▁") == space
