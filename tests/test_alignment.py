"""Which token is what, on the kinds of tokenizers that language models have."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from mathinterp.errors import UserError
from mathinterp.prompts import Prompt, prompt_set
from mathinterp.prompts.alignment import prompts_fingerprint, token_columns, tokenize_prompts
from mathinterp.prompts.columns import digit_classes
from tests.prompt_tokenizers import gpt2_like, llama_like, word_level

CORPUS = ["3 plus 5 is 8", "15 + 37 = 52", "3-5= -2", "The pair of 12 and 12 is 144", "nothing < eight apples = -"] * 3
MERGES = CORPUS + [" 47", " 52", " 144", " -"] * 20
M, C = "memorize", "change-one"


def prompt(text: str, answer: str, separator: str = " ", **fields) -> Prompt:
    return Prompt("p", text, answer, separator=separator, **fields)


def scored(item: Prompt, tokenizer) -> list[tuple[str, str, str | None]]:
    return [(t.token, t.kind, t.carry_class) for t in tokenize_prompts([item], tokenizer)[0].scored]


def addition(text: str = "15 + 37 =", answer: str = "52", **fields) -> Prompt:
    return prompt(text, answer, operation="add", operand_a="15", operand_b="37", **fields)


class SlowTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python, without character offsets."""

    vocab_size = 1

    def get_vocab(self):
        return {"x": 0}


# what is scored


def test_word_level_drops_the_space_and_scores_each_digit():
    tokenizer = word_level(CORPUS)
    item = tokenize_prompts([addition()], tokenizer)[0]
    assert tokenizer.convert_ids_to_tokens(item.input_ids) == ["<s>", "1", "5", "+", "3", "7", "=", "5", "2"]
    assert [(t.position, t.index, t.token, t.kind, t.carry_class) for t in item.scored] == [
        (0, 7, "5", "digit", C),
        (1, 8, "2", "digit", M),
    ]
    assert item.end == 6
    assert item.fed == item.input_ids[:8]
    assert [t.token_id for t in item.scored] == list(item.input_ids[7:])


def test_llama_kind_keeps_the_space_as_a_token_that_is_read_but_never_scored():
    tokenizer = llama_like(CORPUS)
    item = tokenize_prompts([addition()], tokenizer)[0]
    tokens = tokenizer.convert_ids_to_tokens(item.input_ids)
    assert tokens == ["<s>", "▁", "1", "5", "▁", "+", "▁", "3", "7", "▁", "=", "▁", "5", "2"]
    assert [(t.index, t.token) for t in item.scored] == [(12, "5"), (13, "2")]
    assert tokens[item.end] == "▁"


def test_gpt2_kind_merges_the_space_and_both_digits_into_one_token():
    tokenizer = gpt2_like(MERGES)
    item = tokenize_prompts([addition()], tokenizer)[0]
    assert tokenizer.convert_ids_to_tokens(item.input_ids)[-1] == "Ġ52"
    assert [(t.token, t.kind, t.carry_class) for t in item.scored] == [(" 52", "digit", "mixed")]
    assert item.input_ids[0] != tokenizer.bos_token_id
    # encoded alone, the answer is another token: targets must come from the context
    assert tokenizer("52").input_ids != [item.scored[0].token_id]


def test_without_a_separator_the_answer_follows_at_once():
    item = prompt("3+5=", "8", separator="", operation="add", operand_a="3", operand_b="5")
    for tokenizer in (word_level([item.text]), llama_like([item.text]), gpt2_like(CORPUS)):
        assert scored(item, tokenizer) == [("8", "digit", M)]


def test_the_minus_of_a_negative_answer_is_scored_as_a_sign():
    item = prompt("3-5=", "-2", operation="sub", operand_a="3", operand_b="5")
    assert scored(item, word_level(CORPUS)) == [("-", "sign", None), ("2", "digit", M)]
    assert scored(item, llama_like(CORPUS)) == [("-", "sign", None), ("2", "digit", M)]
    assert scored(item, gpt2_like(MERGES)) == [(" -", "sign", None), ("2", "digit", M)]


