"""The command line: a thin layer over the library.

Every command is a few lines that call one function and print its result. A UserError, or an option that does not
parse, becomes one line on stderr and exit code 2; a fault of the program keeps its traceback. Heavy imports happen
inside the commands, so that ``--help`` is instant.
"""

import logging
import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import click

import mathinterp
from mathinterp import logs
from mathinterp.cli.chain import chain
from mathinterp.cli.edit import edit
from mathinterp.cli.evaluate import evaluate
from mathinterp.cli.explore import explore
from mathinterp.cli.group import Group
from mathinterp.cli.interrupt import past_click
from mathinterp.cli.league import league
from mathinterp.cli.mib import mib
from mathinterp.cli.models import models
from mathinterp.cli.neuron import neuron
from mathinterp.cli.options import with_flags
from mathinterp.cli.pipeline import pipeline
from mathinterp.cli.plan import plan
from mathinterp.cli.prompts import prompts
from mathinterp.cli.report import report
from mathinterp.cli.reproduce import reproduce
from mathinterp.cli.runs import check, runs
from mathinterp.cli.scan import scan
from mathinterp.cli.selftest import selftest
from mathinterp.cli.serve import serve
from mathinterp.cli.sql import sql
from mathinterp.cli.stability import stability
from mathinterp.cli.submit import submit
from mathinterp.cli.tune import tune
from mathinterp.cli.verbosity import Failure, add_verbosity, say_notes, say_on_stderr, set_level
from mathinterp.errors import Unfinished, UserError
from mathinterp.text import one_line


class UserMistake(click.ClickException):
    """One line, exit code 2."""

    exit_code = 2

    def show(self, file: object = None) -> None:
        """Print the line on stderr."""
        say_on_stderr(f"mathinterp: {one_line(self.message)}", logging.ERROR)


class Commands(Group):
    """The whole command line: its commands, by workflow, may raise UserError."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {
        "Look before you run": ("models", "prompts", "plan", "selftest"),
        "Scan a model": ("scan", "pipeline", "league"),
        "Explain what was found": ("stability", "mib", "knockout", "maskkeep", "neuron", "chain"),
        "Set beside the papers": ("reproduce",),
        "Tune and edit": ("tune", "edit"),
        "Evaluate": ("evaluate",),
        "Serve results, and run on a cluster": ("sql", "report", "explore", "runs", "check", "submit", "serve"),
    }

    def make_context(self, *given: Any, **more: Any) -> click.Context:
        """Interrupted, it is not click's to tell."""
        with past_click():
            return super().make_context(*given, **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Options say how much is told; where they do not, warnings are."""
        set_level(logging.WARNING)
        logs.AS_JSON = False
        try:
            return super().parse_args(ctx, args)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _mistake(error, ctx) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, and of the experiments that have one of their own."""
        return sorted({*super().list_commands(ctx), *_own_commands()})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of that name; None if there is none."""
        found = super().get_command(ctx, name)
        return scan.get_command(ctx, name) if found is None and name in _own_commands() else found

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; turn the user's mistake into one line."""
        try:
            with past_click():
                _require_folder()
                return super().invoke(ctx)
        except UserError as error:
            if logging.getLogger("mathinterp").isEnabledFor(logging.INFO):
                say_on_stderr("".join(traceback.format_exception(error)), logging.ERROR)
            raise UserMistake(with_flags(str(error))) from error
        except Unfinished as error:
            say_notes(error)
            raise Failure(f"{with_flags(str(error))}; the same command goes on from here") from error
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _mistake(error, ctx) from error


def _require_folder() -> None:
    """Raise UserError in a folder that somebody deleted meanwhile: there no path can be told."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError("the current folder is not there any more; change to one that is") from error


def _mistake(error: click.UsageError, ctx: click.Context) -> UserMistake:
    """Click's words in one line."""
    said, command = error.format_message().rstrip("."), error.ctx.command_path if error.ctx else ctx.command_path
    return UserMistake(f"{said}{' See' if said.endswith('?') else '; see'} '{command} --help'")


def _own_commands() -> list[str]:
    from mathinterp.experiments import registry

    return [name for name, experiment in registry.experiments().items() if experiment.own_command]


class Warnings(logging.Handler):
    """What the package logs, one line each on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message; warnings are marked as such."""
        if logs.AS_JSON:
            click.echo(with_flags(logs.JsonLines().format(record)), err=True)
            return
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        click.echo(mark + one_line(with_flags(record.getMessage())), err=True)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(mathinterp.__version__, prog_name="mathinterp")
def main() -> None:
    """Find, explain and improve the parts of a language model that do arithmetic.

    \b
    First steps:
      mathinterp models                                what can be scanned
      mathinterp scan heads --limit 200                which heads of the bundled model carry which operation
      mathinterp sql "SELECT * FROM paper_a_table1 JOIN latest_runs USING (run_id) WHERE rank <= 5"
    """
    logger = logging.getLogger("mathinterp")
    if not any(isinstance(handler, Warnings) for handler in logger.handlers):
        logger.addHandler(Warnings())


for command in (
    models, prompts, plan, scan, pipeline, league, mib, neuron,
    report, explore, sql, runs, check, selftest, submit, tune, edit, evaluate, chain, stability, serve, reproduce,
):  # fmt: skip
    main.add_command(command)
add_verbosity(main)

if __name__ == "__main__":
    from mathinterp.cli.entry import main as program

    program()
