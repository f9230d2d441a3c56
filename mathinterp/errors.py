"""Errors that are no fault of the program.

A mistake of the caller is one line and exit code 2 on the command line, work that stopped one line and exit code 1;
anything else is a fault of the program, with its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can put right; the message says what is wrong and what to do, in one line."""


class Unfinished(RuntimeError):
    """Work that stopped before its end, as one line; the same call goes on from there."""


def first_line_of(error: BaseException) -> str:
    """What an error of a library says, in its first line; its class, where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line_of(error: BaseException, most: int = 300) -> str:
    """What an error of a library says, on one line of at most so many characters; its class, where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'heads'?`` for a near miss of a known name, to end a message with; else nothing."""
    alike = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean '{alike[0]}'?" if alike else ""
