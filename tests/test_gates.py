"""The gates for numbers and places, by themselves and at every option of every command that takes one."""

import math
import os
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mathinterp.cli.experiment import Parsed
from mathinterp.cli.main import main
from mathinterp.cli.options import PLACE, Real, Whole, lasting, out_file, out_folder, out_place, place_to_read
from mathinterp.cli.reference import commands
from mathinterp.cli.tuning import _out_unless_dry
from mathinterp.errors import UserError
from mathinterp.gates import MOST, check_place, real, whole

settings.register_profile("mathinterp", deadline=None, derandomize=True)  # the same examples on every machine
settings.load_profile("mathinterp")

LONG = "9" * 5000  # digits: more than Python turns into a number
NO_NUMBERS = [LONG, "nan", "inf", "-inf", "1e999", "", "x", "٣", "３", "1_0", "0x1", "1,5", "\x00"]
NO_UNITS = [LONG, f"1.{LONG}", f"0-{LONG}", f"topk:{LONG}", f"top:{LONG}", "above:nan", "head:1." + LONG, "٣.١", "٣"]
NO_PLACES = ["", " ", "a\nb", "\x00", "\udcff", "a" * 300, "b/" * 3000, "loop", "loop/x", "~nobody-of-this-name/x",
             "foo://x/y", "s3:/bucket", "s3://", "://x", "file://x"]  # fmt: skip
PLACES = (lasting, out_folder, out_place, out_file, place_to_read, _out_unless_dry)
COMMANDS = {words: each for words, each in commands(main) if not isinstance(each, click.Group)}


