"""Options of the recipes' commands."""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from mathinterp.errors import Unfinished, UserError


def say(line: str) -> None:
    """A line on the way, on stderr."""
    click.echo(line, err=True)


def recipe_options(*, steps: int, batch: int, lr: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Where and how long to train; a mistake, or work that stopped, is one line."""
    options = [
        click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write."),
        click.option("--steps", default=steps, show_default=True, help="On a CPU give a few dozen or hundred."),
        click.option("--batch", default=batch, show_default=True, help="Fresh samples per step, all workers together."),
        click.option("--lr", default=lr, show_default=True, help="Peak learning rate."),
        click.option("--seed", default=0, show_default=True),
        click.option("--workers", default=1, show_default=True, help="Data-parallel workers, a GPU each if any."),
        click.option("--address", help="A Ray cluster; none: RAY_ADDRESS, else a local Ray."),
        click.option("--storage", help="Folder or URI for checkpoints, seen by all nodes.  [default: beside OUT]"),
        click.option("--store", default="results", show_default=True, help="Where the course of training goes."),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            try:
                command(**given)
            except UserError as problem:
                say(f"error: {problem}")
                sys.exit(2)
            except Unfinished as problem:
                say(f"error: {problem}; the same command goes on from here")
                sys.exit(1)

        for option in reversed(options):
            run = option(run)
        return run

    return decorate
