"""How results look on a terminal: rich tables, and plain JSON for scripts."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

WIDE = 2000  # columns: more than any row; where no terminal sets a width, rows stay on one line
console = Console(width=None if sys.stdout.isatty() else WIDE)
PER_CENT_VIEWS = ("paper_*", "head_operations", "evaluation_table")  # all other views give fractions
SHORT = 24  # characters: cells up to this length are never broken over lines


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, ensure_ascii=False))


def print_table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Rows as a table; numbers right-aligned, floats in four significant digits, missing values as a dash."""
    if not rows:
        console.print(f"{title}: no rows" if title else "no rows")
        return
    if title:
        console.print(title, style="bold", highlight=False, soft_wrap=True)
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in rows[0]:
        numeric = any(isinstance(row[name], int | float) for row in rows)
        short = all(len(format_value(row[name])) <= SHORT for row in rows)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=short, overflow="fold")
    for row in rows:
        table.add_row(*(escape(format_value(value)) for value in row.values()))  # [x] is text, not markup
    # Folding text is fine; a number cut off to fit would be a wrong one, so then the terminal wraps the line instead.
    wide = Console(width=WIDE)
    fits = wide.measure(table).minimum <= console.width
    (console if fits else wide).print(table)


def format_value(value: Any) -> str:
    """A cell's text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def warn(line: str) -> None:
    """One line on stderr about figures that are doubtful."""
    click.echo(f"warning: {' '.join(line.split())}", err=True)


def file_name(text: str) -> str:
    """``text`` with what a file's name may not hold replaced."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text)


def print_sql_hint(store: str, queries: Sequence[str]) -> None:
    """Where the results are, and the SQL to go on with."""
    console.print(
        f"Results: {escape(store)}  (in SQL accuracies, drops, effects and shares are fractions of 1; per cent and"
        f" points only in {', '.join(PER_CENT_VIEWS)})",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    option = "" if store == "results" else f" --store {shlex.quote(store)}"
    for query in queries:
        console.print(escape(f'  mathinterp sql{option} "{query}"'), highlight=False, soft_wrap=True)
