"""The command line: a thin layer over the library.

Every command is a few lines that call one function and print its result. A UserError, or an option that does not
parse, becomes one line on stderr and exit code 2; a fault of the program keeps its traceback. A command is imported
when it is called, and heavy packages inside it, so that ``--help`` is instant.
"""

import importlib
import logging
import os
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

import click

import mathinterp
from mathinterp import logs
from mathinterp.cli.group import Group
from mathinterp.cli.interrupt import past_click
from mathinterp.cli.options import with_flags
from mathinterp.cli.verbosity import Failure, add_verbosity, say_notes, say_on_stderr, set_level
from mathinterp.errors import Unfinished, UserError
from mathinterp.plugins import announced
from mathinterp.text import one_line

SECTIONS = {  # heading -> command -> the first sentence of its help, which so is listed without an import
    "Look before you run": {
        "models": "List the models known by name; any Hugging Face decoder folder, .gguf file or hub id works too.",
        "prompts": "Show prompts as a model sees them: text, answer, and which answer tokens are scored.",
        "plan": "Show FLOPs, memory, rows and time of an experiment; loads no weights and needs no Ray.",
        "selftest": "Check on your model that packed = plain, replay = full forward, hooks = zeroed weights, "
        "no-op = clean.",
    },
    "Scan a model": {
        "scan": "Run an experiment over a model; the same command again resumes or shows it.",
        "pipeline": "Which heads do the arithmetic, for which operation, what they look at, whether they hold; "
        "which MLPs follow.",
        "league": "Compare how well each attribution method estimates the exact effects of heads and MLPs.",
    },
    "Explain what was found": {
        "stability": "Say how stable a ranking is: which of the first nodes stay first when prompts are drawn again.",
        "mib": "Circuits as MIB has them: evaluate a ranking or a circuit file, write a ranking as one.",
        "knockout": "Knock out the first k heads of a ranking together, and as many random heads: accuracy against k.",
        "maskkeep": "Zero each prompt's first k neurons (mask), or all other neurons of the deep layers (keep).",
        "neuron": "Show what NEURON (layer.neuron) does: coefficient and importance by operation, and the tokens "
        "it writes.",
        "chain": "The four stages of an answer, as a table and a drawing (paper A, section 4.4).",
    },
    "Set beside the papers": {
        "reproduce": "Run every table and figure of both papers on a model, and set ours beside the papers' numbers.",
    },
    "Tune and edit": {
        "tune": "Fine-tune chosen heads, whole models, layers or LoRA; merge an adapter.",
        "edit": "Find and zero the neurons that add to gender stereotypes of professions (paper A, section 6.2).",
    },
    "Evaluate": {
        "evaluate": "Evaluate a model on benchmarks and prompt sets; every item's answer is kept.",
    },
    "Serve results, and run on a cluster": {
        "sql": "Run a DuckDB SQL query over a store's views; without a query, list the views.",
        "report": "Write a page about finished runs that opens by double-click, offline; computes nothing again.",
        "explore": "Look at a store in a browser, also while runs are still written to it, and ask it in SQL.",
        "runs": "List, show, compare, delete, export, check and compact the runs of a store.",
        "check": "Read every file of a store to its end and compare checksums; exit code 1 if something is "
        "damaged or foreign.",
        "submit": "Run JOB with ARGUMENTS on a cluster; exits as the job does.",
        "serve": "Keep models loaded for many questions and users: a service that scans and notebooks attach to.",
    },
}
SENTENCES = {name: sentence for section in SECTIONS.values() for name, sentence in section.items()}


class UserMistake(click.ClickException):
    """One line, exit code 2."""

    exit_code = 2

    def show(self, file: object = None) -> None:
        """Print the line on stderr."""
        say_on_stderr(f"mathinterp: {one_line(self.message)}", logging.ERROR)


class Commands(Group):
    """The whole command line: its commands, by workflow, may raise UserError."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {heading: tuple(said) for heading, said in SECTIONS.items()}

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
        """Names of the commands, and of the installed experiments that have one of their own."""
        return sorted({*SENTENCES, *_installed_commands()})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command of that name, imported now; None if there is none.

        It is what its module calls so, in the module of that name; the others are those of experiments.
        """
        if name in self.commands:
            return self.commands[name]
        if name in SENTENCES and find_spec(f"{__package__}.{name}") is not None:
            command: click.Command = getattr(importlib.import_module(f"{__package__}.{name}"), name)
            add_verbosity(command)
            self.add_command(command)
            return command
        if name in self.list_commands(ctx):
            from mathinterp.cli.scan import scan

            return scan.get_command(ctx, name)
        return None

    def sentence_of(self, ctx: click.Context, name: str) -> str:
        """Of our own commands without an import."""
        return SENTENCES.get(name) or super().sentence_of(ctx, name)

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


def _installed_commands() -> list[str]:
    """Of experiments from outside the package that have a command of their own; imported only if there are any."""
    if not announced():
        return []
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


add_verbosity(main)
