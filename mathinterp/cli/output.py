"""How results look on a terminal: rich tables, and plain JSON for scripts."""

import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mathinterp.cli.options import UPLOADS, with_flags
from mathinterp.report.cells import format_value
from mathinterp.text import printable


class Screen(Console):
    """A console for stored text: neither its control characters nor what looks like markup are obeyed, nor are
    numbers coloured.
    """

    def __init__(self, width: int | None) -> None:
        super().__init__(width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every text that is printed, titles and cells too, passes through here."""
        return super().render_str(printable(text), **options)


WIDE = 2000  # columns: more than any row; where no terminal sets a width, rows stay on one line
logger = logging.getLogger("mathinterp")
console = Screen(None if sys.stdout.isatty() else WIDE)
SHORT = 24  # characters: cells up to this length are never broken over lines


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, ensure_ascii=False))


def print_line(line: str | Text, style: str | None = None) -> None:
    """A line of its own on stdout, which only the terminal folds."""
    console.print(line, style=style, soft_wrap=True)


def print_table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Rows as a table; numbers right-aligned, floats in four significant digits, missing values as a dash."""
    if not rows:
        console.print(f"{title}: no rows" if title else "no rows")
        return
    if title:
        print_line(title, "bold")
    names, cells = list(rows[0]), [[format_value(value) for value in row.values()] for row in rows]
    right = [any(isinstance(row[name], int | float) for row in rows) for name in names]
    if lines := _unfolded(names, cells, right, console.width):
        print_line(lines)
        return
    table = Table(header_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(names):
        short = all(len(row[index]) <= SHORT for row in cells)
        table.add_column(name, justify="right" if right[index] else "left", no_wrap=short, overflow="fold")
    for row in cells:
        table.add_row(*row)
    # Folding text is fine; a number cut off to fit would be a wrong one, so then the terminal wraps the line instead.
    wide = Screen(WIDE)
    fits = wide.measure(table).minimum <= console.width
    (console if fits else wide).print(table)


def _unfolded(names: list[str], cells: list[list[str]], right: list[bool], width: int) -> Text | None:
    """The table as rich lays it out, which takes many times as long, where no cell must be folded; else None."""
    texts = [[printable(cell) for cell in row] for row in [names, *cells]]
    if any("\n" in cell or "\t" in cell for row in texts for cell in row):
        return None
    sizes = [[cell_len(cell) for cell in row] for row in texts]
    widest = [max(column) for column in zip(*sizes, strict=True)]
    if sum(widest) + 2 * (len(names) - 1) > width:
        return None
    padded = [
        "  ".join(
            " " * (most - size) + cell if to_right else cell + " " * (most - size)
            for cell, size, most, to_right in zip(row, lengths, widest, right, strict=True)
        )
        for row, lengths in zip(texts, sizes, strict=True)
    ]
    return Text("\n").join([Text(padded[0], "bold"), Text("\n".join(padded[1:]))])


def warn(line: str) -> None:
    """One line on stderr about figures that are doubtful."""
    context = click.get_current_context(silent=True)
    logger.warning(with_flags(line, context.command.params if context else ()))


def print_sql_hint(store: str, queries: Sequence[str]) -> None:
    """The SQL to go on with; where the results are is said last."""
    if is_quiet():
        return
    option = store_option(store)
    if queries:
        console.print("In SQL (accuracies, drops, effects and shares are fractions of 1):")
    for query in queries:
        print_line(f'  mathinterp sql{option} "{query}"')
    say_where_at_last(store)


def say_where_at_last(store: str) -> None:
    """Say where the results are, as the last line of the command that runs, once."""
    context = click.get_current_context(silent=True)
    if context is None:
        _say_where(store)
        return
    said = context.meta.setdefault("mathinterp.stores", set())
    if store not in said:
        said.add(store)
        context.find_root().call_on_close(lambda: _say_where(store))


def _say_where(store: str) -> None:
    if not is_quiet():
        option = store_option(store)
        print_line(f"Results: {place(store)} (see more: 'mathinterp sql{option}', 'mathinterp report{option}')")


def is_quiet() -> bool:
    """Whether --quiet was given."""
    return not logger.isEnabledFor(logging.WARNING)


def place(where: str) -> str:
    """A folder or URL as people type it from here: relative to the current folder where that is shorter.

    Not so in a job, whose folder is nobody's: what it prints is read, and typed again, elsewhere.
    """
    if "://" in where or UPLOADS in Path.cwd().parts:
        return where
    return min(os.path.relpath(where), where, key=len)


def store_option(store: str) -> str:
    """`` --store PLACE`` for a command line, or nothing for the default store."""
    shown = place(store)
    return "" if shown == "results" else f" --store {shlex.quote(shown)}"
