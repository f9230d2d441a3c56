"""Options of all commands together: what is required is asked for, one idea has one name, former names still work."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.cli.reference import commands

COMMANDS = dict(commands(main))
SAMPLES = {"--data": "signed_two_digit_train", "--out": "new", "--address": "http://127.0.0.1:1"}  # others: a run's id
REQUIRED = [
    (name, parameter)
    for name, command in COMMANDS.items()
    for parameter in command.params
    if parameter.required
]  # fmt: skip


def mistake(*words: str) -> str:
    """The one line on stderr that a command ends with, exit code 2."""
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2, (result.output, result.exception)
    (line,) = result.stderr.strip().splitlines()
    return line


def spelt(parameter: click.Parameter) -> list[str]:
    """The words that give a parameter some value."""
    if isinstance(parameter, click.Argument):
        return ["0.1"]
    return [parameter.opts[0], SAMPLES.get(parameter.opts[0], "0123456789ab")]


def test_the_commands_that_build_on_a_run_or_on_data_require_it() -> None:
    required = {(name, each.opts[0]) for name, each in REQUIRED if isinstance(each, click.Option)}
    for name in ("maskkeep", "scan maskkeep", "plan maskkeep", "scan graph", "plan graph"):
        assert (name, "--neurons-from") in required
    assert {("tune precise", "--data"), ("tune full", "--data"), ("tune lora", "--data")} <= required
    assert {("tune merge", "--out"), ("tune zero", "--out"), ("submit", "--address")} <= required


@pytest.mark.parametrize(("name", "left_out"), REQUIRED, ids=[f"{name} {each.opts[0]}" for name, each in REQUIRED])
def test_what_is_required_and_left_out_is_asked_for_in_one_line(
    name: str, left_out: click.Parameter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [each for each in COMMANDS[name].params if each.required and each is not left_out]
    monkeypatch.chdir(tmp_path)
    told = mistake(*name.split(), *(word for each in others for word in spelt(each)))
    if isinstance(left_out, click.Option):
        assert f"Missing option '{left_out.opts[0]}'" in told
    else:
        assert f"Missing argument '{left_out.make_metavar(click.Context(main))}'" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tune precise", "tune full", "tune lora", "tune sweep", "tune prune"])
def test_a_training_needs_out_unless_it_is_dry(name: str) -> None:
    data = [] if name in ("tune sweep", "tune prune") else ["--data", "signed_two_digit_train"]
    assert "Missing option '--out'" in mistake(*name.split(), *data)
