"""Models of a known shape with random weights: built in place, reproducible, with Llama-2's token counts."""

import pytest
import torch

from mathinterp.errors import UserError
from mathinterp.models.anatomy import model_shape
from mathinterp.models.catalog import ModelSpec, load
from mathinterp.models.random_shapes import (
    SHAPES,
    llama_like_tokenizer,
    parse_random,
    random_config,
    tokenizer_words,
)
from mathinterp.prompts import prompt_set
from mathinterp.prompts.alignment import tokenize_prompts

TOKENIZER = llama_like_tokenizer(32000)


def tokens(text: str) -> str:
    return " ".join(TOKENIZER.convert_ids_to_tokens(TOKENIZER(text).input_ids))


def test_published_sizes() -> None:
    sizes = {name: model_shape(random_config(name)) for name in SHAPES}
    heads = {name: (shape.n_layers, shape.n_heads, shape.n_groups, shape.d_head) for name, shape in sizes.items()}
    assert heads["llama-2-7b"] == (32, 32, 32, 128)
    assert heads["llama-2-13b"] == (40, 40, 40, 128)
    assert heads["llama-3-8b"] == (32, 32, 8, 128)
    assert heads["mistral-7b"] == (32, 32, 8, 128)
    assert heads["gemma-2-9b"] == (42, 16, 8, 256)
    assert heads["gpt-j-6b"] == (28, 16, 16, 256)
    assert heads["smollm2-135m"] == (30, 9, 3, 64)
    assert sizes["llama-2-7b"].n_layers * sizes["llama-2-7b"].n_neurons == 352_256  # method.md section 5


def test_same_seed_same_weights_and_the_callers_random_state_stays() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (load(ModelSpec(f"random:llama-tiny:{seed}"), "cpu").model.state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_built_in_its_dtype_with_rotary_frequencies_in_float32(dtype: str) -> None:
    loaded = load(ModelSpec("random:llama-tiny", dtype=dtype), "cpu")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert loaded.model.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32
    logits = loaded.model(loaded.tokenizer("3 plus 5 is", return_tensors="pt").input_ids).logits
    assert logits.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_built_on_the_device() -> None:
    loaded = load(ModelSpec("random:llama-tiny"), "cuda")
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"cuda"}
    assert loaded.dtype == ("bfloat16" if torch.cuda.is_bf16_supported() else "float16")


def test_names_with_seeds() -> None:
    assert parse_random("random:llama-2-7b") == ("llama-2-7b", 0)
    assert parse_random("random:llama-2-7b:17") == ("llama-2-7b", 17)
    for name in ("random:llama-2-7b:x", "random:llama-2-7b:1:2", "random:llama-2-7b:"):
        with pytest.raises(UserError) as error:
            parse_random(name)
        assert str(error.value) == (
            f"model '{name}': write random:llama-2-7b or random:llama-2-7b:SEED with a whole number"
        )


def test_arithmetic_is_cut_as_by_llama_2() -> None:
    """Expected cuts are those of Llama-2's own tokenizer; only "thirty-four" is cut into one token fewer here."""
    assert tokens("Q: What is 15 plus 32? A: 47") == "<s> ▁Q : ▁What ▁is ▁ 1 5 ▁plus ▁ 3 2 ? ▁A : ▁ 4 7"
    assert tokens("15 + 32 = 47") == "<s> ▁ 1 5 ▁+ ▁ 3 2 ▁= ▁ 4 7"
    assert tokens("3+5=8") == "<s> ▁ 3 + 5 = 8"
    assert tokens("The difference between 9 and 3 is 6") == "<s> ▁The ▁difference ▁between ▁ 9 ▁and ▁ 3 ▁is ▁ 6"
    assert tokens("thirty-four plus two is") == "<s> ▁thirty - four ▁plus ▁two ▁is"


def test_every_word_of_the_prompts_is_one_token() -> None:
    for word in tokenizer_words():
        assert TOKENIZER.convert_ids_to_tokens(TOKENIZER(word).input_ids) == ["<s>", f"▁{word}"]


def test_other_text_survives_the_way_there_and_back() -> None:
    text = "A café costs €3, naïve or not!"
    assert TOKENIZER.decode(TOKENIZER(text).input_ids, skip_special_tokens=True) == text


def test_token_counts_of_the_two_digit_set() -> None:
    """<s>, a "▁" before each number, one token a digit, one a word or sign; fed = all but the last."""
    prompts = prompt_set("two_digit")
    for prompt, tokenized in zip(prompts, tokenize_prompts(prompts, TOKENIZER), strict=True):
        numbers = f"{prompt.operand_a} {prompt.operand_b} {prompt.answer}".split()
        assert all(number.isdecimal() for number in numbers)
        others = {"question": 8, "words": 2, "symbols": 2}.get(str(prompt.template), 5)
        assert len(tokenized.input_ids) == 1 + others + sum(1 + len(number) for number in numbers)
        assert len(tokenized.fed) == len(tokenized.input_ids) - 1
        assert "".join(token.token for token in tokenized.scored) == prompt.answer
    mean = sum(len(tokenized.fed) for tokenized in tokenize_prompts(prompts, TOKENIZER)) / len(prompts)
    assert 13 < mean < 15


def test_vocabularies_of_every_shape_are_full() -> None:
    for name in ("llama-tiny", "smollm2-135m"):
        config = random_config(name)
        assert len(llama_like_tokenizer(config.vocab_size)) == config.vocab_size
