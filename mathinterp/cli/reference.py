"""The command reference, made from the commands themselves.

    python -m mathinterp.cli.reference > docs/commands.md

Knows the tree of commands; a test compares what this prints with the file.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence

import click

from mathinterp.cli.main import main
from mathinterp.cli.plan import plan

SHARED_BY = 6  # commands from which on an option is described once for all
HEADER = """\
# Commands

Made by `python -m mathinterp.cli.reference > docs/commands.md`. Every command takes `-h`, `--help`, too. An option
without a default is left out, or not set, unless it is given.
"""


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command below a group, depth first, with its words: ("tune", "precise") is "tune precise"."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def reference() -> str:
    """The whole page, in Markdown."""
    every = dict(commands(main))
    shared = _shared([command for words, command in every.items() if not words.startswith("plan ")])
    parts = [HEADER, "## Shared options\n", _table(list(shared.values()))]
    for heading, names in main.sections.items():
        parts.append(f"## {heading}\n")
        for name in names:
            command = every[name]
            parts += _section(name, command, shared, level=3)
            if command is plan:
                parts.append("`mathinterp plan NAME` takes the options of `mathinterp scan NAME`.\n")
            elif isinstance(command, click.Group):
                for words, below in commands(command, (name,)):
                    parts += _section(words, below, shared, level=4)
    return "\n".join(parts)


def _shared(every: Sequence[click.Command]) -> dict[str, click.Option]:
    """Flag -> option, of those that many commands have with the same help."""
    found: dict[tuple[str, str], click.Option] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for command in every:
        for option in _options(command):
            key = option.opts[0], option.help or ""
            counts[key] += 1
            found.setdefault(key, option)
    return {flag: found[flag, text] for (flag, text), count in counts.items() if count >= SHARED_BY}


def _section(words: str, command: click.Command, shared: dict[str, click.Option], level: int) -> list[str]:
    context = click.Context(command)
    arguments = "".join(f" {each.make_metavar(context)}" for each in command.params if isinstance(each, click.Argument))
    own, also = [], []
    for option in _options(command):
        of_all = shared.get(option.opts[0])
        if of_all is None or of_all.help != option.help:
            own.append(option)
        else:
            default = (command.context_settings.get("default_map") or {}).get(str(option.name))
            differs = default is not None and default != of_all.default
            also.append(f"`{option.opts[-1]}`" + (f" (default: {default})" if differs else ""))
    lines = [f"{'#' * level} mathinterp {words}{arguments}\n", _prose(command)]
    return [*lines, *([_table(own)] if own else []), f"Shared: {', '.join(also)}.\n"]


def _options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option)]


def _prose(command: click.Command) -> str:
    """The help's paragraphs; those that it does not wrap (after a \\b) are kept as they are."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    shown = [
        "```text\n" + paragraph.removeprefix("\b\n") + "\n```" if paragraph.startswith("\b") else paragraph
        for paragraph in paragraphs
    ]
    return "\n\n".join(shown) + "\n"


def _table(options: Sequence[click.Option]) -> str:
    rows = ["| option | what it does | default |", "|---|---|---|"]
    for option in options:
        context = click.Context(click.Command("any"))
        value = "" if option.is_flag else f" {option.make_metavar(context)}"
        flags = ", ".join(f"`{flag}{value}`" for flag in option.opts)
        default = option.get_help_extra(context).get("default", "required" if option.required else "")
        rows.append(f"| {_cell(flags)} | {_cell(option.help or '')} | {_cell(str(default))} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    click.echo(reference(), nl=False)
