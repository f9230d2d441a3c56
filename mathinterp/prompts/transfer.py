"""Transfer sets: do heads found on two-digit sentences serve longer integers, decimals and years? (paper B, Fig. 4-5)

Knows how operands are drawn and answers computed, in whole numbers throughout; knows nothing about tokenizers.
Everything is deterministic in the seed: a draw depends on (seed, set, operation, template) alone.
"""

import random
from collections.abc import Callable

from mathinterp.prompts.prompt import Prompt
from mathinterp.prompts.templates import OPERATIONS, PAPER_B, SIGNS, WORDS, Template

Task = tuple[str, str, str]  # operand_a, operand_b, answer, as written

PER_TEMPLATE = 50  # two templates per operation: 100 prompts per operation
FACTORS = range(2, 10)
TENTHS = [tenths for tenths in range(11, 100) if tenths % 10]  # 1.1 to 9.9, the tenth never 0
NOUNS = (
    *("war", "siege", "voyage", "reign", "drought"),
    *("project", "alliance", "strike", "expedition", "dispute"),
)
PER_NOUN = 20
STARTS = range(1100, 1980)  # years
SPANS = range(2, 10)  # years, never "1 years"


def multi_digit(seed: int) -> list[Prompt]:
    """100 prompts per operation on integers of one to five digits: half in words, half in signs, in B's templates.

    Sums and differences (n1 >= n2) of numbers of four or five digits; products of a number of three or four digits and
    one of 2..9; exact quotients, which are such products undone.
    """
    templates = {op: [t for t in PAPER_B[op] if t.name in ("equal_to", "symbols")] for op in OPERATIONS}
    return [
        prompt
        for operation in OPERATIONS
        for template in templates[operation]
        for prompt in _prompts("multi_digit", operation, template, _integers, seed)
    ]


def rationals(seed: int) -> list[Prompt]:
    """100 prompts per operation on decimals, half like "4.2 plus 2.5 equals to" and half like "4.2 + 2.5 =".

    Operands are 1.1 to 9.9; the second operand of a product or quotient is a whole number 2..9, so that every decimal,
    the answer too, has exactly one place, which is not 0. Differences are positive.
    """
    return [
        prompt
        for operation in OPERATIONS
        for template in (
            Template("equals_to", f"{{a}} {WORDS[operation]} {{b}} equals to"),
            Template("symbols", f"{{a}} {SIGNS[operation]} {{b}} ="),
        )
        for prompt in _prompts("rationals", operation, template, _decimals, seed)
    ]


def year_spans(seed: int) -> list[Prompt]:
    """200 prompts like "The war lasted 5 years from 1723 to 172", whose answer is the last digit, without a space.

    Ten nouns, a template each, 20 prompts a noun: in half of them, in random order, the units carry (1728 to 173).
    operand_a is the span and operand_b the first year, as they follow in the text. A tokenizer that does not split
    numbers into digits has no token for the answer alone; alignment then refuses the set. There is no operator word,
    so the set is for knock-out and evaluation: scans that need counterfactuals refuse it.
    """
    return [prompt for noun in NOUNS for prompt in _years(noun, seed)]


def _prompts(
    name: str, operation: str, template: Template, draw: Callable[[random.Random, str], Task], seed: int
) -> list[Prompt]:
    """PER_TEMPLATE prompts of different operands."""
    rng = random.Random(f"{seed}/{name}/{operation}/{template.name}")
    tasks: dict[Task, None] = {}  # a set that keeps its order
    while len(tasks) < PER_TEMPLATE:
        tasks[draw(rng, operation)] = None
    return [
        Prompt(
            prompt_id=f"{operation}-{template.name}-{i:03d}",
            text=template.fill(a, b),
            answer=answer,
            operation=operation,
            operand_a=a,
            operand_b=b,
            template=template.name,
            separator=template.separator,
        )
        for i, (a, b, answer) in enumerate(tasks)
    ]


def _integers(rng: random.Random, operation: str) -> Task:
    if operation in ("add", "sub"):
        a, b = (_integer(rng, rng.choice((4, 5))) for _ in range(2))
        a, b = (a, b) if operation == "add" else (max(a, b), min(a, b))
        return str(a), str(b), str(a + b if operation == "add" else a - b)
    number, factor = _integer(rng, rng.choice((3, 4))), rng.choice(FACTORS)
    product = number * factor
    return _product_or_quotient(operation, str(number), str(factor), str(product))


def _integer(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)


def _decimals(rng: random.Random, operation: str) -> Task:
    while True:
        a, b, factor = rng.choice(TENTHS), rng.choice(TENTHS), rng.choice(FACTORS)
        a, b = (max(a, b), min(a, b)) if operation == "sub" else (a, b)
        result = {"add": a + b, "sub": a - b, "mul": a * factor, "div": a * factor}[operation]  # tenths
        if result % 10 == 0:
            continue
        if operation in ("add", "sub"):
            return _written(a), _written(b), _written(result)
        return _product_or_quotient(operation, _written(a), str(factor), _written(result))


def _written(tenths: int) -> str:
    whole, tenth = divmod(tenths, 10)
    return f"{whole}.{tenth}"


def _product_or_quotient(operation: str, number: str, factor: str, product: str) -> Task:
    return (number, factor, product) if operation == "mul" else (product, factor, number)


def _years(noun: str, seed: int) -> list[Prompt]:
    rng = random.Random(f"{seed}/year_spans/{noun}")
    template = f"{noun}_lasted"
    carries = [False, True] * (PER_NOUN // 2)
    rng.shuffle(carries)
    spans: dict[tuple[int, int], None] = {}
    while len(spans) < PER_NOUN:
        start, span = rng.choice(STARTS), rng.choice(SPANS)
        if (start % 10 + span > 9) == carries[len(spans)]:
            spans[start, span] = None
    return [
        Prompt(
            prompt_id=f"add-{template}-{i:03d}",
            text=f"The {noun} lasted {span} years from {start} to {(start + span) // 10}",
            answer=str((start + span) % 10),
            operation="add",
            operand_a=str(span),
            operand_b=str(start),
            template=template,
            separator="",
        )
        for i, (start, span) in enumerate(spans)
    ]
