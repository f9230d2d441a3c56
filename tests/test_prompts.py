"""The arithmetic prompt sets: counts of method.md section 1, ranges, sampling, names, number words."""

import itertools
from collections import Counter, defaultdict
from operator import add, mul, sub, truediv

import pytest

from mathinterp.errors import UserError
from mathinterp.prompts import PROMPT_SETS, Prompt, even_spread, load_prompts, prompt_set
from mathinterp.prompts.alignment import tokenize_prompts
from mathinterp.prompts.arithmetic import arithmetic_prompts
from mathinterp.prompts.number_words import number_words
from mathinterp.prompts.templates import NO_SPACES, OPERATIONS, PAPER_A, PAPER_B, SIGNS, SYMBOLS
from tests.prompt_tokenizers import word_level


def numbers_of(prompt: Prompt) -> tuple[int, int, int]:
    return int(str(prompt.operand_a)), int(str(prompt.operand_b)), int(prompt.answer)


@pytest.mark.parametrize("name", ["one_digit", "one_digit_equals"])
def test_one_digit_sets_have_the_papers_digit_token_counts(name):
    prompts = prompt_set(name)
    tokenizer = word_level([prompt.text for prompt in prompts])
    tokens = Counter(item.prompt.operation for item in tokenize_prompts(prompts, tokenizer) for _ in item.scored)
    assert tokens == {"add": 145, "sub": 100, "mul": 158, "div": 90}


@pytest.mark.parametrize("name", ["one_digit", "one_digit_equals"])
def test_one_digit_sets_are_exhaustive(name):
    pairs = defaultdict(set)
    for prompt in prompt_set(name):
        a, b, answer = numbers_of(prompt)
        pairs[prompt.operation].add(
            {"add": (a, b), "mul": (a, b), "sub": (answer, b), "div": (answer, b)}[prompt.operation]
        )
    every = {(a, b) for a in range(10) for b in range(10)}
    assert pairs["add"] == pairs["mul"] == pairs["sub"] == every
    assert pairs["div"] == {(a, b) for a, b in every if b != 0}


@pytest.mark.parametrize("template", range(4))
def test_any_single_template_of_paper_a_gives_the_same_counts(template):
    templates = {operation: [PAPER_A[operation][template]] for operation in OPERATIONS}
    prompts = arithmetic_prompts(1, templates, per_template=None, subtraction="inverse")
    digits = Counter()
    for prompt in prompts:
        digits[prompt.operation] += len(prompt.answer)
    assert digits == {"add": 145, "sub": 100, "mul": 158, "div": 90}


def test_two_digit_set_is_4_operations_by_4_templates_by_100_without_repeats():
    prompts = prompt_set("two_digit")
    groups = defaultdict(list)
    for prompt in prompts:
        groups[prompt.operation, prompt.template].append((prompt.operand_a, prompt.operand_b))
    assert len(prompts) == 1600
    assert len(groups) == 16
    assert all(len(pairs) == 100 == len(set(pairs)) for pairs in groups.values())
    assert len({prompt.prompt_id for prompt in prompts}) == 1600


def test_two_digit_sentences_are_the_published_ones():
    texts = {(p.operation, p.template): p for p in prompt_set("two_digit")}
    p = texts["sub", "difference_between"]
    assert p.text == f"The difference between {p.operand_a} and {p.operand_b} is"
    p = texts["add", "sum_of"]
    assert p.text == f"The sum of {p.operand_a} and {p.operand_b} is"
    p = texts["mul", "product_of"]
    assert p.text == f"The product of {p.operand_a} and {p.operand_b} is"
    p = texts["div", "ratio_of"]
    assert p.text == f"The ratio of {p.operand_a} and {p.operand_b} is"
    p = texts["div", "question"]
    assert p.text == f"Q: What is {p.operand_a} divides {p.operand_b}? A:"
    p = texts["mul", "words"]
    assert p.text == f"{p.operand_a} times {p.operand_b} is"
    p = texts["sub", "symbols"]
    assert p.text == f"{p.operand_a} - {p.operand_b} ="
    assert {p.separator for p in texts.values()} == {" "}


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_operands_stay_in_range_and_answers_are_true(digits):
    operands = {1: range(0, 10), 2: range(10, 100), 3: range(100, 1000)}[digits]
    for prompt in arithmetic_prompts(digits, PAPER_A, per_template=40, seed=3):
        a, b, answer = numbers_of(prompt)
        assert b in operands
        if prompt.operation == "div":
            assert answer in operands
            assert a == answer * b
        else:
            assert a in operands
            assert answer == {"add": a + b, "sub": a - b, "mul": a * b}[prompt.operation]
        if prompt.operation == "sub":
            assert a >= b


