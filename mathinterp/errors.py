"""Errors that are no fault of the program.

A mistake of the caller is one line and exit code 2 on the command line, work that stopped one line and exit code 1;
anything else is a fault of the program, with its traceback.
"""


class UserError(ValueError):
    """Something the user can put right; the message says what is wrong and what to do, in one line."""


class Unfinished(RuntimeError):
    """Work that stopped before its end, as one line; the same call goes on from there."""
