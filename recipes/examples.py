"""Fresh arithmetic sentences for training, and the operand pairs that training never sees.

Knows the mixture of operations, operand ranges and templates; knows nothing about tokenizers or models.
A draw depends on the random generator alone, so a batch is a function of its seed.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from functools import cache

from mathinterp.prompts.number_words import number_words
from mathinterp.prompts.pairs import NEUTRAL_WORDS
from mathinterp.prompts.prompt import Prompt
from mathinterp.prompts.templates import NO_SPACES, OPERATIONS, PAPER_A, PAPER_B, Template

HELD_OUT_SHARE = 20  # one operand pair in twenty is kept from training
UNKNOWN = "unknown"  # the answer to a sentence whose operator word is neutral
DIGIT_RANGES = {1: (0, 9), 2: (10, 99), 3: (100, 999)}
INVERSE_SUBTRACTIONS = 0.25  # the share of (n1 + n2) - n2; the rest draws n1 >= n2
SMALL_QUOTIENTS = 0.1  # the share of divisions whose dividend is in the divisor's range; the rest is (n1 * n2) / n2


@dataclass(frozen=True)
class Mixture:
    """Weights of the kinds of samples, and inside a digit count of the operations; they need not add up to 1."""

    one_digit: float
    two_digit: float
    three_digit: float
    uneven: float  # operands of different digit counts
    words: float  # one- and two-digit numbers as words, the answer too
    neutral: float  # a neutral word in the operator's place; the answer is "unknown"

    def weights(self) -> list[float]:
        """The weights in the order of ``KINDS``."""
        return [getattr(self, kind) for kind in KINDS]


KINDS = ("one_digit", "two_digit", "three_digit", "uneven", "words", "neutral")
OPERATION_WEIGHTS = {  # add, sub, mul, div
    1: (1, 1, 1, 1),
    2: (2, 2, 3, 3),
    3: (1, 1, 0, 2),  # three-digit products are not trained
}

BUNDLED_MIXTURE = Mixture(one_digit=0.08, two_digit=0.3, three_digit=0.42, uneven=0.05, words=0.1, neutral=0.05)
ADAPTER_MIXTURE = Mixture(one_digit=0.1, two_digit=0.85, three_digit=0.0, uneven=0.0, words=0.0, neutral=0.05)


def is_held_out(operation: str, a: int, b: int) -> bool:
    """Whether training never shows ``a (operation) b``, under any template, in digits or words.

    A stable hash of the operation and the operands as they stand in the sentence holds out one pair in
    ``HELD_OUT_SHARE``; n1, n2 and n2, n1 are on the same side for sums and products. One-digit tasks (their
    dividends and minuends may have two digits) are so few that all of them are trained.
    """
    if abs(b) < 10 and abs(a) < 100:
        return False
    if operation in ("add", "mul"):
        a, b = sorted((a, b))
    digest = hashlib.blake2b(f"{operation} {a} {b}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


@cache
def templates_of(operation: str) -> tuple[Template, ...]:
    """Every template of an operation, each sentence once."""
    every = PAPER_A[operation] + PAPER_B[operation] + NO_SPACES[operation]
    return tuple({template.text: template for template in every}.values())


@cache
def neutral_templates(operation: str) -> tuple[Template, ...]:
    """The operation's templates with the operator word or sign replaced by each of its neutral words."""
    found = []
    for template in templates_of(operation):
        for operator, words in NEUTRAL_WORDS[operation].items():
            pattern = rf"(?<!\w){re.escape(operator)}(?!\w)" if operator.isalpha() else re.escape(operator)
            if re.search(pattern, template.text):
                found += [Template(template.name, re.sub(pattern, word, template.text), template.separator)
                          for word in words]  # fmt: skip
    assert found, f"no neutral form of any {operation} template"
    return tuple(found)