def test_a_minus_inside_an_answer_is_not_a_sign():
    tokenizer = word_level(["years are -"])
    assert scored(prompt("years are", "17-23"), tokenizer) == [(d, "digit", None) for d in "1723"]


SIGNED = {  # answer -> the characters that are scored, and as what; by hand
    "-5": {"-": "sign", "5": "digit"},
    "−5": {"−": "sign", "5": "digit"},
    "–5": {"–": "sign", "5": "digit"},
    "+5": {"+": "sign", "5": "digit"},
    ".5": {".": "point", "5": "digit"},
    "-.5": {"-": "sign", ".": "point", "5": "digit"},
    "-$5": {"-": "sign", "5": "digit"},
    "$-5": {"-": "sign", "5": "digit"},
    "$5": {"5": "digit"},
    "- 5": {"-": "sign", "5": "digit"},
    "(-5)": {"-": "sign", "5": "digit"},
    "(5)": {"5": "digit"},
    "-€.7": {"-": "sign", ".": "point", "7": "digit"},
    "1,000": {"1": "digit", "0": "digit"},
    "1/2": {"1": "digit", "2": "digit"},
    "-1/2": {"-": "sign", "1": "digit", "2": "digit"},
    "3e-5": {"3": "digit", "-": "sign", "5": "digit"},
    "5%": {"5": "digit"},
    "5 - 3": {"5": "digit", "3": "digit"},
    "5 apples": {"5": "digit"},
}


@pytest.mark.parametrize(("answer", "wanted"), SIGNED.items())
def test_every_token_that_carries_the_answers_number_is_scored(answer, wanted):
    """Where characters stay apart, exactly these; where they merge, every token that holds one of them."""
    texts = [f"x = {answer} -.5 $5 (+5) −–€/%,e7"]
    apart = [word_level(texts, adds_bos=bos) for bos in (True, False)]
    for tokenizer in apart:
        found = {token: kind for token, kind, _ in scored(prompt("x =", answer), tokenizer)}
        assert found == wanted
    for tokenizer in (llama_like(texts), gpt2_like(texts * 40, 400), gpt2_like([f"x = {answer}"] * 40, 300)):
        (item,) = tokenize_prompts([prompt("x =", answer)], tokenizer)
        ids = tokenizer(f"x = {answer}", return_offsets_mapping=True)
        start = len("x = ")
        spans = [(max(first, start), stop) for first, stop in ids["offset_mapping"]]
        holds = {i for i, span in enumerate(spans) if set(f"x = {answer}"[slice(*span)]) & set(wanted)}
        assert {token.index for token in item.scored} == holds


def test_signs_in_words_and_answers_in_words():
    for tokenizer in (word_level(["x = minus twelve"]), llama_like(["x = minus twelve"])):
        assert scored(prompt("x =", "minus 5"), tokenizer)[0][1] == "sign"
        assert {kind for _, kind, _ in scored(prompt("x =", "minus twelve"), tokenizer)} == {"text"}
        assert {kind for _, kind, _ in scored(prompt("x =", "twelve"), tokenizer)} == {"text"}


def test_merged_signs_and_points_are_scored():
    tokenizer = gpt2_like(["x = -$5", "x = $-5", "x = -.5"] * 50, 290)
    for answer, first in (("-$5", " -$"), ("-.5", " -")):
        token, kind, _ = scored(prompt("x =", answer), tokenizer)[0]
        assert kind == "sign"
        assert first.startswith(token) or token.startswith(first), token


def test_the_point_of_a_decimal_is_read_but_not_scored():
    tokenizer = word_level(["4.2 plus 2.5 is 6.7"])
    item = tokenize_prompts([prompt("4.2 plus 2.5 is", "6.7")], tokenizer)[0]
    assert [(t.position, t.index, t.token) for t in item.scored] == [(0, 9, "6"), (1, 11, "7")]


