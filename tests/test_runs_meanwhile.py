"""``runs`` of a store in which another process merges or deletes at the same time: what is read is of one moment."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.store import Store, comparing, exporting, integrity, runs
from tests.runs_case import FEW, many_files, places

WHERE = {"record": (runs.Runs, "record"), "compared": (comparing, "require_undamaged")}


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return places(tmp_path)[request.param]


def command(*words: str | Path):
    done = CliRunner().invoke(main, ["runs", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def two_runs(place: str) -> tuple[str, str]:
    return many_files(place, FEW)[1], many_files(place, FEW, model_fingerprint="other")[1]


def once_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], Any]) -> None:
    """The other process acts when this function has ended for the first time."""
    own = getattr(owner, name)

    def acted(*given: Any, **more: Any) -> Any:
        found = own(*given, **more)
        monkeypatch.setattr(owner, name, own)
        act()
        return found

    monkeypatch.setattr(owner, name, acted)


def test_check_leaves_out_a_run_that_is_deleted_meanwhile(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for which in (0, 1):  # the one that was read just now, and the next one
        both = sorted(two_runs(place))
        once_after(monkeypatch, integrity, "entries", lambda run=both[which]: Store(place).runs.delete(run))  # type: ignore[misc]
        done = command("check", "--store", place, "--json")
        assert done.exit_code == 0, done.stdout
        assert [each["run_id"] for each in json.loads(done.stdout)["runs"]] == [both[1 - which]]


def test_check_misses_no_file_of_a_run_that_is_merged_meanwhile(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = sorted(two_runs(place))
    once_after(monkeypatch, integrity, "entries", lambda: [Store(place).runs.compact(run) for run in both])
    done = command("check", "--store", place, "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["faults"], found["problems"]) == (0, [], [])
    assert [(each["shards"], each["intact"]) for each in found["runs"]] == [(2, 2), (2, 2)]


def test_a_card_is_of_one_moment(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = two_runs(place)
    once_after(monkeypatch, *WHERE["record"], lambda: Store(place).runs.compact(run))
    card = Store(place).runs.show(run)
    assert (card.run.status, card.run.shards_done, card.run.files, card.missing) == ("finished", 5, 2, [])
    once_after(monkeypatch, *WHERE["record"], lambda: Store(place).runs.delete(other))
    done = command("show", other, "--store", place)
    assert done.exit_code == 2
    assert "there is no run" in done.stderr


@pytest.mark.parametrize("when", WHERE)
def test_a_comparison_is_of_one_moment(place: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = two_runs(place)
    once_after(monkeypatch, *WHERE[when], lambda: Store(place).runs.compact(run))
    found = Store(place).runs.compare(run, other)
    assert (found.same_rows, found.shards, found.incomplete) == (True, ("5 of 5", "5 of 5"), (None, None))
    once_after(monkeypatch, *WHERE[when], lambda: Store(place).runs.delete(run))
    done = command("compare", run, other, "--store", place)
    read_before = place.startswith("memory") and when == "compared"  # small files of object stores are kept
    assert ("All rows are the same." if read_before else "there is no run") in done.output
    assert done.exit_code == (0 if read_before else 2)


@pytest.mark.slow
def test_an_export_is_of_one_moment(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = two_runs(place)
    once_after(monkeypatch, *WHERE["record"], lambda: Store(place).runs.compact(run))
    done = command("export", run, "--out", tmp_path / "x.csv", "--store", place)
    assert done.exit_code == 0
    assert "unfinished" not in done.stderr
    assert "head_scan: 14 rows" in done.stdout
    for owner, name in ((runs.Runs, "record"), (exporting, "require_undamaged"), (exporting, "export")):
        other = many_files(place, FEW, model_fingerprint="other")[1]
        once_after(monkeypatch, owner, name, lambda run=other: Store(place).runs.delete(run))  # type: ignore[misc]
        done = command("export", other, "--out", tmp_path / f"{name}.csv", "--store", place)
        assert done.exit_code == 2
        assert not (tmp_path / f"{name}.head_scan.csv").exists(), "no rows are no export"