def draw_operands(rng: random.Random, operation: str, digits_a: int, digits_b: int) -> tuple[int, int, int]:
    """Random operands as they stand in the sentence, and the answer: n1, n2, n1 (operation) n2.

    Digits count n1 and n2 for sums, differences and products, and quotient and divisor for divisions (exact, built
    by inverse multiplication). Differences are never negative.
    """
    a, b = rng.randint(*DIGIT_RANGES[digits_a]), rng.randint(*DIGIT_RANGES[digits_b])
    if operation == "add":
        return a, b, a + b
    if operation == "mul":
        return a, b, a * b
    if operation == "sub":
        if rng.random() < INVERSE_SUBTRACTIONS:
            return a + b, b, a
        return max(a, b), min(a, b), abs(a - b)
    b = b or rng.randint(1, 9)
    if digits_a == digits_b and rng.random() < SMALL_QUOTIENTS:
        a = rng.randint(1, DIGIT_RANGES[digits_b][1] // b)
    return a * b, b, a


def draw_example(rng: random.Random, mixture: Mixture) -> Prompt:
    """One training sentence of the mixture; its operand pair is not held out."""
    kind = rng.choices(KINDS, mixture.weights())[0]
    while True:
        operation, digits_a, digits_b = _task_kind(rng, kind)
        a, b, answer = draw_operands(rng, operation, digits_a, digits_b)
        if not is_held_out(operation, a, b):
            break
    template = rng.choice(neutral_templates(operation) if kind == "neutral" else templates_of(operation))
    return sentence(template, operation, a, b, UNKNOWN if kind == "neutral" else answer, in_words=kind == "words")


def _task_kind(rng: random.Random, kind: str) -> tuple[str, int, int]:
    """Operation and the two operands' digit counts."""
    if kind == "uneven":
        operation = rng.choice(OPERATIONS)
        pairs = [(1, 2), (2, 1)] if operation in ("mul", "div") else [(1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2)]
        return (operation, *rng.choice(pairs))
    if kind == "words":
        digits = rng.choices((1, 2), (1, 4))[0]
    elif kind == "neutral":
        digits = rng.choices((1, 2, 3), (1, 3, 1))[0]
    else:
        digits = {"one_digit": 1, "two_digit": 2, "three_digit": 3}[kind]
    return rng.choices(OPERATIONS, OPERATION_WEIGHTS[digits])[0], digits, digits


def sentence(template: Template, operation: str, a: int, b: int, answer: int | str, *, in_words: bool) -> Prompt:
    """The prompt of one task under one template; ``answer`` is a number or a word such as ``UNKNOWN``."""
    write = number_words if in_words else str
    text_a, text_b = write(a), write(b)
    return Prompt(
        prompt_id=f"{operation} {a} {b}",
        text=template.fill(text_a, text_b),
        answer=answer if isinstance(answer, str) else write(answer),
        operation=operation,
        operand_a=text_a,
        operand_b=text_b,
        template=template.name,
        separator=template.separator,
    )


@dataclass(frozen=True)
class Cell:
    """One row of an accuracy table: an operation, a digit count and a form of the numbers."""

    operation: str
    digits: int
    form: str  # "digits", "words", or "neutral"


CELLS = (
    *(Cell(op, digits, "digits") for digits in (1, 2, 3) for op in OPERATIONS if (op, digits) != ("mul", 3)),
    *(Cell(op, 2, "words") for op in OPERATIONS),
    *(Cell(op, 2, "neutral") for op in OPERATIONS),
)


def held_out_prompts(cell: Cell, count: int, seed: int) -> list[Prompt]:
    """``count`` random sentences of a cell, templates in turn, on operand pairs that training never shows.

    One-digit cells draw from all pairs (all are trained); divisions are (n1 * n2) / n2, differences n1 >= n2 or
    (n1 + n2) - n2 as in training.
    """
    rng = random.Random(f"{seed}/{cell}")
    templates = neutral_templates(cell.operation) if cell.form == "neutral" else templates_of(cell.operation)
    order = rng.sample(templates, len(templates))
    prompts: list[Prompt] = []
    while len(prompts) < count:
        a, b, answer = draw_operands(rng, cell.operation, cell.digits, cell.digits)
        if cell.digits > 1 and not is_held_out(cell.operation, a, b):
            continue
        template = order[len(prompts) % len(order)]
        given = UNKNOWN if cell.form == "neutral" else answer
        prompts.append(sentence(template, cell.operation, a, b, given, in_words=cell.form == "words"))
    return prompts
