"""The one error a user can cause.

Knows nothing about what went wrong: it only marks the difference between a mistake of the caller
(one line, exit code 2) and a fault of the program (traceback).
"""


class UserError(ValueError):
    """Something the user can put right; the message says what is wrong and what to do, in one line."""
