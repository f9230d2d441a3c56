"""The sentences: templates of papers A and B as data, one short stable name each.

Knows words and signs of the four operations; knows nothing about numbers, tokenizers or models.
"""

from dataclasses import dataclass

OPERATIONS = ("add", "sub", "mul", "div")


@dataclass(frozen=True)
class Template:
    """A sentence with places {a} and {b}; the answer follows after ``separator``."""

    name: str
    text: str
    separator: str = " "

    def fill(self, operand_a: str, operand_b: str) -> str:
        """The sentence up to, and without, the separator."""
        return self.text.format(a=operand_a, b=operand_b)


SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
PUBLISHED_WORDS = {"add": "plus", "sub": "minus", "mul": "times", "div": "divides"}  # paper A writes "divides"
WORDS = {"add": "plus", "sub": "minus", "mul": "times", "div": "divided by"}

_NOUN_FORMS = {
    "add": Template("sum_of", "The sum of {a} and {b} is"),
    "sub": Template("difference_between", "The difference between {a} and {b} is"),
    "mul": Template("product_of", "The product of {a} and {b} is"),
    "div": Template("ratio_of", "The ratio of {a} and {b} is"),
}


def _paper_a(operation: str) -> tuple[Template, ...]:
    word, sign = PUBLISHED_WORDS[operation], SIGNS[operation]
    return (
        _NOUN_FORMS[operation],
        Template("question", f"Q: What is {{a}} {word} {{b}}? A:"),
        Template("words", f"{{a}} {word} {{b}} is"),
        Template("symbols", f"{{a}} {sign} {{b}} ="),
    )


def _paper_b(operation: str) -> tuple[Template, ...]:
    word, sign = WORDS[operation], SIGNS[operation]
    return (
        Template("equal_to", f"{{a}} {word} {{b}} is equal to"),
        Template("equal_to_symbols", f"{{a}} {sign} {{b}} is equal to"),
        Template("equals", f"{{a}} {word} {{b}} equals"),
        Template("equals_symbols", f"{{a}} {sign} {{b}} equals"),
        Template("symbols", f"{{a}} {sign} {{b}} ="),
        Template("result_of", f"The result of {{a}} {word} {{b}} is"),
        Template("result_of_symbols", f"The result of {{a}} {sign} {{b}} is"),
        Template("answer_to", f"What is {{a}} {word} {{b}}? The answer is"),
    )


def _no_spaces(operation: str, name: str = "no_spaces", separator: str = "") -> Template:
    return Template(name, f"{{a}}{SIGNS[operation]}{{b}}=", separator)


# operation -> templates, in the order in which prompts are listed
PAPER_A: dict[str, tuple[Template, ...]] = {op: _paper_a(op) for op in OPERATIONS}
PAPER_B: dict[str, tuple[Template, ...]] = {op: _paper_b(op) for op in OPERATIONS}
NO_SPACES: dict[str, tuple[Template, ...]] = {op: (_no_spaces(op),) for op in OPERATIONS}  # paper A's "3+5="
SYMBOLS: dict[str, tuple[Template, ...]] = {op: (PAPER_A[op][3],) for op in OPERATIONS}
# Llama-2, Llama-3, Mistral, SmolLM2 and GPT-2 read the "=-" of "3-5=-2" as one token, in which no answer can begin:
# where answers may be negative, a space stands before them.
COMPACT: dict[str, tuple[Template, ...]] = {op: (_no_spaces(op, "compact", separator=" "),) for op in OPERATIONS}
