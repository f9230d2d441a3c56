"""What a shell is told to complete, as it asks: through the environment, by the program itself."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete

from mathinterp.cli.main import main
from mathinterp.models.sources import NAMES
from mathinterp.prompts import PROMPT_SETS
from mathinterp.store import Store
from tests.small_store import open_run


def completed(*words: str) -> list[tuple[str, str]]:
    """Kind and value of what may follow ``words``, the last of which is begun."""
    found = BashComplete(main, {}, "mathinterp", "_MATHINTERP_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [(each.type, each.value) for each in found]


@pytest.mark.slow
def test_the_program_answers_a_shell() -> None:
    asked = {"COMP_WORDS": "mathinterp scan he", "COMP_CWORD": "2", "_MATHINTERP_COMPLETE": "bash_complete"}
    code = "import sys; sys.argv = ['mathinterp']; from mathinterp.cli.entry import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **asked}, check=True
    )
    assert done.stdout.split() == ["plain,head_pairs", "plain,heads"]
    assert done.stderr == ""


def test_commands_and_names() -> None:
    assert ("plain", "scan") in completed("sc")
    assert completed("scan", "heads", "--model", "") == [("plain", name) for name in NAMES]
    assert completed("scan", "heads", "--prompts", "two") == [("plain", n) for n in PROMPT_SETS if n.startswith("two")]
    assert completed("scan", "heads", "--model", "./mod") == [("file", "./mod")]
    assert completed("prompts", "--adapter", "smol") == [("plain", "smollm2-arithmetic")]
    assert completed("sql", "--store", "res") == [("dir", "res")]


@pytest.mark.parametrize(
    "words",
    [("runs", "show"), ("runs", "compare", "other"), ("check", "--runs"), ("report", "--run"), ("explore", "--compare"),
     ("knockout", "--from"), ("scan", "knockout", "--from"), ("scan", "heads", "--reuse"), ("stability", "--run"),
     ("mib", "evaluate", "--from"), ("mib", "export", "--from"), ("neuron", "1.2", "--from"),
     ("tune", "zero", "--from")],
)  # fmt: skip
def test_runs_of_the_store(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = open_run(Store("mine")).run_id
    open_run(Store("results"), scan="mlps")
    (default,) = (file.stem for file in Path("results/runs").iterdir())
    command, option = (words[:-1], words[-1:]) if words[-1].startswith("--") else (words, ())
    assert completed(*command, *option, "") == [("plain", default)]
    assert completed(*command, "--store", "mine", *option, run[:3]) == [("plain", run)]
    assert completed(*command, "--store", "s3://bucket/results", *option, "") == []
    assert completed(*command, "--store", "nowhere", *option, "") == []


def test_every_option_that_takes_a_run_or_a_store_completes_it() -> None:
    missing = []

    def look(command: click.Command, path: str) -> None:
        context = click.Context(command)
        for each in command.params:
            about_runs = each.metavar in ("RUN", "RUN_ID", "RUN RUN", "RUN...") or "--from" in each.opts
            if (about_runs or "--store" in each.opts) and each._custom_shell_complete is None:
                missing.append(f"{path} {each.name}")
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                look(found, f"{path} {name}")

    look(main, "mathinterp")
    assert missing == []
