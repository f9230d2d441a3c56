"""A model's tokenizer is the one that its tokenizer.json describes, whatever class transformers would build from it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.prompts import PROMPT_SETS, load_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from tests.tiny import save_tiny

TEXTS = [f"The sum of {a} and {b} is {a + b}. {a} + {b} = {a + b}" for a in range(5, 999, 37) for b in range(3, 99, 9)]
GROUPS_OF_DIGITS = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated")
SINGLE_DIGITS = pre_tokenizers.Digits(individual_digits=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def byte_level(
    digits: pre_tokenizers.PreTokenizer | None, *, bos: bool = True, prefix_space: bool = False
) -> Tokenizer:
    """A byte-level BPE of 160 or more entries with the given rule for digits, learned from sums."""
    tokenizer = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.pre_tokenizer = plain if digits is None else pre_tokenizers.Sequence([digits, plain])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|bos|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    return tokenizer


def metaspace(prepend_scheme: str) -> Tokenizer:
    """Llama-2's kind: "▁" for spaces, put in front of a text as ``prepend_scheme`` says; numbers are single tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def model_folder(folder: Path, family: str, tokenizer: Tokenizer, **fields: object) -> Path:
    """A tiny model beside ``tokenizer``, with ``fields`` as its tokenizer_config.json.

    Its embedding is smaller than the vocabulary, which is no matter where nothing is loaded.
    """
    save_tiny(folder, family)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def edit_config(folder: Path, **fields: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def message(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        resolve(ModelSpec(str(folder)))
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_reads_as_the_file(folder: Path) -> None:
    """Ids and offsets of every text equal those of the raw tokenizer.json, which knows no transformers."""
    tokenizer, raw = resolve(ModelSpec(str(folder))).tokenizer, Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.no_truncation()
    raw.no_padding()
    texts = [*TEXTS[:50], "  two  spaces", "1234567", "<s> 5", "a\nb", "3 − 5", "Café", " 47"]
    found = tokenizer(texts, return_offsets_mapping=True)
    for text, ids, spans in zip(texts, found["input_ids"], found["offset_mapping"], strict=True):
        expected = raw.encode(text)
        assert (ids, [tuple(span) for span in spans]) == (expected.ids, expected.offsets), text


SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
LLAMA_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("named", [None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox"])
def test_digits_are_grouped_as_the_file_says(family: str, named: str | None, tmp_path: Path) -> None:
    """Qwen2's class makes single digits of them, GPT-2's and GPT-NeoX's whole numbers, Gemma's knows no bytes."""
    fields = SPECIAL if named is None else {**SPECIAL, "tokenizer_class": named}
    for name, digits in (("grouped", GROUPS_OF_DIGITS), ("single", SINGLE_DIGITS)):
        assert_reads_as_the_file(model_folder(tmp_path / name, family, byte_level(digits), **fields))


def test_a_class_does_group_them_otherwise(tmp_path: Path) -> None:
    """What the test above guards against does happen: plain transformers reads another number of tokens."""
    folder = model_folder(tmp_path / "model", "qwen2", byte_level(GROUPS_OF_DIGITS), **SPECIAL)
    plain = AutoTokenizer.from_pretrained(folder)
    assert len(plain("347 + 12").input_ids) > len(resolve(ModelSpec(str(folder))).tokenizer("347 + 12").input_ids)


@pytest.mark.parametrize("scheme", ["never", "first", "always"])
def test_a_space_goes_in_front_as_the_file_says(scheme: str, tmp_path: Path) -> None:
    """Llama's class puts one there whatever the file says."""
    fields = {**LLAMA_SPECIAL, "tokenizer_class": "LlamaTokenizer"}
    assert_reads_as_the_file(model_folder(tmp_path / "model", "llama", metaspace(scheme), **fields))


def test_a_prefix_space_that_only_the_config_asks_for_is_not_added(tmp_path: Path) -> None:
    fields = {**SPECIAL, "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    assert_reads_as_the_file(model_folder(tmp_path / "model", "gpt2", byte_level(SINGLE_DIGITS), **fields))
    fields["add_prefix_space"] = False
    with_space = byte_level(SINGLE_DIGITS, prefix_space=True)
    assert_reads_as_the_file(model_folder(tmp_path / "other", "gpt2", with_space, **fields))


def test_the_normalizer_of_the_file_is_kept(tmp_path: Path) -> None:
    tokenizer = byte_level(SINGLE_DIGITS)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    folder = model_folder(tmp_path / "model", "gpt2", tokenizer, **SPECIAL, tokenizer_class="GPT2Tokenizer")
    assert_reads_as_the_file(folder)
    read = resolve(ModelSpec(str(folder))).tokenizer
    assert read("THE SUM OF ３").input_ids == read("the sum of 3").input_ids


def test_a_post_processor_that_a_class_would_drop_is_kept(tmp_path: Path) -> None:
    """GPT-NeoX's class writes its own, without a BOS."""
    folder = model_folder(
        tmp_path / "model", "gpt_neox", byte_level(SINGLE_DIGITS), **SPECIAL, tokenizer_class="GPTNeoXTokenizer"
    )
    assert resolve(ModelSpec(str(folder))).tokenizer("7").input_ids[0] == 1
    assert_reads_as_the_file(folder)


def test_truncation_and_padding_in_the_file_leave_prompts_whole(tmp_path: Path) -> None:
    tokenizer = byte_level(SINGLE_DIGITS)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert_reads_as_the_file(model_folder(tmp_path / "model", "llama", tokenizer, **SPECIAL))


def test_special_tokens_that_only_a_class_knows_are_not_added(tmp_path: Path) -> None:
    """They would get ids that no weight belongs to."""
    folder = model_folder(
        tmp_path / "model", "gpt_neox", byte_level(SINGLE_DIGITS), **SPECIAL, tokenizer_class="GPTNeoXTokenizer"
    )
    read = resolve(ModelSpec(str(folder))).tokenizer
    assert len(read) == Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert (read.bos_token, read.eos_token, read.pad_token) == ("<|bos|>", "<|end|>", None)


def test_all_prompt_sets_read_as_the_file(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "qwen2", byte_level(GROUPS_OF_DIGITS), **SPECIAL)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = resolve(ModelSpec(str(folder))).tokenizer
    for name in ("two_digit", "one_digit"):
        assert name in PROMPT_SETS
        prompts = load_prompts(name, limit=40)
        for prompt, tokenized in zip(prompts, tokenize_prompts(prompts, tokenizer), strict=True):
            whole = raw.encode(prompt.text + prompt.separator + prompt.answer)
            assert list(tokenized.input_ids) == whole.ids


def test_a_saved_copy_reads_the_same_in_plain_transformers(tmp_path: Path) -> None:
    """What tuning writes beside a model: its class no longer asks for another tokenizer."""
    fields = {**LLAMA_SPECIAL, "tokenizer_class": "LlamaTokenizer"}
    folder = model_folder(tmp_path / "model", "llama", metaspace("never"), **fields)
    read = resolve(ModelSpec(str(folder))).tokenizer
    read.save_pretrained(tmp_path / "copy")
    copy = PreTrainedTokenizerFast.from_pretrained(tmp_path / "copy")
    assert copy(TEXTS[:20]).input_ids == read(TEXTS[:20]).input_ids
    assert (copy.bos_token, copy.eos_token, copy.unk_token) == ("<s>", "</s>", "<unk>")


@pytest.mark.parametrize("flag", ["add_bos_token", "add_eos_token"])
def test_a_config_that_contradicts_the_file_about_the_ends(flag: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "llama", byte_level(SINGLE_DIGITS), **SPECIAL)
    has = flag == "add_bos_token"
    edit_config(folder, **{flag: has})
    assert_reads_as_the_file(folder)
    edit_config(folder, **{flag: None})
    assert_reads_as_the_file(folder)
    edit_config(folder, **{flag: not has})
    does = "adds <|bos|>" if has else "does not add <|end|>"
    assert message(folder) == (
        f"model folder '{folder}': tokenizer_config.json says {flag} {str(not has).lower()}, but tokenizer.json {does} "
        f"('7' becomes ['<|bos|>', '7']): take {flag} out of tokenizer_config.json to read texts as tokenizer.json "
        "does, or set the post_processor of tokenizer.json"
    )


def test_tokens_that_the_file_does_not_know(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "llama", byte_level(SINGLE_DIGITS), **SPECIAL)
    advice = "put the tokenizer.json there that was saved with this model"
    edit_config(folder, added_tokens_decoder={"0": {"content": "<|end|>"}, "600": {"content": "<|turn|>"}})
    assert message(folder) == (
        f"model folder '{folder}': tokenizer_config.json gives token '<|turn|>' the id 600, but tokenizer.json does "
        f"not know it: {advice}"
    )
    edit_config(folder, added_tokens_decoder={}, eos_token="<|turn|>")
    assert message(folder) == (
        f"model folder '{folder}': tokenizer_config.json names eos_token '<|turn|>', which tokenizer.json does not "
        f"know: {advice}"
    )
    edit_config(folder, eos_token=None)
    (folder / "added_tokens.json").write_text('{"<|end|>": 7}')
    assert message(folder) == (
        f"model folder '{folder}': added_tokens.json gives token '<|end|>' the id 7, but tokenizer.json gives it 0: "
        f"{advice}"
    )


def test_a_tokenizer_file_that_cannot_be_read(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "llama", byte_level(SINGLE_DIGITS), **SPECIAL)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    assert message(folder).startswith(f"'{folder / 'tokenizer.json'}' cannot be read: ")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_file_that_is_a_folder_or_leads_to_itself_is_not_taken_for_absent(name: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "llama", byte_level(SINGLE_DIGITS), **SPECIAL)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder / name)
    assert message(folder) == f"'{folder / name}' is not a file; put the tokenizer's own there"
    (folder / name).unlink()
    (folder / name).mkdir()
    assert message(folder) == f"'{folder / name}' is not a file; put the tokenizer's own there"


def test_a_folder_without_the_file_needs_a_class_that_defines_the_model(tmp_path: Path) -> None:
    """vocab.json and merges.txt do not say how digits are cut; GPT-2's class says it for GPT-2 alone."""
    tokenizer = byte_level(None, bos=False)
    for family, accepted in (("gpt2", True), ("llama", False)):
        folder = model_folder(tmp_path / family, family, tokenizer, **SPECIAL, tokenizer_class="GPT2Tokenizer")
        expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
        (folder / "tokenizer.json").unlink()
        tokenizer.model.save(str(folder))
        if accepted:
            read = resolve(ModelSpec(str(folder))).tokenizer
            assert all(read(text).input_ids == expected.encode(text).ids for text in TEXTS[:50])
        else:
            assert message(folder) == (
                f"model folder '{folder}' has no tokenizer.json, and nothing says that GPT2Tokenizer, which "
                "transformers would build, cuts texts as this model was trained: put the model's own tokenizer.json "
                "into the folder"
            )


def test_code_of_the_models_own_that_reads_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = model_folder(
        tmp_path / "model", "llama", byte_level(SINGLE_DIGITS), **SPECIAL,
        auto_map={"AutoTokenizer": [None, "own_tokenizer.Backwards"]},
    )  # fmt: skip
    (folder / "own_tokenizer.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class Backwards(PreTrainedTokenizerFast):\n"
        "    def _encode_plus(self, text, *args, **kwargs):\n"
        "        return super()._encode_plus(text[::-1], *args, **kwargs)\n"
    )
    with pytest.raises(UserError) as error:
        resolve(ModelSpec(str(folder), trust_remote_code=True))
    assert str(error.value).startswith(f"model folder '{folder}': Backwards reads '47' as ids [")
    assert str(error.value).endswith(
        "; take auto_map out of tokenizer_config.json to read texts as tokenizer.json does"
    )
    edit_config(folder, auto_map={})
    assert_reads_as_the_file(folder)


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "llama", byte_level(SINGLE_DIGITS), **SPECIAL, add_eos_token=True)
    done = CliRunner().invoke(main, ["prompts", "--model", str(folder), "--limit", "2"])
    assert done.exit_code == 2
    assert "says add_eos_token true, but tokenizer.json does not add <|end|>" in done.output
    assert "Traceback" not in done.output


def test_added_tokens_are_read_with_the_flags_of_the_file(tmp_path: Path) -> None:
    """transformers marks special tokens anew, and a text that holds one is then cut in other places."""
    tokenizer = byte_level(SINGLE_DIGITS)
    tokenizer.add_tokens([AddedToken("<|turn|>", lstrip=True, rstrip=True, normalized=True)])
    folder = model_folder(tmp_path / "model", "llama", tokenizer, **SPECIAL, pad_token="<|turn|>")
    read, raw = resolve(ModelSpec(str(folder))).tokenizer, Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("5 <|turn|> 6", "5<|turn|>6", "The <|bos|> sum"):
        assert read(text).input_ids == raw.encode(text).ids