def test_an_answer_without_digits_scores_all_its_tokens_but_spaces():
    item = prompt("3 plus 5 is", "eight apples", operation="add", operand_a="3", operand_b="5")
    for tokenizer in (word_level(CORPUS), llama_like(CORPUS)):
        assert [kind for _, kind, _ in scored(item, tokenizer)] == ["text", "text"]
        assert {carry for _, _, carry in scored(item, tokenizer)} == {None}
    spaced = prompt("3 plus 5 is", "eight  apples", separator="  ")
    tokens = tokenize_prompts([spaced], llama_like(["3 plus 5 is eight"]))[0].scored
    assert all(t.token.strip() for t in tokens)


def test_byte_fallback_tokens_of_a_text_answer_are_all_scored():
    tokenizer = llama_like(["3 plus 5 is"])
    item = tokenize_prompts([prompt("3 plus 5 is", "八")], tokenizer)[0]
    assert tokenizer.convert_ids_to_tokens(item.input_ids)[-3:] == ["<0xE5>", "<0x85>", "<0xAB>"]
    assert [(t.kind, t.token) for t in item.scored] == [("text", "八")] * 3


def test_a_text_that_ends_in_white_space_may_share_it_with_the_answer():
    item = addition(text="15 + 37 = ", separator="")
    assert scored(item, gpt2_like(MERGES)) == [(" 52", "digit", "mixed")]


# BOS and EOS


@pytest.mark.parametrize("text", ["3 plus 5 is", "<s>3 plus 5 is", "<s> 3 plus 5 is"])
def test_there_is_exactly_one_bos_where_the_tokenizer_adds_one(text):
    item = tokenize_prompts([prompt(text, "8")], word_level(CORPUS))[0]
    assert item.input_ids.count(1) == 1
    assert item.input_ids[0] == 1
    assert len(item.input_ids) == 6
    assert item.prompt.text == text


def test_where_the_tokenizer_adds_no_bos_the_text_is_taken_as_it_is():
    tokenizer = word_level(CORPUS, adds_bos=False)
    assert 1 not in tokenize_prompts([prompt("3 plus 5 is", "8")], tokenizer)[0].input_ids
    assert tokenize_prompts([prompt("<s>3 plus 5 is", "8")], tokenizer)[0].input_ids.count(1) == 1


def test_a_special_token_written_in_a_text_is_read_as_such():
    tokenizer = gpt2_like(MERGES)
    item = tokenize_prompts([prompt("<|endoftext|>3 plus 5 is", "8")], tokenizer)[0]
    assert item.input_ids.count(tokenizer.bos_token_id) == 1


def test_an_eos_that_the_tokenizer_adds_is_left_out():
    plain, closing = word_level(CORPUS), word_level(CORPUS, adds_eos=True)
    assert closing("3 plus 5 is 8").input_ids[-1] == closing.eos_token_id
    assert tokenize_prompts([addition()], closing)[0].input_ids == tokenize_prompts([addition()], plain)[0].input_ids


# carry classes


@pytest.mark.parametrize(
    ("operation", "a", "b", "answer", "classes"),
    [
        ("add", 15, 32, 47, [M, M]),
        ("add", 15, 37, 52, [C, M]),
        ("add", 95, 37, 132, [C, C, M]),  # the 1 comes from the tens column, which received a carry
        ("add", 52, 71, 123, [M, M, M]),  # the 1 comes from the tens column, which received none
        ("add", 5, 7, 12, [M, M]),  # the 1 comes from the unit column
        ("add", 999, 1, 1000, [C, C, C, M]),
        ("add", 905, 7, 912, [M, C, M]),
        ("sub", 52, 37, 15, [C, M]),
        ("sub", 57, 32, 25, [M, M]),
        ("sub", 100, 1, 99, [C, M]),
        ("sub", 17, 8, 9, [M]),
        ("sub", 3, 5, -2, [M]),  # columns of 5 - 3
        ("sub", 13, 45, -32, [M, M]),
        ("sub", 18, 45, -27, [C, M]),  # columns of 45 - 18
        ("sub", -15, 37, -52, [C, M]),  # columns of 15 + 37
        ("add", -18, 45, 27, [C, M]),
        ("sub", 7, 7, 0, [M]),
        ("mul", 12, 12, 144, [C, C, M]),
        ("mul", 2, 3, 6, [M]),
        ("div", 144, 12, 12, [C, M]),
    ],
)
def test_carry_classes_worked_by_hand(operation, a, b, answer, classes):
    assert digit_classes(operation, str(a), str(b), str(answer)) == tuple(classes)


