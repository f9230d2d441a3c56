"""How much a command says beside its results, and in which form: -v, -q, --log-format; lines on stderr."""

import logging
from collections.abc import Callable
from typing import Any

import click

from mathinterp import logs
from mathinterp.cli.options import Command, apply, parameters_of


def set_level(level: int) -> None:
    """What the package logs: INFO what it does, WARNING what is doubtful, ERROR nothing."""
    if (package := logging.getLogger("mathinterp")).level != level:  # setting it costs a look at every logger there is
        package.setLevel(level)


def verbosity_options() -> Callable[[Command], Command]:
    """--verbose, --quiet, --log-format: they set the level and the form of the package's log."""

    def sets(level: int) -> Callable[[click.Context, click.Parameter, bool], None]:
        return lambda context, parameter, given: set_level(level) if given else None

    return apply(
        [
            click.option(
                "-v", "--verbose", is_flag=True, expose_value=False, callback=sets(logging.INFO),
                help="Also say what is being done, and show where an error comes from.",
            ),
            click.option(
                "-q", "--quiet", is_flag=True, expose_value=False, callback=sets(logging.ERROR),
                help="Print results and errors only: no progress, no warnings, no hints.",
            ),
            click.option(
                "--log-format", type=click.Choice(["text", "json"]), default=None, expose_value=False, is_eager=True,
                callback=_set_log_format,
                help="json: all on stderr is one JSON object a line, with run id and shard where known. Default: text.",
            ),
        ]
    )  # fmt: skip


def verbosity() -> list[str]:
    """What this command was told, as the words of another one."""
    level = logging.getLogger("mathinterp").level
    words = ["--quiet"] if level >= logging.ERROR else ["--verbose"] if level <= logging.INFO else []
    return words + (["--log-format", "json"] if logs.AS_JSON else [])


def say_on_stderr(line: str, level: int = logging.INFO, **facts: Any) -> None:
    """One line beside the results; JSON where the log is. Of ``facts``, such as the run's id, text says nothing."""
    click.echo(logs.line_of(line, level, **facts) if logs.AS_JSON else line, err=True)


def say_notes(error: BaseException) -> None:
    """Under --verbose the notes of an error: where it comes from in another process."""
    if logging.getLogger("mathinterp").isEnabledFor(logging.INFO):
        for note in getattr(error, "__notes__", []):
            say_on_stderr(note, logging.ERROR)


class Failure(click.ClickException):
    """One line, exit code 1."""

    def show(self, file: object = None) -> None:
        """Print it on stderr."""
        say_on_stderr(f"Error: {self.format_message()}", logging.ERROR)


def _set_log_format(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        logs.AS_JSON = value == "json"


def add_verbosity(command: click.Command) -> None:
    """Give a command, and all that are made of it already, the options of ``verbosity_options``."""
    if not any(parameter.name == "verbose" for parameter in command.params):
        command.params += parameters_of([verbosity_options()])
    if isinstance(command, click.Group):
        for below in command.commands.values():
            add_verbosity(below)
