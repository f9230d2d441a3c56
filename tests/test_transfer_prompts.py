"""Transfer sets and pairs: ranges, exact answers, carries, alignment on every kind of tokenizer, and clear refusals."""

import json
from collections import Counter, defaultdict
from fractions import Fraction

import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.prompts import PROMPT_SETS, WORD_PROBLEMS, Prompt, prompt_set, read_prompts
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.pairs import NEUTRAL_WORDS, first_digit, with_counterfactuals
from mathinterp.prompts.templates import OPERATIONS, SIGNS, WORDS
from mathinterp.prompts.transfer import NOUNS
from tests.prompt_tokenizers import gpt2_like, llama_like, word_level

KINDS = [word_level, llama_like, gpt2_like]
EVERY_NEUTRAL = [f" {word} " for lists in NEUTRAL_WORDS.values() for words in lists.values() for word in words]


def tokenizer_for(build, prompts):
    return build([p.text for p in prompts] + [p.answer for p in prompts] + EVERY_NEUTRAL)


def digits(text: str | None) -> int:
    return len(str(text))


@pytest.mark.parametrize("name", ["multi_digit", "rationals"])
@pytest.mark.parametrize("seed", [0, 5])
def test_answers_are_exact_and_there_are_100_different_tasks_an_operation(name, seed):
    prompts = prompt_set(name, seed=seed)
    assert Counter(p.operation for p in prompts) == dict.fromkeys(OPERATIONS, 100)
    groups = defaultdict(set)
    for p in prompts:
        a, b = Fraction(p.operand_a), Fraction(p.operand_b)
        results = {"add": a + b, "sub": a - b, "mul": a * b, "div": a / b}
        assert Fraction(p.answer) == results[p.operation]
        assert Fraction(p.answer) >= 0
        groups[p.operation, p.template].add((p.operand_a, p.operand_b))
    assert {len(pairs) for pairs in groups.values()} == {50}
    assert len(groups) == 8


def test_multi_digit_has_integers_of_every_length_from_one_to_five():
    prompts = prompt_set("multi_digit")
    lengths = defaultdict(set)
    for p in prompts:
        lengths[p.operation] |= {digits(p.operand_a), digits(p.operand_b)}
    assert lengths["add"] == lengths["sub"] == {4, 5}
    assert lengths["mul"] == {1, 3, 4}
    assert lengths["div"] == {1, 3, 4, 5}
    assert {digits(p.answer) for p in prompts if p.operation == "div"} == {3, 4}
    assert max(digits(p.answer) for p in prompts) == 6  # sums of two five-digit numbers


def test_rationals_have_one_decimal_that_is_never_zero():
    for p in prompt_set("rationals"):
        numbers = [p.operand_a, p.answer] if p.operation in ("mul", "div") else [p.operand_a, p.operand_b, p.answer]
        for number in numbers:
            assert number[-2] == "."
            assert number[-1] in "123456789"
            assert number == str(float(number))
        if p.operation in ("mul", "div"):
            assert p.operand_b in list("23456789")


@pytest.mark.parametrize("name", ["multi_digit", "rationals"])
def test_sentences_are_in_words_and_in_signs(name):
    ending = {"multi_digit": "is equal to", "rationals": "equals to"}[name]
    for p in prompt_set(name):
        in_words = f"{p.operand_a} {WORDS[p.operation]} {p.operand_b} {ending}"
        in_signs = f"{p.operand_a} {SIGNS[p.operation]} {p.operand_b} ="
        assert p.text == (in_signs if p.template == "symbols" else in_words)
        assert p.separator == " "


def test_year_spans_ask_for_the_last_digit_and_half_of_them_carry():
    prompts = prompt_set("year_spans")
    assert len(prompts) == 200 == len({p.text for p in prompts})
    carries = Counter()
    for p in prompts:
        noun = p.template.removesuffix("_lasted")
        span, start = int(p.operand_a), int(p.operand_b)
        assert 2 <= span <= 9
        assert p.text + p.separator + p.answer == f"The {noun} lasted {span} years from {start} to {start + span}"
        assert digits(p.answer) == 1
        assert (p.separator, p.operation) == ("", "add")
        carries[noun, start % 10 + span > 9] += 1
    assert carries == {(noun, carry): 10 for noun in NOUNS for carry in (False, True)}
    assert {p.answer for p in prompts} == set("0123456789")