def test_subtraction_options():
    def subtractions(kind):
        prompts = arithmetic_prompts(2, SYMBOLS, operations=["sub"], per_template=500, subtraction=kind, seed=1)
        return [numbers_of(prompt) for prompt in prompts]

    assert min(answer for _, _, answer in subtractions("ordered")) >= 0
    assert all(answer in range(10, 100) and a == answer + b for a, b, answer in subtractions("inverse"))
    signed = subtractions("signed")
    assert all(a in range(10, 100) and b in range(10, 100) and answer == a - b for a, b, answer in signed)
    assert 200 < sum(answer < 0 for _, _, answer in signed) < 300


def test_three_digit_set_has_100_per_operation_and_300_quotient_digits():
    prompts = prompt_set("three_digit")
    assert Counter(p.operation for p in prompts) == dict.fromkeys(OPERATIONS, 100)
    assert [len(p.answer) for p in prompts if p.operation == "div"] == [3] * 100


def test_signed_sets_are_18000_and_2000_disjoint_and_have_negatives():
    train, test = prompt_set("signed_two_digit_train"), prompt_set("signed_two_digit_test", seed=1)
    assert (len(train), len(test)) == (18_000, 2_000)

    def pairs(prompts):
        # inverse division is drawn by (quotient, divisor)
        return {
            (p.operation, *sorted((p.answer if p.operation == "div" else p.operand_a, p.operand_b))) for p in prompts
        }

    assert not pairs(train) & pairs(test)
    assert not {p.text for p in train} & {p.text for p in test}
    for prompts in (train, test):
        assert any(p.answer.startswith("-") and p.text == f"{p.operand_a}-{p.operand_b}=" for p in prompts)
        assert Counter(p.operation for p in prompts) == dict.fromkeys(OPERATIONS, len(prompts) // 4)


def test_number_words_set_writes_operands_and_answers_as_words():
    prompts = prompt_set("two_digit_words")
    assert len(prompts) == 1600
    assert not any(character.isdecimal() for p in prompts for character in p.text + p.answer)
    digits = prompt_set("two_digit")
    assert [p.operand_a for p in prompts] == [number_words(int(str(p.operand_a))) for p in digits]
    assert [p.answer for p in prompts] == [number_words(int(p.answer)) for p in digits]
    assert prompts[0].text == f"The sum of {prompts[0].operand_a} and {prompts[0].operand_b} is"
    assert prompts[0].prompt_id == "add-sum_of_in_words-000"


def test_numbers_both_gives_each_pair_once_in_digits_and_once_in_words():
    prompts = arithmetic_prompts(2, SYMBOLS, operations=["add"], per_template=5, numbers="both")
    assert [p.template for p in prompts] == ["symbols"] * 5 + ["symbols_in_words"] * 5
    assert [number_words(int(str(p.operand_a))) for p in prompts[:5]] == [p.operand_a for p in prompts[5:]]


def test_equals_set_has_no_spaces_and_no_separator():
    prompt = {p.text: p for p in prompt_set("one_digit_equals")}["3+5="]
    assert (prompt.answer, prompt.separator, prompt.template) == ("8", "", "no_spaces")


def test_pairs_set_has_at_least_five_templates_per_operation_in_words_and_symbols():
    texts = defaultdict(set)
    for p in prompt_set("pairs"):
        a, b = f" {p.operand_a} ", f" {p.operand_b} "
        texts[p.operation].add(f" {p.text} ".replace(a, " a ", 1).replace(b, " b ", 1).strip())
    assert all(len(PAPER_B[operation]) >= 5 for operation in OPERATIONS)
    assert {"a plus b is equal to", "a + b is equal to", "a + b ="} <= texts["add"]
    assert {"a divided by b is equal to", "a / b is equal to", "a / b ="} <= texts["div"]


@pytest.mark.slow
def test_operand_grids_ask_every_pair_once_and_fewer_are_a_random_sample():
    sizes = {"add": 10_000, "sub": 5_050, "mul": 10_000, "div": 572}
    for operation, size in sizes.items():
        prompts = prompt_set(f"operands_{operation}")
        pairs = {(int(p.operand_a), int(p.operand_b)) for p in prompts}
        assert len(prompts) == len(pairs) == size
        assert all(p.text == f"{p.operand_a} {SIGNS[operation]} {p.operand_b} =" for p in prompts)
        results = {"add": add, "sub": sub, "mul": mul, "div": truediv}
        assert all(results[operation](int(p.operand_a), int(p.operand_b)) == int(p.answer) for p in prompts)
    few = prompt_set("operands_add", limit=500)
    assert {int(p.operand_b) % 10 for p in few} == {int(p.operand_a) % 10 for p in few} == set(range(10))


@pytest.mark.slow
def test_sets_are_deterministic_in_the_seed():
    for name in PROMPT_SETS:
        assert prompt_set(name, seed=4, limit=200) == prompt_set(name, seed=4, limit=200), name
    assert prompt_set("two_digit", seed=0) != prompt_set("two_digit", seed=1)
    # a published draw must not move from one version to the next
    first = prompt_set("two_digit", seed=0)[0]
    assert (first.prompt_id, first.text, first.answer) == ("add-sum_of-000", "The sum of 38 and 58 is", "96")


def test_a_draw_does_not_depend_on_which_other_operations_and_templates_are_asked_for():
    alone = arithmetic_prompts(2, SYMBOLS, operations=["mul"], seed=7)
    among = [p for p in arithmetic_prompts(2, PAPER_A, seed=7) if (p.operation, p.template) == ("mul", "symbols")]
    assert alone == among


def test_limit_keeps_an_even_spread_over_operations_and_templates():
    prompts = load_prompts("two_digit", limit=80)
    assert set(Counter((p.operation, p.template) for p in prompts).values()) == {5}
    assert Counter(p.operation for p in load_prompts("two_digit", limit=4)) == dict.fromkeys(OPERATIONS, 1)
    counts = Counter(p.operation for p in load_prompts("two_digit", limit=10))
    assert sum(counts.values()) == 10
    assert set(counts.values()) <= {2, 3}
    assert load_prompts("two_digit", limit=80) == prompts
    assert load_prompts("two_digit", limit=5_000) == load_prompts("two_digit")


def test_limit_gives_a_small_groups_surplus_to_the_others_and_spreads_inside_a_group():
    prompts = [Prompt(str(i), "x", "1", operation="add") for i in range(30)]
    prompts += [Prompt(f"s{i}", "x", "1", operation="sub") for i in range(2)]
    chosen = [p.prompt_id for p in even_spread(prompts, 12)]
    assert chosen[-2:] == ["s0", "s1"]
    places = [int(name) for name in chosen[:-2]]
    assert len(places) == 10
    gaps = [b - a for a, b in itertools.pairwise([*places, 30])]
    assert max(gaps) <= 4, "evenly spaced would be 3"


@pytest.mark.parametrize(("operations", "templates"), [(4, 5), (2, 5), (3, 3), (4, 6)])
def test_any_limit_is_even_over_operations_and_within_them_over_templates(operations, templates):
    prompts = [
        Prompt(f"{o}.{t}.{i}", "x", "1", operation=f"o{o}", template=f"t{t}")
        for o, t, i in itertools.product(range(operations), range(templates), range(7))
    ]
    for limit in range(1, len(prompts) + 1):
        chosen = even_spread(prompts, limit)
        assert len(chosen) == limit
        for counts in (
            [sum(p.operation == f"o{o}" for p in chosen) for o in range(operations)],
            *(
                [sum((p.operation, p.template) == (f"o{o}", f"t{t}") for p in chosen) for t in range(templates)]
                for o in range(operations)
            ),
        ):
            assert max(counts) - min(counts) <= 1


def test_a_smaller_limit_takes_some_of_what_a_larger_one_takes():
    sizes = [1, 2, 7, 40, 100, 160, 399, 400, 1_000, 1_600]
    chosen = [{p.prompt_id for p in load_prompts("two_digit", limit=size)} for size in sizes]
    assert [len(names) for names in chosen] == sizes
    assert all(small < large for small, large in itertools.pairwise(chosen))


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_below_one_is_refused(limit):
    with pytest.raises(UserError, match=f"^the limit on prompts must be at least 1, not {limit}$"):
        load_prompts("two_digit", limit=limit)


def test_unknown_names_list_the_sets():
    sets = ", ".join(PROMPT_SETS)
    with pytest.raises(UserError) as error:
        prompt_set("four_digit")
    assert str(error.value) == f"prompt set 'four_digit' is not known; the sets are {sets}"
    with pytest.raises(UserError) as error:
        load_prompts("four_digit")
    refused = "'four_digit' is neither a prompt file that exists nor a prompt set."
    expected = f"{refused} Did you mean 'two_digit'? The sets are {sets}"
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digits": 4}, "digits 4 is not known; choose one of 1, 2, 3"),
        ({"subtraction": "any"}, "subtraction 'any' is not known; choose one of 'ordered', 'inverse', 'signed'"),
        ({"numbers": "roman"}, "numbers 'roman' is not known; choose one of 'digits', 'words', 'both'"),
        ({"part": "dev"}, "part 'dev' is not known; choose one of None, 'train', 'test'"),
        ({"operations": ["pow"]}, "operation 'pow' is not known; choose one of 'add', 'sub', 'mul', 'div'"),
        ({"per_template": 0}, "0 prompts per template asked of add with 2-digit operands, which allows 1 to 8100"),
        (
            {"per_template": 9000},
            "9000 prompts per template asked of add with 2-digit operands, which allows 1 to 8100",
        ),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UserError) as error:
        arithmetic_prompts(**{"digits": 2, **options})
    assert str(error.value) == message


