"""Groups of commands: their help in whole sentences, in sections, and the likely name for a misspelt one.

Knows click; knows no command by name.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import click

from mathinterp.errors import UserError, did_you_mean


class Group(click.Group):
    """A group of commands, listed under the headings of ``sections``: heading -> names; one heading by default."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A line each: the first sentence of the command's help."""
        said = {name: self.sentence_of(ctx, name) for name in self.list_commands(ctx)}
        placed = {name for names in self.sections.values() for name in names}
        sections = {**self.sections, "Commands": [name for name in said if name not in placed]}
        for heading, names in sections.items():
            if rows := [(name, said[name]) for name in names if name in said]:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def sentence_of(self, ctx: click.Context, name: str) -> str:
        """What the list says of a command."""
        command = self.get_command(ctx, name)
        assert command is not None, name
        return first_sentence(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is named first; raises UserError with the likely name for one that does not exist."""
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        # Names of this group go before those below it, and of these `scan heads` before `plan heads`.
        known = {command: command for command in self.list_commands(ctx)}
        for command in reversed(self.list_commands(ctx)):
            group = self.get_command(ctx, command)
            if isinstance(group, click.Group):
                for below in group.list_commands(ctx):
                    known.setdefault(below, f"{command} {below}")
        likely = did_you_mean(name, known)
        for below, path in known.items():
            likely = likely.replace(f"'{below}'", f"'{path}'")
        raise UserError(f"there is no command '{name}'.{likely} See '{ctx.command_path} --help'")


def first_sentence(command: click.Command) -> str:
    """The first sentence of a command's help, with its full stop."""
    words: list[str] = []
    for word in (command.help or "").split("\n\n")[0].split():
        words.append(word)
        if word.endswith("."):
            break
    return " ".join(words).rstrip(".") + "."