def test_a_small_part_of_the_year_spans_has_carries_too():
    limited = prompt_set("year_spans", limit=20)
    carries = [int(p.operand_b) % 10 + int(p.operand_a) > 9 for p in limited]
    assert len({p.template for p in limited}) == 10
    assert 4 <= sum(carries) <= 16


@pytest.mark.parametrize("name", ["multi_digit", "rationals", "year_spans"])
def test_the_seed_changes_the_operands_and_nothing_else(name):
    first, second = prompt_set(name, seed=0), prompt_set(name, seed=1)
    assert [p.prompt_id for p in first] == [p.prompt_id for p in second]
    assert sum(p.text == q.text for p, q in zip(first, second, strict=True)) < 0.1 * len(first)


def test_a_published_draw_does_not_move():
    first = {name: prompt_set(name)[0] for name in ("multi_digit", "rationals", "year_spans")}
    assert {name: (p.text, p.answer) for name, p in first.items()} == {
        "multi_digit": ("85936 plus 72158 is equal to", "158094"),
        "rationals": ("3.4 plus 5.7 equals to", "9.1"),
        "year_spans": ("The war lasted 3 years from 1333 to 133", "6"),
    }


@pytest.mark.parametrize("name", ["pairs", "multi_digit", "rationals"])
@pytest.mark.parametrize("build", KINDS)
def test_pairs_align_on_every_kind_of_tokenizer(name, build):
    prompts = prompt_set(name, limit=160)
    tokenizer = tokenizer_for(build, prompts)
    tokenized = tokenize_prompts(with_counterfactuals(prompts, tokenizer), tokenizer)
    for item in tokenized:
        changed = [
            i for i, (x, y) in enumerate(zip(item.input_ids, item.counterfactual_ids, strict=True)) if x != y
        ]  # strict: unequal lengths raise
        assert len(changed) >= 1
        assert max(changed) <= item.end
        assert str(item.prompt.operand_a) in item.prompt.counterfactual
        token = first_digit(item)
        assert token.index > item.end
        assert any(character.isdecimal() for character in token.token)


@pytest.mark.parametrize("build", [word_level, llama_like])
def test_year_spans_score_one_digit_where_digits_are_tokens(build):
    prompts = prompt_set("year_spans", limit=40)
    for item in tokenize_prompts(prompts, tokenizer_for(build, prompts)):
        assert [token.token for token in item.scored] == [item.prompt.answer]
        assert item.scored[0].index == item.end + 1


def test_year_spans_are_refused_where_a_number_is_one_token():
    prompts = [Prompt("y", "The war lasted 5 years from 1723 to 172", "8", operation="add", separator="")]
    tokenizer = gpt2_like([" 1728 1728"] * 50, 270)
    with pytest.raises(UserError, match=r"prompt 'y': the answer '8' begins inside the token ' ?1728'"):
        tokenize_prompts(prompts, tokenizer)


def test_the_point_is_read_but_not_scored():
    prompts = [p for p in prompt_set("rationals") if p.template == "symbols"]
    for item in tokenize_prompts(prompts, tokenizer_for(llama_like, prompts)):
        assert "".join(token.token for token in item.scored) == item.prompt.answer.replace(".", "")


@pytest.fixture(scope="module")
def bundled():
    return resolve(ModelSpec("bundled", None, "auto", False)).tokenizer


@pytest.mark.parametrize("name", ["multi_digit", "rationals"])
def test_the_bundled_model_reads_integers_and_decimals_and_their_pairs(name, bundled):
    prompts = with_counterfactuals(prompt_set(name), bundled)
    assert len(tokenize_prompts(prompts, bundled)) == 400