@pytest.fixture(autouse=True)
def nothing_heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder but for a link to itself; Ray must not start, nor weights be loaded."""
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("Ray started, or weights were loaded")

    monkeypatch.setattr("ray.init", forbidden)
    monkeypatch.setattr("mathinterp.models.catalog.load_weights", forbidden)


def refused(words: list[str]) -> str:
    """The line that refuses a command: one on stderr, exit code 2, nothing written."""
    result = CliRunner().invoke(main, words)
    assert isinstance(result.exception, SystemExit), (words, result.exception)
    assert result.exit_code == 2, (words, result.output)
    (line,) = result.stderr.splitlines()
    assert line.startswith("mathinterp: ")
    assert result.stdout == ""
    assert os.listdir(".") == ["loop"], words
    return line


def given_as(words: str, parameter: click.Parameter, value: str) -> list[str]:
    return [*words.split(), *([parameter.opts[0]] if isinstance(parameter, click.Option) else []), value]


def of_kind(kind: object) -> list[tuple[str, click.Parameter]]:
    """Every parameter of every command that has this type, or one of these callbacks."""
    return [
        (words, each)
        for words, command in COMMANDS.items()
        for each in command.params
        if (each.callback in kind if kind is PLACES else isinstance(each.type, kind))  # type: ignore[operator,arg-type]
    ]


NUMBERS, UNITS = of_kind((Whole, Real)), of_kind(Parsed)
WHERE = list(dict.fromkeys([*of_kind(PLACES), *of_kind(type(PLACE))]))


def test_every_option_that_looks_like_a_kind_goes_through_its_gate() -> None:
    assert (len(NUMBERS), len(UNITS), len(WHERE)) >= (200, 60, 150)
    numbers = (click.IntRange, click.FloatRange, click.types.IntParamType, click.types.FloatParamType)
    places = ("--store", "--out", "--storage", "--tensorboard", "--model", "--adapter", "--data-dir", "--text")
    plain = []
    for words, command in COMMANDS.items():
        for each in command.params:
            number = isinstance(each.type, numbers) and not isinstance(each.type, Whole | Real)
            place = each.opts[0] in places and each.callback not in PLACES and each.type is not PLACE
            plain += [(words, each.opts[0])] if number or place else []
    assert plain == []


@pytest.mark.parametrize("words", COMMANDS)
def test_numbers_that_are_none_or_out_of_range(words: str) -> None:
    for _, each in (found for found in NUMBERS if found[0] == words):
        kind = each.type
        assert isinstance(kind, Whole | Real)
        beyond = [] if kind.min is None else [str(kind.min - 1)]
        beyond += [] if kind.max is None else [str(kind.max + 1), "9" * 4000]
        for value in [*NO_NUMBERS, *beyond, *(["1.5"] if isinstance(kind, Whole) else [])]:
            line = refused(given_as(words, each, value))
            assert each.opts[0] in line
            assert len(line) < 400


@pytest.mark.parametrize("words", COMMANDS)
def test_heads_layers_and_other_units_that_are_none(words: str) -> None:
    for _, each in (found for found in UNITS if found[0] == words):
        for value in NO_UNITS:
            assert len(refused(given_as(words, each, value))) < 400


@pytest.mark.parametrize("words", COMMANDS)
def test_places_that_are_none(words: str) -> None:
    for _, each in (found for found in WHERE if found[0] == words):
        for value in NO_PLACES:
            refused(given_as(words, each, value))


@settings(max_examples=150)
@given(st.sampled_from(NUMBERS), st.one_of(st.text(max_size=8), st.integers().map(str), st.floats().map(repr)))
def test_whatever_is_written_for_a_number_is_that_number_or_refused(option, text):
    _, each = option
    context = click.Context(click.Command("any"))
    try:
        found = each.type.convert(text, each, context)
    except click.UsageError:
        return
    assert text.isascii()
    assert math.isfinite(found)
    assert found == (int(text) if isinstance(each.type, Whole) else float(text))
    assert each.type.min is None or found >= each.type.min
    assert each.type.max is None or found <= each.type.max


@settings(max_examples=100)
@given(st.sampled_from(WHERE), st.text(max_size=6), st.sampled_from(["\x00", "\n", "\x1b", "\u2028", "\ud800", "\x7f"]))
def test_no_control_character_is_part_of_a_place(option, text, letter):
    refused(given_as(*option, f"{text}{letter}x"))


@settings(max_examples=300)
@given(st.text(max_size=20))
def test_any_text_is_a_place_or_refused_in_one_line(text):
    refusal = ""
    try:
        check_place(text, "`out`")
    except UserError as error:
        refusal = str(error)
    assert not refusal or refusal.startswith("`out` ")
    assert refusal or text.strip()
    if not refusal:
        Path(text).exists()  # a name that the system takes


@given(st.integers())
def test_numbers_of_the_library_are_those_of_the_command_line(number):
    for written in (number, str(number)):
        try:
            assert whole(written) == number
        except ValueError:
            assert not 0 <= number <= MOST
    assert real(str(number)) == float(number)
    for no_number in (True, None, [number], f"{number}.5", 0.5):
        with pytest.raises(ValueError, match="is not a whole number"):
            whole(no_number)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a device"])
def test_prompts_are_not_written_in_the_place_of_a_device(kind: str) -> None:
    """Today's answer replaced it by a file."""
    if kind == "pipe":
        os.mkfifo("place")
    elif kind == "folder":
        os.mkdir("place")
    else:
        os.symlink("/dev/null", "place")
    before = os.lstat("place")
    result = CliRunner().invoke(main, ["prompts", "--limit", "2", "--out", "place"])
    assert result.exit_code == 2
    assert "; give a file" in result.stderr
    assert (os.lstat("place").st_mode, os.lstat("place").st_ino) == (before.st_mode, before.st_ino)


@pytest.mark.parametrize(
    "option", ["scan heads --prompts", "tune full --out new --data", "scan concepts --concepts", "evaluate --tasks"]
)
def test_pipes_and_devices_are_not_read(option: str) -> None:
    """Which may never end."""
    os.mkfifo("pipe")
    for place in ("pipe", "/dev/zero"):
        result = CliRunner().invoke(main, [*option.split(), place])
        assert result.exit_code == 2, result.output
        assert re.search("a device or a pipe; give a file", result.stderr)


def test_a_training_of_more_samples_than_any_machine_draws() -> None:
    words = ["tune", "full", "--data", "one_digit", "--out", "new", "--steps", "99999999"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "--steps 99,999,999 with --batch 128 would draw more than" in result.stderr.splitlines()[-1]
