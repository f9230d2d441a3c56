"""Neutral-operator pairs: the same sentence, positions aligned, no operator left."""

import re
from dataclasses import replace

import pytest

from mathinterp.errors import UserError
from mathinterp.prompts import Prompt, prompt_set
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.pairs import NEUTRAL_WORDS, operator_spans, with_counterfactuals
from mathinterp.prompts.templates import OPERATIONS
from tests.prompt_tokenizers import gpt2_like, llama_like, word_level

EVERY_NEUTRAL = [word for lists in NEUTRAL_WORDS.values() for words in lists.values() for word in words]


def prompt(text: str, operation: str | None = "add", answer: str = "8", **fields) -> Prompt:
    return Prompt("p", text, answer, operation=operation, **fields)


def neutral(item: Prompt, tokenizer=None) -> str | None:
    return with_counterfactuals([item], tokenizer or word_level([item.text, *EVERY_NEUTRAL]))[0].counterfactual


@pytest.mark.parametrize(
    "name", ["pairs", "two_digit", "one_digit", "one_digit_equals", "three_digit", "two_digit_words"]
)
@pytest.mark.parametrize("build", [word_level, llama_like, gpt2_like])
def test_every_set_gets_aligned_counterfactuals(name, build):
    prompts = prompt_set(name, limit=64)
    tokenizer = build([p.text for p in prompts] + [p.answer for p in prompts] + [f" {word} " for word in EVERY_NEUTRAL])
    paired = with_counterfactuals(prompts, tokenizer)
    for before, after in zip(prompts, paired, strict=True):
        assert after.counterfactual not in (None, before.text)
        assert replace(after, counterfactual=None) == before
        with pytest.raises(UserError, match="none of the operators"):
            operator_spans(replace(after, text=after.counterfactual))
    tokenized = tokenize_prompts(paired, tokenizer)
    for item in tokenized:
        assert len(item.counterfactual_ids) == len(item.input_ids)
        changed = [
            i for i, ids in enumerate(zip(item.input_ids, item.counterfactual_ids, strict=True)) if len(set(ids)) > 1
        ]
        assert changed
        assert max(changed) <= item.end


def test_words_and_signs_of_the_papers():
    assert neutral(prompt("3 plus 5 is equal to")) == "3 nothing 5 is equal to"
    assert neutral(prompt("3 + 5 =")) == "3 < 5 ="
    assert neutral(prompt("3+5=", separator="")) == "3<5="
    assert neutral(prompt("The sum of 3 and 5 is")) == "The pair of 3 and 5 is"
    assert neutral(prompt("Q: What is 6 divides 3? A:", "div")) == "Q: What is 6 follows 3? A:"
    assert neutral(prompt("6 divided by 3 equals", "div")) == "6 followed by 3 equals"
    assert neutral(prompt("The difference between 6 and 3 is", "sub")) == "The choice between 6 and 3 is"


def test_capitals_and_several_operators():
    assert neutral(prompt("Sum of 3 and 5:"), word_level(["Sum Pair of and :"])) == "Pair of 3 and 5:"
    assert neutral(prompt("The sum of 3 plus 5 is")) == "The pair of 3 nothing 5 is"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("52 - 37 =", ["- 37"]),
        ("52-37=", ["-37"]),
        ("-5 - -3 =", ["- -3"]),
        ("-5--3=", ["--3"]),
        ("thirty-four - twelve =", ["- twelve"]),
        ("thirty-four minus twelve is", ["minus twelve"]),
    ],
)
def test_hyphens_and_the_signs_of_numbers_are_no_operators(text, found):
    starts = [text[start:] for start, _ in operator_spans(prompt(text, "sub"))]
    assert [start[: len(expected)] for start, expected in zip(starts, found, strict=True)] == found


def test_the_first_word_that_keeps_the_token_count_is_taken():
    # as one token "plus" matches "beside"; "nothing" and "something" fall apart into bytes
    tokenizer = gpt2_like([" plus", " beside"] * 50 + ["3 5 is equal to"], 290)
    assert neutral(prompt("3 plus 5 is equal to"), tokenizer) == "3 beside 5 is equal to"


def test_a_word_the_tokenizer_does_not_know_is_passed_over():
    tokenizer = word_level(["3 plus 5 is equal to", "something"])
    assert neutral(prompt("3 plus 5 is equal to"), tokenizer) == "3 something 5 is equal to"


def test_a_counterfactual_that_is_there_is_kept():
    item = prompt("3 plus 5 is", counterfactual="3 and 5 is")
    assert with_counterfactuals([item], word_level([item.text])) == [item]


def test_a_text_without_its_operator_is_refused():
    with pytest.raises(UserError) as error:
        neutral(prompt("3 and 5 make"))
    assert str(error.value) == (
        "prompt 'p': none of the operators plus, added, sum, total, + is in the text '3 and 5 make'; "
        "write the field counterfactual yourself"
    )


@pytest.mark.parametrize("operation", [None, "pow"])
def test_an_operation_without_neutral_words_is_refused(operation):
    with pytest.raises(UserError) as error:
        neutral(prompt("3 plus 5 is", operation))
    assert str(error.value) == (
        f"prompt 'p': it has no counterfactual, and none can be made for operation {operation!r}: write the field "
        "counterfactual, a text with as many tokens (or, of arithmetic, the field operation: add, sub, mul, div); for "
        "an ablation, dataset_mean needs none"
    )


def test_where_nothing_aligns_both_tokenizations_are_shown():
    with pytest.raises(UserError) as error:
        neutral(prompt("3 plus 5 is"), word_level(["3 plus 5 is"]))
    words = ", ".join(NEUTRAL_WORDS["add"]["plus"])
    assert str(error.value) == (
        f"prompt 'p': none of the neutral words {words} for 'plus' aligns: "
        "6 tokens ['<s>', '3', 'plus', '5', 'is', '8'] against, with 'nothing', "
        "6 tokens ['<s>', '3', '<unk>', '5', 'is', '8']; write the field counterfactual yourself"
    )


def test_the_word_list_has_choices_for_every_operator_and_names_no_operator_itself():
    assert tuple(NEUTRAL_WORDS) == OPERATIONS
    operators = {operator for lists in NEUTRAL_WORDS.values() for operator in lists}
    for lists in NEUTRAL_WORDS.values():
        for operator, words in lists.items():
            assert len(words) == len(set(words)) >= 5, operator
            assert not operators & set(words)
            assert all(re.fullmatch(r"[a-z]+|\W", word) for word in words)