def test_the_bundled_model_says_that_it_does_not_know_the_words_of_year_spans(bundled):
    with pytest.raises(UserError) as error:
        tokenize_prompts(prompt_set("year_spans"), bundled)
    assert str(error.value) == (
        "prompt 'add-war_lasted-000': the tokenizer does not know 'war'; "
        "use other words, or a model whose tokenizer knows them"
    )


def test_year_spans_have_no_operator_to_make_neutral():
    with pytest.raises(UserError, match=r"^prompt 'add-war_lasted-000': none of the operators plus, .* is in the text"):
        with_counterfactuals(prompt_set("year_spans"), tokenizer_for(llama_like, prompt_set("year_spans")))


def written(tmp_path, **fields):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt_id": "mine", "text": "3 plus 5 is", "answer": 8, **fields}) + "\n")
    return read_prompts(path)


@pytest.mark.parametrize("build", KINDS)
def test_own_pairs_are_kept_as_they_are_written(tmp_path, build):
    prompts = written(tmp_path, text="3 joined to 5 makes", counterfactual="3 hidden by 5 makes")  # of no operation
    tokenizer = build([f" {word} " for word in ["joined", "to", "makes", "hidden", "by"]] * 20)
    assert with_counterfactuals(prompts, tokenizer) == prompts
    (item,) = tokenize_prompts(prompts, tokenizer)
    assert item.counterfactual_ids != item.input_ids
    assert len(item.counterfactual_ids) == len(item.input_ids)
    assert first_digit(item).token.strip() == "8"


@pytest.mark.parametrize("build", KINDS)
def test_a_pair_of_unequal_token_count_is_refused_by_name(tmp_path, build):
    prompts = written(tmp_path, operation="add", counterfactual="3 nothing at all 5 is")
    tokenizer = build([" plus is nothing at all "] * 20)
    with pytest.raises(UserError, match=r"^prompt 'mine': the counterfactual does not align: \d+ tokens"):
        tokenize_prompts(with_counterfactuals(prompts, tokenizer), tokenizer)


@pytest.mark.parametrize("build", KINDS)
def test_an_operator_that_is_not_there_is_refused_by_name(tmp_path, build):
    prompts = written(tmp_path, operation="sub")
    with pytest.raises(
        UserError, match=r"^prompt 'mine': none of the operators minus, .* is in the text '3 plus 5 is'"
    ):
        with_counterfactuals(prompts, tokenizer_for(build, prompts))


@pytest.mark.parametrize("build", KINDS)
def test_an_answer_without_a_digit_is_scored_on_its_first_token(tmp_path, build):
    prompts = written(tmp_path, answer="eight")
    (item,) = tokenize_prompts(prompts, tokenizer_for(build, prompts))
    assert first_digit(item) == item.scored[0]
    assert item.scored[0].kind == "text"


def test_the_first_digit_comes_after_the_sign(tmp_path):
    prompts = written(tmp_path, text="3 - 5 =", answer=-2)
    (item,) = tokenize_prompts(prompts, tokenizer_for(llama_like, prompts))
    assert [token.kind for token in item.scored] == ["sign", "digit"]
    assert first_digit(item) == item.scored[1]


@pytest.mark.slow
def test_the_list_shows_every_set_with_size_and_example():
    shown = CliRunner().invoke(main, ["prompts", "--list", "--json"])
    rows = {row["name"]: row for row in json.loads(shown.stdout)}
    assert list(rows) == [*PROMPT_SETS, *(f"{name}:PATH" for name in WORD_PROBLEMS)]
    assert (rows["year_spans"]["prompts"], rows["signed_two_digit_train"]["prompts"]) == (200, 18_000)
    for name in PROMPT_SETS:
        first = prompt_set(name, limit=1)[0]
        assert (rows[name]["example"], rows[name]["answer"]) == (first.text, first.answer)
    table = CliRunner().invoke(main, ["prompts", "--list"]).stdout
    assert "The war lasted 3 years from 1333 to 133" in table
    assert "svamp:PATH" in table
