"""Options of all commands together: what is required is asked for, one idea has one name, former names still work."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.cli.plan import WORKFLOWS
from mathinterp.cli.reference import commands
from mathinterp.experiments.registry import experiments

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
        assert (name, "--from") in required
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
        last = [each for each in COMMANDS[name].params if isinstance(each, click.Argument) and each.required][-1]
        assert f"Missing argument '{last.make_metavar(click.Context(main))}'" in told, "words fill the first places"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tune precise", "tune full", "tune lora", "tune sweep", "tune prune"])
def test_a_training_needs_out_unless_it_is_dry(name: str) -> None:
    data = [] if name in ("tune sweep", "tune prune") else ["--data", "signed_two_digit_train"]
    assert "Missing option '--out'" in mistake(*name.split(), *data)


def test_one_idea_has_one_name() -> None:
    """--from for a run to build on, --control-seeds for how many random draws; and what the help shows is all."""
    shown = {flag for command in COMMANDS.values() for each in command.params for flag in each.opts}
    assert {flag for flag in shown if flag.endswith("from")} == {"--from"}
    assert {flag for flag in shown if "control-seed" in flag} == {"--control-seeds"}
    building = {name for name, command in COMMANDS.items() if any("--from" in each.opts for each in command.params)}
    assert building >= {"knockout", "maskkeep", "scan graph", "neuron", "tune precise", "tune zero"}


@pytest.mark.parametrize(
    ("words", "former", "field"),
    [
        (["knockout"], "--rank-from", "rank_from"),
        (["scan", "knockout"], "--rank-from", "rank_from"),
        (["plan", "maskkeep"], "--neurons-from", "neurons_from"),
        (["scan", "graph"], "--neurons-from", "neurons_from"),
        (["neuron", "0.1"], "--neurons-from", "neurons_from"),
        (["tune", "precise", "--data", "x", "--out", "new"], "--heads-from", "heads_from"),
        (["tune", "zero", "--out", "new"], "--heads-from", "heads_from"),
        (["tune", "precise", "--data", "x", "--out", "new"], "--control-seed", "control_seed"),
    ],
)
def test_former_names_still_work_and_are_not_shown(words: list[str], former: str, field: str) -> None:
    name = " ".join(words[: 2 if words[0] in ("scan", "plan", "tune") else 1])
    command = COMMANDS[name]
    rest = words[len(name.split()) :]
    now = next(each.opts[0] for each in command.params if each.name == field)
    assert now in ("--from", "--control-draw")
    for flag in (former, now, f"{former}=", f"{now}="):
        given = [f"{flag}77"] if flag.endswith("=") else [flag, "77"]
        assert str(command.make_context(name, [*rest, *given]).params[field]) == "77"
    assert former not in command.get_help(click.Context(command, info_name=name))


def test_plan_has_a_word_for_every_experiment_and_workflow() -> None:
    """Those that are steps of a workflow say that their cost is not known, whatever options are given."""
    steps = {name for name, experiment in experiments().items() if not experiment.on_command_line}
    assert {"concept_zeroing", "gender_neurons", "edit", "prune", "lora_sweep", "sweep_neurons", "evaluate"} == steps
    assert steps | {"pipeline", "sweep"} == set(WORKFLOWS)
    for name, words in WORKFLOWS.items():
        assert words in COMMANDS
        result = CliRunner().invoke(main, ["plan", name, "--model", "smollm2", "--top", "3"])
        assert result.exit_code == 0, result.output
        assert result.stdout == f"{name}: part of 'mathinterp {words}'; its cost is not known in advance.\n"
    told = json.loads(CliRunner().invoke(main, ["plan", "edit", "--json"]).stdout)
    assert told == {"scan": "edit", "command": "edit", "flops": None}


def test_mistakes_name_the_options_as_they_are_now() -> None:
    assert "--heads or --from" in mistake("tune", "zero", "--out", "new", "--heads", "0.1", "--from", "x")
    assert "--heads, --from or --heads-sql" in mistake(
        "tune", "precise", "--data", "x", "--out", "new", "--heads", "0.1", "--heads-from", "x"
    )
    assert "--from RUN_ID" in mistake("knockout")
    assert "scan iterative --steps N" in mistake("knockout", "--iterative", "4")
