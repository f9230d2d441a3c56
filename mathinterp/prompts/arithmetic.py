"""The arithmetic prompt sets of papers A and B: operands, answers, sentences, and the names of the sets.

Knows operand ranges and how an answer is computed; knows nothing about tokenizers or models.
Everything is deterministic in the seed: a draw depends on (seed, operation, template, operand range) alone.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import add, floordiv, mul, sub
from typing import Literal

from mathinterp.errors import UserError
from mathinterp.prompts.number_words import number_words
from mathinterp.prompts.operand_pairs import operand_pairs
from mathinterp.prompts.prompt import Prompt
from mathinterp.prompts.spread import even_spread
from mathinterp.prompts.templates import COMPACT, NO_SPACES, OPERATIONS, PAPER_A, PAPER_B, SIGNS, SYMBOLS, Template
from mathinterp.prompts.transfer import multi_digit, rationals, year_spans

Subtraction = Literal["ordered", "inverse", "signed"]
Numbers = Literal["digits", "words", "both"]
Part = Literal["train", "test"]

RANGES = {1: range(0, 10), 2: range(10, 100), 3: range(100, 1000)}  # digits -> operands
TEST_SHARE = 10  # one operand pair in ten is held out for testing, under every template


@dataclass(frozen=True)
class Task:
    """Two operands and their result, operand_a (operation) operand_b = answer."""

    operand_a: int
    operand_b: int
    answer: int


def arithmetic_prompts(
    digits: int,
    templates: Mapping[str, Sequence[Template]] = PAPER_A,
    *,
    operations: Sequence[str] = OPERATIONS,
    per_template: int | None = 100,
    subtraction: Subtraction = "ordered",
    numbers: Numbers = "digits",
    part: Part | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """Prompts of every (operation, template), sampled without replacement (method.md section 1; paper A, sec. 3).

    Divisions ask (n1 * n2) / n2.

    Args:
        digits: 1 (operands 0..9), 2 (10..99) or 3 (100..999).
        templates: operation -> its templates.
        per_template: prompts for each (operation, template); None = every operand pair there is, in order.
        subtraction: "ordered" draws n1 >= n2; "inverse" asks (n1 + n2) - n2; "signed" draws freely.
        numbers: "digits", "words" (twelve), or "both": each pair once in digits and once in words, the latter
            under the template's name with ``_in_words``.
        part: "train" or "test" draws from disjoint operand pairs; n1, n2 and n2, n1 are on the same side, and the
            sides are the same for every seed.
    Raises:
        UserError: an unknown option, or more prompts asked for than there are operand pairs.
    """
    _check("digits", digits, RANGES)
    _check("subtraction", subtraction, ("ordered", "inverse", "signed"))
    _check("numbers", numbers, ("digits", "words", "both"))
    _check("part", part, (None, "train", "test"))
    prompts = []
    for operation in operations:
        _check("operation", operation, templates)
        pool = _pool(operation, digits, subtraction)
        if part is not None:
            pool = _part_of(pool, digits, operation, part)
        for template in templates[operation]:
            rng = random.Random(f"{seed}/{operation}/{template.name}/{digits}/{part}")
            tasks = [
                _task(index, operation, digits, subtraction)
                for index in _draw(pool, per_template, rng, f"{operation} with {digits}-digit operands")
            ]
            if numbers in ("digits", "both"):
                prompts += _sentences(operation, template, template.name, tasks, str)
            if numbers in ("words", "both"):
                prompts += _sentences(operation, template, f"{template.name}_in_words", tasks, number_words)
    return prompts


def _check(option: str, value: object, allowed: Iterable[object]) -> None:
    if value not in allowed:
        raise UserError(f"{option} {value!r} is not known; choose one of {', '.join(repr(v) for v in allowed)}")


@lru_cache(maxsize=32)
def _pool(operation: str, digits: int, subtraction: Subtraction) -> Sequence[int]:
    """Numbers of the admissible operand pairs; pair i is (i // n, i % n) counted from the range's start."""
    operands = RANGES[digits]
    n = len(operands)
    every = range(n * n)
    if operation == "sub" and subtraction == "ordered":
        return [i for i in every if i // n >= i % n]
    if operation == "div":
        return [i for i in every if operands[i % n] != 0]
    return every


def _part_of(pool: Sequence[int], digits: int, operation: str, part: Part) -> list[int]:
    n = len(RANGES[digits])
    unordered = [i for i in range(n * n) if i // n <= i % n]
    held_out = set(random.Random(f"{operation}/{digits}/held out").sample(unordered, len(unordered) // TEST_SHARE))

    def is_test(i: int) -> bool:
        first, second = sorted(divmod(i, n))
        return first * n + second in held_out

    return [i for i in pool if is_test(i) == (part == "test")]


def _draw(pool: Sequence[int], count: int | None, rng: random.Random, what: str) -> Sequence[int]:
    if count is None:
        return pool
    if not 1 <= count <= len(pool):
        raise UserError(f"{count} prompts per template asked of {what}, which allows 1 to {len(pool)}")
    return rng.sample(pool, count)


def _task(index: int, operation: str, digits: int, subtraction: Subtraction) -> Task:
    operands = RANGES[digits]
    first, second = (operands[i] for i in divmod(index, len(operands)))
    if operation == "add":
        return Task(first, second, first + second)
    if operation == "mul":
        return Task(first, second, first * second)
    if operation == "sub":
        return Task(first + second, second, first) if subtraction == "inverse" else Task(first, second, first - second)
    return Task(first * second, second, first)


def _sentences(
    operation: str, template: Template, name: str, tasks: Sequence[Task], write: Callable[[int], str]
) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=f"{operation}-{name}-{i:03d}",
            text=template.fill(write(task.operand_a), write(task.operand_b)),
            answer=write(task.answer),
            operation=operation,
            operand_a=write(task.operand_a),
            operand_b=write(task.operand_b),
            template=name,
            separator=template.separator,
        )
        for i, task in enumerate(tasks)
    ]


def operand_grid(operation: str, seed: int = 0) -> list[Prompt]:
    """Every pair of operands from 0 to 99, "n1 + n2 =": of sub those with n1 >= n2, of div those that divide exactly.

    In a random order, so that fewer are a random sample: evenly spaced ones would share remainders.
    """
    pairs = [(a, b) for a in range(100) for b in range(100)]
    if operation == "sub":
        pairs = [(a, b) for a, b in pairs if a >= b]
    elif operation == "div":
        pairs = [(a, b) for a, b in pairs if b and a % b == 0]
    answer: dict[str, Callable[[int, int], int]] = {"add": add, "sub": sub, "mul": mul, "div": floordiv}
    (template,) = SYMBOLS[operation]
    tasks = [Task(a, b, answer[operation](a, b)) for a, b in pairs]
    prompts = _sentences(operation, template, template.name, tasks, str)
    random.Random(f"{seed}/{operation}/grid").shuffle(prompts)
    return prompts


@dataclass(frozen=True)
class PromptSet:
    """A named prompt set: what it holds, and how to build it from a seed."""

    description: str
    build: Callable[[int], list[Prompt]]


_GRIDS = {
    "add": "all 10,000 pairs of operands 0..99",
    "sub": "the 5,050 pairs of operands 0..99 with n1 >= n2",
    "mul": "all 10,000 pairs of operands 0..99",
    "div": "the 572 pairs of operands 0..99 that divide exactly",
}
_TUNING_TEMPLATES = {op: PAPER_A[op] + COMPACT[op] for op in OPERATIONS}


def _signed_two_digit(part: Part, per_template: int) -> Callable[[int], list[Prompt]]:
    return lambda seed: arithmetic_prompts(
        2, _TUNING_TEMPLATES, per_template=per_template, subtraction="signed", part=part, seed=seed
    )


def _one_digit_sums(seed: int) -> list[Prompt]:
    return arithmetic_prompts(1, operations=("add", "sub"), per_template=None, seed=seed)


PROMPT_SETS: dict[str, PromptSet] = {
    "one_digit": PromptSet(
        'every one-digit task, "n1 + n2 =": answers have 145 (+), 100 (-, inverse of +), 158 (*), 90 (/) digits',
        lambda seed: arithmetic_prompts(1, SYMBOLS, per_template=None, subtraction="inverse", seed=seed),
    ),
    "one_digit_equals": PromptSet(
        'every one-digit task written without spaces, "3+5="',
        lambda seed: arithmetic_prompts(1, NO_SPACES, per_template=None, subtraction="inverse", seed=seed),
    ),
    "two_digit": PromptSet(
        "paper A's 1,600 sentences: 4 operations x 4 templates x 100 two-digit operand pairs",
        lambda seed: arithmetic_prompts(2, seed=seed),
    ),
    "two_digit_words": PromptSet(
        'the same with numbers as words, "The sum of twelve and thirty-four is"',
        lambda seed: arithmetic_prompts(2, numbers="words", seed=seed),
    ),
    "three_digit": PromptSet(
        '100 three-digit tasks per operation, "n1 + n2 ="; quotients have exactly three digits',
        lambda seed: arithmetic_prompts(3, SYMBOLS, seed=seed),
    ),
    "signed_two_digit_train": PromptSet(
        "18,000 two-digit sentences for tuning, differences may be negative (paper A, sec. 5)",
        _signed_two_digit("train", 900),
    ),
    "signed_two_digit_test": PromptSet(
        "2,000 two-digit sentences with operand pairs that signed_two_digit_train never shows",
        _signed_two_digit("test", 100),
    ),
    "pairs": PromptSet(
        "paper B's sentences: 4 operations x 8 templates x 50 two-digit operand pairs, for neutral-operator pairs",
        lambda seed: arithmetic_prompts(2, PAPER_B, per_template=50, seed=seed),
    ),
    "operand_pairs": PromptSet(
        "the sentences of two_digit, each with another one's operands as counterfactual and its answer as distractor",
        lambda seed: operand_pairs(arithmetic_prompts(2, seed=seed), seed),
    ),
    **{
        f"operands_{operation}": PromptSet(
            f"operand maps: {of}, 'n1 {SIGNS[operation]} n2 ='", partial(operand_grid, operation)
        )
        for operation, of in _GRIDS.items()
    },
    "one_token_pairs": PromptSet(
        "one-digit sums and differences with answers of one digit, paired as operand_pairs: MIB's form where digits are"
        " split",
        lambda seed: operand_pairs([p for p in _one_digit_sums(seed) if len(p.answer) == 1], seed),
    ),
    "multi_digit": PromptSet("transfer: 100 tasks per operation on integers of one to five digits", multi_digit),
    "rationals": PromptSet("transfer: 100 tasks per operation on decimals with one place", rationals),
    "year_spans": PromptSet(
        "transfer: the last digit of a year, half with a carry; for tokenizers that split digits, without pairs",
        year_spans,
    ),
}


def prompt_set(name: str, *, seed: int = 0, limit: int | None = None) -> list[Prompt]:
    """The prompts of a named set; ``limit`` as in :func:`mathinterp.prompts.spread.even_spread`.

    Raises UserError for an unknown name (listing the sets) or a limit below 1.
    """
    if name not in PROMPT_SETS:
        raise UserError(f"prompt set '{name}' is not known; the sets are {', '.join(PROMPT_SETS)}")
    return even_spread(PROMPT_SETS[name].build(seed), limit)
