"""Column arithmetic: which digits of an answer received a carry or a borrow.

Knows memorize and change-one (paper A, Table 3); knows nothing about tokens.
"""

import re

MEMORIZE, CHANGE_ONE, MIXED = "memorize", "change-one", "mixed"
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")


def digit_classes(
    operation: str | None, operand_a: str | None, operand_b: str | None, answer: str
) -> tuple[str, ...] | None:
    """The class of each digit of ``answer``, left to right, its sign left out (method.md section 1).

    ``add`` and ``sub``: a digit is change-one iff its column received a carry (borrow); an overflow leading digit takes
    the class of the column that produced it; the unit digit is memorize. Where the signed terms have opposite signs
    (3 - 5, -3 + 5) the columns are those of the larger absolute value minus the smaller. ``mul`` and ``div``: the last
    digit is memorize, earlier ones change-one. None for other operations, numbers that are not plain integers, and
    sums or differences that are wrong, where columns say nothing.
    """
    numbers = [operand_a, operand_b, answer]
    if any(text is None or not _INTEGER.fullmatch(text) for text in numbers):
        return None
    a, b, result = (int(str(text)) for text in numbers)
    digits = str(abs(result))
    if operation in ("mul", "div"):
        return (CHANGE_ONE,) * (len(digits) - 1) + (MEMORIZE,)
    if operation not in ("add", "sub"):
        return None
    second = b if operation == "add" else -b
    if a + second != result:
        return None
    opposite = (a < 0) != (second < 0)
    received = _borrows(abs(a), abs(second)) if opposite else _carries(abs(a), abs(second))
    units_first = [CHANGE_ONE if flag else MEMORIZE for flag in received]
    units_first += units_first[-1:] * (len(digits) - len(units_first))  # overflow: the class of its producer
    return tuple(reversed(units_first[: len(digits)]))


def _columns(x: int, y: int) -> list[tuple[int, int]]:
    """Pairs of digits, units first, as many as the longer number has."""
    width = max(len(str(x)), len(str(y)))
    return [(int(p), int(q)) for p, q in zip(str(x).zfill(width)[::-1], str(y).zfill(width)[::-1], strict=True)]


def _carries(x: int, y: int) -> list[bool]:
    """Whether each column of x + y, units first, received a carry."""
    received, carry = [], False
    for p, q in _columns(x, y):
        received.append(carry)
        carry = p + q + carry > 9
    return received


def _borrows(x: int, y: int) -> list[bool]:
    """Whether each column of |x - y|, units first, had to give to the column at its right."""
    received, borrow = [], False
    for p, q in _columns(max(x, y), min(x, y)):
        received.append(borrow)
        borrow = p - q - borrow < 0
    return received
