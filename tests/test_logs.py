"""--log-format json: every line on stderr is one JSON object that says when, how grave, who, what, and of which run."""

import json
import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mathinterp import logs
from mathinterp.cli.main import Warnings, main
from mathinterp.cli.running import print_run
from mathinterp.cli.verbosity import set_level
from mathinterp.cluster import progress
from mathinterp.cluster.places import RaysWords
from mathinterp.cluster.run import run_scan
from mathinterp.errors import Unfinished, UserError
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts.prompt import Prompt
from tests.toy_scan import ToyScan

PROMPTS = [Prompt("p", "3 plus 5 is", "8", operation="add")]


def lines(text: str) -> list[dict]:
    """What each line says; all of them are JSON."""
    found = [json.loads(line) for line in text.splitlines()]
    for line in found:
        assert {"time", "level", "logger", "message"} <= line.keys()
        assert datetime.fromisoformat(line["time"]).utcoffset().total_seconds() == 0
        assert line["level"] in ("INFO", "WARNING", "ERROR")
    return found


@pytest.fixture
def as_json(monkeypatch: pytest.MonkeyPatch):
    """As a command under --log-format json logs, in this process."""
    package, handler = logging.getLogger("mathinterp"), Warnings()
    monkeypatch.setattr(logs, "AS_JSON", True)
    monkeypatch.setattr(package, "handlers", [handler])
    level = package.level
    yield
    set_level(level)


def disturbed(tmp_path: Path) -> str:
    """Run a scan whose shard 1 fails once and whose shard 2 always fails; returns the run's id."""
    scan = ToyScan(4, 0.3, str(tmp_path), once={1: "raise"}, always={2: "raise"})
    run = run_scan(scan, ModelSpec("random:llama-tiny"), PROMPTS, str(tmp_path / "store"), max_attempts=2)
    print_run(run)
    return run.run_id


@pytest.mark.slow
def test_lines_name_the_run_and_the_shard_and_progress_is_among_them(as_json, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.2)
    set_level(logging.INFO)
    run = disturbed(tmp_path)
    said = lines(capsys.readouterr().err)
    assert {line["run_id"] for line in said} == {run}
    failed = [(line["level"], line["shard"]) for line in said if "failed, attempt" in line["message"]]
    assert sorted(failed) == [("WARNING", "mlp_scan/00001")] + 2 * [("WARNING", "mlp_scan/00002")]
    (given_up,) = [line for line in said if "was given up" in line["message"]]
    assert (given_up["level"], given_up["shard"]) == ("ERROR", "mlp_scan/00002")
    shown = [line for line in said if line["logger"] == "mathinterp.cluster.progress" and line["level"] == "INFO"]
    assert shown[-1]["shards"] == 4
    assert shown[-1]["shards_done"] >= 1
    computed = [line["shard"] for line in said if line["logger"] == "mathinterp.cluster.replica"]
    assert sorted(computed) == ["mlp_scan/00000", "mlp_scan/00001", "mlp_scan/00003"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "levels"), [(logging.WARNING, {"WARNING", "ERROR", "INFO"}), (logging.ERROR, {"ERROR"})]
)
def test_levels_hold_for_json_too(as_json, tmp_path, capsys, monkeypatch, level, levels):
    """INFO without --verbose: progress alone; --quiet: errors alone."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.2)
    set_level(level)
    disturbed(tmp_path)
    said = lines(capsys.readouterr().err)
    assert {line["level"] for line in said} == levels
    assert {line["logger"] for line in said if line["level"] == "INFO"} <= {"mathinterp.cluster.progress"}


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("`heads` are none"), 2, "mathinterp: --heads are none"),
        (Unfinished("the store is full"), 1, "Error: the store is full; the same command goes on from here"),
        (click.UsageError("no such thing"), 2, "mathinterp: no such thing; see 'main sql --help'"),
    ],
)
def test_an_error_is_one_line_in_either_form(monkeypatch, error, code, message):
    def fails(**_: object) -> None:
        logging.getLogger("mathinterp.x").warning("`heads` look odd")
        raise error

    monkeypatch.setattr("mathinterp.cli.sql.sql.callback", fails)
    done = CliRunner().invoke(main, ["sql", "SELECT 1", "--log-format", "json"])
    assert done.exit_code == code
    assert [(line["level"], line["message"]) for line in lines(done.stderr)] == [
        ("WARNING", "--heads look odd"), ("ERROR", message)
    ]  # fmt: skip
    done = CliRunner().invoke(main, ["sql", "SELECT 1"])  # asked for once, it does not stay
    assert (done.exit_code, done.stderr.splitlines()) == (code, ["warning: --heads look odd", message])


def test_a_bad_option_is_told_in_json_wherever_the_form_is_asked_for(tmp_path):
    words = ["scan", "heads", "--store", str(tmp_path), "--limit", "0", "--log-format", "json"]
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, len(lines(done.stderr))) == (2, 1)
    for words in (["sql", "SELECT 1", "--log-format", "yaml"], ["--log-format", "yaml", "sql", "SELECT 1"]):
        refused = CliRunner().invoke(main, words)
        assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
        assert "'yaml' is not one of 'text', 'json'; see '" in refused.stderr


@pytest.mark.slow
def test_an_interruption_is_told_in_json():
    code = ("import os, signal; from mathinterp import logs; from mathinterp.cli import interrupt; logs.AS_JSON = True;"
            "interrupt.install(); os.kill(os.getpid(), signal.SIGTERM)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 143
    assert [line["level"] for line in lines(done.stderr)] == ["ERROR"]


def test_a_replica_prints_for_rays_logs_where_nobody_else_takes_them(monkeypatch, capsys):
    package = logging.getLogger("mathinterp")
    monkeypatch.setattr(package, "handlers", [])
    level = package.level
    logs.to_stderr()
    logs.to_stderr()
    with logs.about(run_id="r", shard="baseline/00000"):
        logging.getLogger("mathinterp.x").info("5 rows")
        try:
            raise ValueError("bad\nworse")
        except ValueError:
            logging.getLogger("mathinterp.x").exception("it failed")
    set_level(level)
    first, second = lines(capsys.readouterr().err)
    assert (first["run_id"], first["shard"], first["message"]) == ("r", "baseline/00000", "5 rows")
    assert "ValueError: bad\nworse" in second["traceback"]


def test_what_ray_prints_of_dead_nodes_is_for_verbose_alone(capsys, caplog):
    words = RaysWords()
    print("\x1b[33m(raylet)\x1b[0m Raylet is terminated.\n  20 lines of its log", file=words)
    print("something else", file=words)
    assert capsys.readouterr().err == "something else\n"
    caplog.set_level(logging.INFO, "mathinterp")
    print("(raylet) The node has been marked dead", file=words)
    assert caplog.messages == ["(raylet) The node has been marked dead"]