@pytest.mark.parametrize(
    ("operation", "a", "b", "answer"),
    [
        (None, "1", "2", "3"),
        ("pow", "2", "3", "8"),
        ("add", None, "2", "3"),
        ("add", "1.5", "2", "3.5"),
        ("add", "one", "2", "3"),
        ("add", "1", "2", "4"),  # a wrong sum has no columns
        ("add", "1", "2", "03"),
    ],
)
def test_carry_classes_are_none_where_columns_are_unknown(operation, a, b, answer):
    assert digit_classes(operation, a, b, answer) is None


def test_merged_tokens_take_the_common_class_of_their_columns():
    tokenizer = gpt2_like(MERGES)
    same = prompt("15 + 32 =", "47", operation="add", operand_a="15", operand_b="32")
    assert scored(same, tokenizer) == [(" 47", "digit", M)]
    product = prompt("12 * 12 =", "144", operation="mul", operand_a="12", operand_b="12")
    assert scored(product, tokenizer) == [(" 144", "digit", "mixed")]
    assert [carry for _, _, carry in scored(product, word_level(["=", "*"]))] == [C, C, M]


# refusals


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            prompt("3-5=", "-2", separator=""),
            "prompt 'p': the answer '-2' begins inside the token '=-', which also holds '=' of the text; "
            "set the field separator (it is '') so that the answer begins a token, for example ' '",
        ),
        (prompt(" ", "8"), "prompt 'p': the text is empty"),
        (
            prompt("3 plus 5 is", " "),
            "prompt 'p': the answer ' ' has no token that can be scored; write an answer with a digit or a word",
        ),
        (
            prompt("3 plus 5 is", ""),
            "prompt 'p': the answer '' has no token that can be scored; "
            "write an answer that the tokenizer does not drop",
        ),
    ],
)
def test_prompts_that_cannot_be_aligned_are_named(item, message):
    tokenizer = gpt2_like(["=-"] * 50 + CORPUS)
    with pytest.raises(UserError) as error:
        tokenize_prompts([item], tokenizer)
    assert str(error.value) == message


def test_an_answer_that_the_tokenizer_drops_is_refused():
    with pytest.raises(UserError) as error:
        tokenize_prompts([prompt("3 plus 5 is", "\t")], word_level(CORPUS))
    assert str(error.value) == (
        "prompt 'p': the answer '\\t' has no token that can be scored; write an answer that the tokenizer does not drop"
    )


@pytest.mark.parametrize(("text", "answer"), [("3 bananas is", "8"), ("3 plus 5 is", "bananas")])
def test_words_the_tokenizer_does_not_know_are_refused(text, answer):
    with pytest.raises(UserError) as error:
        tokenize_prompts([prompt(text, answer)], word_level(CORPUS))
    assert str(error.value) == (
        "prompt 'p': the tokenizer does not know 'bananas'; use other words, or a model whose tokenizer knows them"
    )


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(UserError) as error:
        tokenize_prompts([addition()], SlowTokenizer())
    assert str(error.value) == (
        "SlowTokenizer is a slow tokenizer, which does not say which characters a token covers; "
        "save the model with a tokenizer.json (a fast tokenizer)"
    )


def test_no_prompts_and_repeated_ids_are_refused():
    tokenizer = word_level(CORPUS)
    with pytest.raises(UserError, match=r"^there are no prompts to tokenize$"):
        tokenize_prompts([], tokenizer)
    with pytest.raises(UserError, match=r"^prompt_id 'p' is used twice; give each prompt its own$"):
        tokenize_prompts([addition(), addition()], tokenizer)


# counterfactuals


