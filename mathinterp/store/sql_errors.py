"""What DuckDB's errors mean: as one line for people, and whose fault they are."""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb

from mathinterp.errors import UserError
from mathinterp.store.catalog import catalog


@contextmanager
def told() -> Iterator[None]:
    """DuckDB's errors, also those in the middle of a stream, as a UserError of one line."""
    try:
        yield
    except (duckdb.Error, OSError) as error:  # OSError: what a stream of Arrow makes of DuckDB's
        if isinstance(error, OSError) and not re.match(r"[A-Z][\w ]* Error: ", str(error)):
            raise
        raise UserError(f"SQL: {str(error).splitlines()[0]}{_advice(str(error))}") from error


def is_of_a_file(error: BaseException | None) -> bool:
    """Whether an error of DuckDB's is the fault of a file; a footer's have no class of their own."""
    of_content = duckdb.IOException | duckdb.InvalidInputException | duckdb.ConversionException
    return isinstance(error, of_content) or type(error) is duckdb.Error


def ends_database(error: BaseException | None) -> bool:
    """Whether a database answers nothing any more after it."""
    return re.match("(?:FATAL|INTERNAL) Error: ", str(error)) is not None  # in streams no class tells


def is_of_a_gone_file(error: BaseException | None) -> bool:
    """Whether a file was merged with others, or deleted, after it was listed."""
    return re.search("No files found|No such file|FileNotFoundError", str(error)) is not None


def _advice(message: str) -> str:
    """How to allow a query of other files; for a view that does not exist, those of like names or how to list all."""
    if "disabled by configuration" in message:
        return "; a query reads the store alone, unless `allow_files` of 'mathinterp sql' lets it read other files"
    missing = re.search(r"Table with name (\w+) does not exist", message)
    if missing is None:
        return ""
    alike = difflib.get_close_matches(missing[1].lower(), catalog().order, n=3)
    return f" Did you mean {' or '.join(alike)}?" if alike else " 'mathinterp sql' without a query lists the views."
