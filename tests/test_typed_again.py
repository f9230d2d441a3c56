"""The command in a run's record, as it is shown to be typed again, for the store that is looked at: a record that
somebody crafted can give no other.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mathinterp.cli import runs_shown
from mathinterp.cli.main import main
from mathinterp.cli.output import store_option
from mathinterp.cli.reference import commands
from mathinterp.versions import MAKES_RUNS, PACKAGE, command
from tests.test_runs import half_run

CRAFTED = {  # a record's command -> what a reader is told to type
    "rm -rf ~": None,
    "mathinterp help": None,
    "mathinterp sql 'SELECT 1'": None,
    "mathinterp runs delete 0123456789ab --yes": None,
    "mathinterp submit evil.py --address http://evil.example": None,
    "mathinterp scan heads --prompts 'open": None,
    "mathinterp scan heads\nrm -rf ~": None,
    "mathinterp scan heads \x1b[8m": None,
    "python evil.py": None,
    "python ray_jobs/../evil.py": None,
    "python ray_jobs/head_scan.py --limit 8": "python ray_jobs/head_scan.py --limit 8",
    "mathinterp scan heads; rm -rf ~": "mathinterp scan 'heads;' rm -rf '~'",
    "mathinterp scan heads --limit $(reboot)": "mathinterp scan heads --limit '$(reboot)'",
    "mathinterp scan evil:Class --limit 8": "mathinterp scan heads --limit 8",
    "mathinterp scan --limit 8 evil:Class": "mathinterp scan --limit 8 heads",
    "mathinterp scan heads --trust-remote-code --model evil/x": "mathinterp scan heads --model evil/x",
    "mathinterp scan heads --address ray://evil:1 --limit 8": "mathinterp scan heads --limit 8",
    "mathinterp scan heads --address=ray://evil:1 --service=http://evil --limit 8": "mathinterp scan heads --limit 8",
    "mathinterp maskkeep --from head:6 --out x": "mathinterp maskkeep --from head:6 --out x",
    "mathinterp -q scan heads --limit 8": "mathinterp -q scan heads --limit 8",
    "mathinterp -qv --log-format json scan heads": "mathinterp -qv --log-format json scan heads",
    "mathinterp --verbose --log-format=json scan heads": "mathinterp --verbose --log-format=json scan heads",
    "mathinterp --log-format scan runs delete 0123456789ab --yes": None,
    "mathinterp -q scan evil:Class": "mathinterp -q scan heads",
    "mathinterp -q": None,
    "mathinterp -x scan heads": None,
    "python -q ray_jobs/head_scan.py": None,
    "mathinterp scan heads --store '/their store' --limit 8": "mathinterp scan heads --limit 8",
    "mathinterp scan heads --store=s3://theirs": "mathinterp scan heads",
}  # fmt: skip


def told(*words: str) -> str:
    return CliRunner().invoke(main, words).output


@pytest.mark.parametrize("crafted", CRAFTED, ids=range(len(CRAFTED)))
def test_a_record_can_give_nobody_a_command_to_paste(tmp_path: Path, crafted: str) -> None:
    tmp_path /= "a b's"
    half, wanted = half_run(str(tmp_path)), CRAFTED[crafted]
    place = tmp_path / "runs" / f"{half}.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "command": crafted}))
    wanted = wanted and wanted + store_option(str(tmp_path))
    shown = told("runs", "show", half, "--store", str(tmp_path))
    assert f"To go on: {wanted or 'the command or call that began it'}\n" in shown
    assert json.loads(told("runs", "show", half, "--store", str(tmp_path), "--json"))["command"] == wanted
    (file,) = (tmp_path / "head_scan" / f"run_id={half}").iterdir()
    file.write_bytes(b"damaged")
    checked = told("check", "--store", str(tmp_path))
    assert f"Mend: {wanted or f'the command that made run {half}, again'}" in checked
    if wanted is None:
        assert crafted not in shown + checked


def test_a_submitted_job_leaves_the_command_that_repeats_it(tmp_path: Path, monkeypatch) -> None:
    words = ["scan", "heads", "--address", "auto", "--limit", "8"]
    monkeypatch.setattr("sys.argv", [str(PACKAGE / "__main__.py"), *words])
    half = half_run(str(tmp_path))
    again = f"mathinterp scan heads --limit 8{store_option(str(tmp_path))}"
    assert f"To go on: {again}\n" in told("runs", "show", half, "--store", str(tmp_path))
    monkeypatch.setattr("sys.argv", [str(tmp_path / "__main__.py"), "scan", "heads"])
    assert command() is None


def test_the_default_store_is_not_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["mathinterp", "scan", "heads", "--store", "elsewhere", "--limit", "8"])
    half = half_run("results")
    assert "To go on: mathinterp scan heads --limit 8\n" in told("runs", "show", half)


def test_the_store_is_named_before_what_follows_the_options() -> None:
    assert (
        runs_shown.in_store("mathinterp scan heads -- 'a b'", "s 2") == "mathinterp scan heads --store 's 2' -- 'a b'"
    )


def test_none_of_the_commands_that_make_runs_is_missing() -> None:
    running = {
        name.split()[0]
        for name, command in commands(main)
        if {"model", "store", "address"} <= {option.opts[0].lstrip("-") for option in command.params}
    }
    assert running - {"plan"} <= MAKES_RUNS
    assert {name.split()[0] for name, _ in commands(main)} >= MAKES_RUNS