@pytest.mark.parametrize("build", [word_level, llama_like, gpt2_like])
def test_a_counterfactual_is_tokenized_with_the_same_answer(build):
    tokenizer = build(MERGES)
    item = tokenize_prompts([addition(counterfactual="15 < 37 =")], tokenizer)[0]
    assert item.counterfactual_ids is not None
    assert len(item.counterfactual_ids) == len(item.input_ids)
    assert item.counterfactual_ids[item.end + 1 :] == item.input_ids[item.end + 1 :]
    assert item.counterfactual_ids != item.input_ids
    assert tokenizer.decode(item.counterfactual_ids, skip_special_tokens=True).replace(" ", "") == "15<37=52"


def test_without_a_counterfactual_there_are_no_counterfactual_ids():
    first, second = addition(counterfactual="15 < 37 ="), replace(addition(), prompt_id="q")
    tokenized = tokenize_prompts([second, first], word_level(CORPUS))
    assert [item.counterfactual_ids is None for item in tokenized] == [True, False]


def test_a_counterfactual_with_another_token_count_is_refused_with_both():
    with pytest.raises(UserError) as error:
        tokenize_prompts([addition(counterfactual="15 < < 37 =")], word_level(CORPUS))
    assert str(error.value) == (
        "prompt 'p': the counterfactual does not align: 9 tokens ['<s>', '1', '5', '+', '3', '7', '=', '5', '2'] "
        "against 10 tokens ['<s>', '1', '5', '<', '<', '3', '7', '=', '5', '2']; "
        "write a counterfactual with as many tokens as the text, for example by replacing words with others of as many "
        "tokens"
    )


# what is stored


def test_token_columns_have_one_row_per_scored_token():
    columns = token_columns(tokenize_prompts([addition()], word_level(CORPUS)))
    assert [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)] == [
        {"prompt_id": "p", "position": 0, "token_id": 8, "token": "5", "kind": "digit", "carry_class": C},
        {"prompt_id": "p", "position": 1, "token_id": 5, "token": "2", "kind": "digit", "carry_class": M},
    ]


def test_the_fingerprint_depends_on_every_field_and_on_the_tokens():
    tokenizer = word_level(CORPUS)
    original = addition(template="t")

    def fingerprint(item, tokenizer=tokenizer):
        return prompts_fingerprint(tokenize_prompts([item], tokenizer))

    variants = [replace(original, prompt_id="q"), replace(original, template="u"), replace(original, operation=None)]
    variants += [replace(original, counterfactual="15 < 37 ="), replace(original, separator="  ")]
    prints = [fingerprint(original), *(fingerprint(item) for item in variants)]
    prints.append(fingerprint(original, word_level(CORPUS, adds_bos=False)))
    assert len(set(prints)) == len(prints)
    assert fingerprint(original) == prints[0]
    assert len(prints[0]) == 16
    assert int(prints[0], 16) >= 0


@pytest.mark.slow
def test_the_whole_two_digit_set_is_tokenized_on_every_kind():
    prompts = prompt_set("two_digit")
    texts = [p.text for p in prompts]
    for tokenizer in (word_level(texts), llama_like(texts)):
        tokens = [t for item in tokenize_prompts(prompts, tokenizer) for t in item.scored]
        assert len(tokens) == sum(len(p.answer) for p in prompts)
        assert {t.kind for t in tokens} == {"digit"}
        assert {t.carry_class for t in tokens} == {M, C}
    merged = tokenize_prompts(prompts, gpt2_like([f"{p.text} {p.answer}" for p in prompts], 1200))
    joined = ["".join(t.token for t in item.scored).strip() for item in merged]
    assert joined == [p.answer for p in prompts]


def test_a_tokenizer_without_bos_and_unknown_token_is_fine():
    tokenizer = Tokenizer(models.WordLevel({"3": 0, "is": 1, "8": 2, "=": 3}, unk_token="="))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    item = tokenize_prompts([prompt("3 is", "8")], PreTrainedTokenizerFast(tokenizer_object=tokenizer))[0]
    assert (item.input_ids, item.end) == ((0, 1, 2), 1)
