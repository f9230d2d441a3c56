"""Integers as English words: 34 -> "thirty-four".

Knows English cardinals up to 9,999; knows nothing about prompts.
"""

UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
LARGEST = 9_999


def number_words(number: int) -> str:
    """English words of an integer from -9,999 to 9,999, without "and": 1203 -> "one thousand two hundred three".

    "and" is left out because the templates use it between the operands; a negative number starts with "minus".
    Raises ValueError outside the range.
    """
    if abs(number) > LARGEST:
        raise ValueError(f"{number} is outside -{LARGEST} to {LARGEST}")
    if number < 0:
        return "minus " + number_words(-number)
    if number < 20:
        return UNITS[number]
    if number < 100:
        tens, unit = divmod(number, 10)
        return TENS[tens - 2] + (f"-{UNITS[unit]}" if unit else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    head, rest = divmod(number, size)
    return f"{UNITS[head]} {name}" + (f" {number_words(rest)}" if rest else "")
