"""The number that a response gives as its answer, and whether it is the right one.

Knows text and decimal numbers; knows nothing about models or tasks. The rule, in this order:

1. the first number after "####", the mark of GSM8K's solutions;
2. else the first number after the last "answer is";
3. else the last number of the response.

Thousands commas, a currency sign and a closing full stop are not part of a number. "-" (or "−") is its sign unless it
stands right after a word, a number or a bracket: 16-3 ends in 3. A whole target must be met exactly; a target with
decimals also by its value rounded to the response's own decimals, two of them at least (9.43; .67 for two thirds).
"""

import re
from decimal import ROUND_HALF_UP, Decimal, localcontext

FINAL_MARK = "####"
ANSWER_IS = re.compile(r"answer\s+is", re.IGNORECASE)
NUMBER = re.compile(
    r"(?P<sign>(?<![\w).,])[-−])?(?:[$€£]\s?)?(?P<digits>\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)"
)
FEWEST_DECIMALS = 2  # of a rounded answer
RULES = 1  # raise it when the rules here change: part of a run's identity


def final_number(response: str) -> Decimal | None:
    """The number that ``response`` gives as its answer; None if there is none."""
    _, mark, after = response.partition(FINAL_MARK)
    if mark and (first := NUMBER.search(after)):
        return _value(first)
    stated = list(ANSWER_IS.finditer(response))
    if stated and (first := NUMBER.search(response, stated[-1].end())):
        return _value(first)
    numbers = list(NUMBER.finditer(response))
    return _value(numbers[-1]) if numbers else None


def same_number(found: Decimal | None, target: Decimal) -> bool:
    """Whether ``found`` is ``target``, or a target with decimals rounded to as many as ``found`` has, at least two."""
    if found is None:
        return False
    if found == target:
        return True
    decimals = decimal_places(found)
    if target == target.to_integral_value() or decimals < FEWEST_DECIMALS:
        return False
    with localcontext(prec=max(28, len(target.as_tuple().digits) + decimals + 2)):
        return found == target.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_UP)


def starts_with_answer(response: str, answer: str) -> bool:
    """Whether ``response`` begins with ``answer``, white space before it aside, and the answer ends there.

    It does not end where a digit, a letter, or a decimal or thousands sign with a digit goes on: 47 is not 470, 4.7 or
    4,700.
    """
    said = response.lstrip().replace("−", "-")
    wanted = answer.strip().replace("−", "-")
    return said.startswith(wanted) and re.match(r"\w|[.,]\d", said[len(wanted) :]) is None


def decimal_places(number: Decimal) -> int:
    """Digits after the decimal point, as written."""
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), f"{number} is not finite"
    return max(0, -exponent)


def _value(found: re.Match[str]) -> Decimal:
    number = Decimal(found["digits"].replace(",", ""))
    return -number if found["sign"] else number