def test_every_set_has_a_description_and_readable_ids():
    assert set(PROMPT_SETS) >= {
        "one_digit", "two_digit", "three_digit", "two_digit_words", "one_digit_equals",
        "signed_two_digit_train", "signed_two_digit_test", "pairs",
    }  # fmt: skip
    for name, entry in PROMPT_SETS.items():
        assert len(entry.description) > 20
        prompts = entry.build(0)
        assert len({p.prompt_id for p in prompts}) == len(prompts), name
        assert all(p.prompt_id.startswith(f"{p.operation}-{p.template}-") for p in prompts)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"), (12, "twelve"), (20, "twenty"), (34, "thirty-four"), (100, "one hundred"),
        (205, "two hundred five"), (999, "nine hundred ninety-nine"), (1000, "one thousand"),
        (9801, "nine thousand eight hundred one"), (-17, "minus seventeen"),
    ],
)  # fmt: skip
def test_number_words(number, words):
    assert number_words(number) == words


def test_number_words_are_distinct_and_end_at_9999():
    assert len({number_words(n) for n in range(-9_999, 10_000)}) == 19_999
    with pytest.raises(ValueError, match="10000 is outside -9999 to 9999"):
        number_words(10_000)


def test_no_spaces_templates_cover_every_operation():
    assert {operation: NO_SPACES[operation][0].fill("3", "5") for operation in OPERATIONS} == {
        "add": "3+5=", "sub": "3-5=", "mul": "3*5=", "div": "3/5=",
    }  # fmt: skip
