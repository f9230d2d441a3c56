"""One sentence as a prompt: "3+5=" -> its operands, operation, answer and separator, as far as the text shows them.

Knows digits and operator words; knows nothing about models.
"""

import re

from mathinterp.errors import UserError
from mathinterp.prompts.pairs import operator_spans
from mathinterp.prompts.prompt import Prompt
from mathinterp.prompts.templates import OPERATIONS

NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.]*\d)")


def sentence_prompt(text: str, answer: str | None = None, separator: str | None = None) -> Prompt:
    """A prompt from a sentence.

    Args:
        answer: None: worked out, where the text has two numbers in digits and one operation.
        separator: between text and answer; None: nothing after a text that ends with "=" and has no space ("3+5="),
            else a space.
    Raises:
        UserError: no words, or an answer that cannot be worked out.
    """
    text = text.strip()
    if not text:
        raise UserError("`sentence` is empty; write one like '3+5=' or 'The sum of 3 and 5 is'")
    if separator is None:
        separator = "" if text.endswith("=") and " " not in text else " "
    numbers, operation = NUMBER.findall(text), _operation(text)
    operands = numbers if len(numbers) == 2 else [None, None]
    if answer is None:
        if operation is None or operands[0] is None or operands[1] is None:
            raise UserError(
                f"the answer of {text!r} cannot be worked out: it needs two numbers in digits and one of the operations"
                f" {', '.join(OPERATIONS)}; give `answer`"
            )
        answer = _answer(operation, int(operands[0]), int(operands[1]), text)
    return Prompt(
        "sentence", text, answer, operation, operands[0], operands[1], template="sentence", separator=separator
    )


def _operation(text: str) -> str | None:
    """The one operation whose words or sign the text has; None for none or several."""
    found = [operation for operation in OPERATIONS if _has_operator(operation, text)]
    return found[0] if len(found) == 1 else None


def _has_operator(operation: str, text: str) -> bool:
    try:
        return bool(operator_spans(Prompt("sentence", text, "", operation)))
    except UserError:
        return False


def _answer(operation: str, a: int, b: int, text: str) -> str:
    if operation == "div":
        if b == 0 or a % b:
            raise UserError(f"{a} is no multiple of {b} in {text!r}; give `answer`")
        return str(a // b)
    return str({"add": a + b, "sub": a - b, "mul": a * b}[operation])
