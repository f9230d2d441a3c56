"""Which characters of an answer are scored: its digits, the signs of its numbers, the points they begin with.

Knows text; knows nothing about tokens. Method.md section 1, where digit tokens and "-" are scored:

- a sign is any of SIGNS, or the word minus, negative or plus, before a number, its currency, bracket and point:
  -5, −5, +5, -.5, -$5, $-5, (-5), minus 5, and the one of 3e-5. After a word, a number or a closing bracket it is an
  operator, as in 17-23; with white space after it, it is a sign only where the answer begins.
- a point is scored where a number begins with it: .5, -.5, $.5.
- what stands inside a number or after it is read and not scored: the point of 6.7, the comma of 1,000, the "/" of 1/2,
  a currency, "%", brackets, a unit (5 apples).
"""

import re

KINDS = ("digit", "sign", "point")  # a token that holds several is of the first of them
SIGNS = "-−–‐‑‒﹣－+＋"  # hyphen-minus, minus, en dash, other hyphens, small and full-width forms; plus
OPENING = "$€£¥₹(\\["  # may stand between a sign and its number
NUMBER_LEAD = re.compile(
    rf"(?P<sign>[{SIGNS}]|\b(?:minus|negative|plus)\b)?(?P<gap>\s{{0,4}})[{OPENING}]{{0,4}}\s?(?P<point>\.)?(?=\d)",
    re.IGNORECASE,
)
BEFORE_OPERATOR = re.compile(r"[\w.,)\]%]$")  # what a "-" after it divides, as in 17-23
EXPONENT = re.compile(r"\d[eE]$")


def scored_characters(answer: str) -> dict[int, str] | None:
    """Index of each scored character -> its kind; None for an answer without a digit, of which all is scored."""
    marks = {i: "digit" for i, character in enumerate(answer) if character.isdecimal()}
    if not marks:
        return None
    for lead in NUMBER_LEAD.finditer(answer):
        if lead["point"] and not BEFORE_OPERATOR.search(answer[: lead.start("point")]):
            marks[lead.start("point")] = "point"
        if lead["sign"] and _is_sign(answer[: lead.start("sign")], spaced=bool(lead["gap"])):
            marks |= dict.fromkeys(range(*lead.span("sign")), "sign")
    return marks


def _is_sign(before: str, *, spaced: bool) -> bool:
    """Whether a "-" with this before it is a number's sign; ``spaced``: white space parts it from the number."""
    if spaced:
        return re.search(r"\w", before) is None
    return EXPONENT.search(before) is not None or BEFORE_OPERATOR.search(before) is None
