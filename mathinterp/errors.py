"""The one error a user can cause.

Knows nothing about what went wrong: it only marks the difference between a mistake of the caller
(one line, exit code 2) and a fault of the program (traceback).
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can put right; the message says what is wrong and what to do, in one line."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'heads'?`` for a near miss of a known name, to end a message with; else nothing."""
    alike = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{alike[0]}'?" if alike else ""
