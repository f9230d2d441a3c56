"""The served page where things go wrong: odd names, times that Python cannot hold, a store that is away."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mathinterp.report import live
from mathinterp.report.explore import Exploring, explore
from mathinterp.store import Store
from tests.explorer_pages import MANY, ODD
from tests.small_store import fill, open_run
from tests.test_explore import PROMPTS, asked, baseline, heads, sql


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exploring]:
    folder = tmp_path_factory.mktemp("faults") / "store"
    fill(Store(folder), PROMPTS, baseline(), heads())
    with explore(str(folder)) as page:
        yield page


def test_a_time_that_python_cannot_hold_is_told_in_one_line(page: Exploring) -> None:
    for value in ("'infinity'::TIMESTAMP", "'290000-01-01'::DATE"):
        status, body = sql(page, f"SELECT {value} AS t")
        assert status == 400
        assert "cast times outside the years 1 to 9999" in body["error"]
        assert sql(page, f"SELECT ({value})::VARCHAR AS t")[0] == 200


def test_long_names_and_errors_are_cut(page: Exploring) -> None:
    assert len(sql(page, f"SELECT * FROM {'x' * 100_000}")[1]["error"]) < 2_100
    [column] = sql(page, f'SELECT 1 AS "{"x" * 100_000}"')[1]["columns"]
    assert column.endswith("… (100,000 characters)")
    assert len(column) < 600


def test_odd_names_of_runs_that_are_not_finished_cannot_reach_beyond_their_line(tmp_path: Path) -> None:
    """A paragraph separator ends the page's isolation, and the override after it would turn the count of shards."""
    open_run(Store(tmp_path), model=MANY, prompts=ODD)
    with explore(str(tmp_path)) as page:
        [run] = json.loads(asked(page, "GET", "/state")[1])["others"]
    assert run["prompts"].startswith("</script><img src=x onerror=alert(1)>")
    assert all(run[name].isprintable() and len(run[name]) < 210 for name in ("run", "scan", "model", "prompts"))


def test_a_store_that_is_away_does_not_look_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(live, "SHARE", 10.0**9)
    fill(Store(tmp_path / "store"), PROMPTS, baseline(), heads())
    with explore(str(tmp_path / "store")) as page:
        count = "SELECT count(*) AS n FROM head_scan"
        assert sql(page, count)[1]["rows"] == [["8"]]
        (tmp_path / "store").rename(tmp_path / "away")
        for answer in (
            sql(page, count),
            asked(page, "POST", "/sql.csv", {"query": count}),
            asked(page, "GET", "/state"),
        ):
            assert answer[0] == 400
            assert "there is no store at" in str(answer[1])
        (tmp_path / "away").rename(tmp_path / "store")
        assert sql(page, count)[1]["rows"] == [["8"]]
        assert json.loads(asked(page, "GET", "/state")[1])["finished"] == 1
