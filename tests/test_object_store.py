"""Stores on s3:// (moto) and gs:// (gcp-storage-emulator) on this machine that refuse a tenth of all requests: commit,
kill -9, resume, two drivers, SQL, whole runs; and stores that are down, forbidden or not there.

Needs `pip install 'mathinterp[s3-test,gcs-test]'`; each half is skipped where its packages are absent. What only gs://
has: tests/test_google_store.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.store import Store
from tests.gs_server import gs_server
from tests.refusing import BUCKET, Server
from tests.runs_case import FEW, many_files, rows_of
from tests.s3_server import s3_server

pytestmark = [pytest.mark.slow, pytest.mark.bundled]

SHARDS = 5  # of the bundled model: its heads, and the baseline
REFUSED = 0.1
DRIVER = """
import os, signal, sys, time
from pathlib import Path
import mathinterp as mi
from mathinterp.store import Store

what, url, together = sys.argv[1], sys.argv[2], Path(sys.argv[3])
write, open_run = Store.write_shard, Store.open_run

def die_after_the_second(store, *words):
    receipt = write(store, *words)
    die_after_the_second.written += 1
    if die_after_the_second.written == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return receipt

def begin_together(store, **words):
    run = open_run(store, **words)
    (together / str(os.getpid())).touch()
    while len(list(together.iterdir())) < 2:
        time.sleep(0.01)
    return run

if what == "killed":
    die_after_the_second.written = 0
    Store.write_shard = die_after_the_second
if what == "together":
    Store.open_run = begin_together
run = mi.run(mi.experiments.Heads(), mi.load("bundled"), mi.prompts("two_digit", limit=8), store=url, progress=False)
print(run.ended.reused, run.ended.done)
"""


@pytest.fixture(scope="module", params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with {"s3": s3_server, "gs": gs_server}[request.param]() as running:
        yield running


def driver(what: str, url: str, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", DRIVER, what, url, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def rows(store: str) -> pd.DataFrame:
    return mi.open_store(store).sql("SELECT * FROM head_scan ORDER BY ALL")


def shards(store: str) -> dict[str, str]:
    """Name -> version of what is in the bucket now."""
    found = Store(store).files.find("", ".parquet")
    return {name: version.stamp for name, version in found.items() if "/shard-" in name}


@pytest.fixture(scope="module")
def half_done(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str], str]:
    """A store whose first driver was killed with two shards in the bucket; what these are; an undisturbed local one."""
    local, url = str(tmp_path_factory.mktemp("local")), server.url("half")
    mi.run(mi.experiments.Heads(), mi.load("bundled"), mi.prompts("two_digit", limit=8), store=local, progress=False)
    server.refuse(REFUSED)
    killed = driver("killed", url, tmp_path_factory.mktemp("none"))
    killed.communicate(timeout=200)
    assert killed.returncode == -signal.SIGKILL
    there = shards(url)
    assert len(there) == 2
    return url, there, local


def test_two_drivers_end_a_half_done_run_together_without_a_row_lost_or_doubled(
    server: Server, half_done: tuple[str, dict[str, str], str], tmp_path: Path
) -> None:
    url, there, local = half_done
    both = [driver("together", url, tmp_path) for _ in range(2)]
    told = [each.communicate(timeout=200) for each in both]
    assert [each.returncode for each in both] == [0, 0], told
    reused_done = [[int(number) for number in out.split()] for out, _ in told]
    assert [sum(numbers) for numbers in reused_done] == [SHARDS] * 2
    assert min(reused for reused, _ in reused_done) == len(there)
    if server.scheme == "s3":  # gcsfs repeats after a second and more: the other may have written a shard meanwhile
        assert reused_done == [[len(there), SHARDS - len(there)]] * 2
    assert server.counts()["refused"] > 5
    now = shards(url)
    assert len(now) == SHARDS
    assert there.items() <= now.items(), "what was committed was not written again"
    found = rows(url)
    assert len(found) > 64 * 8
    pd.testing.assert_frame_equal(found, rows(local))
    assert not found.duplicated(["layer", "head", "prompt_id", "position"]).any()


def test_list_sql_check_and_report_of_it_under_refusals(
    server: Server, half_done: tuple[str, dict[str, str], str], tmp_path: Path
) -> None:
    url, _, local = half_done
    mi.run(mi.experiments.Heads(), mi.load("bundled"), mi.prompts("two_digit", limit=8), store=url, progress=False)

    def printed(*words: str) -> str:
        done = CliRunner().invoke(main, [*words, "--store", url])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    (run,) = json.loads(printed("sql", "--json", "SELECT run_id, shards, shards_done, status FROM runs"))
    assert (run["shards"], run["shards_done"], run["status"]) == (SHARDS, SHARDS, "finished")
    (checked,) = json.loads(printed("check", "--json"))["runs"]
    assert (checked["intact"], checked["missing"]) == (SHARDS, [])
    assert "index.html: 1 run;" in printed("report", "--out", str(tmp_path / "report"))
    assert (tmp_path / "report" / "index.html").is_file()
    effects = "SELECT * FROM head_effects ORDER BY ALL"
    pd.testing.assert_frame_equal(mi.open_store(url).sql(effects), mi.open_store(local).sql(effects))


def test_a_query_makes_at_most_three_requests_per_file(
    server: Server, half_done: tuple[str, dict[str, str], str]
) -> None:
    url, *_ = half_done
    server.refuse(0)
    files = len(Store(url).files.find("", ""))
    server.counts()
    done = CliRunner().invoke(main, ["sql", "--store", url, "--json", "SELECT * FROM head_effects"])
    server.refuse(REFUSED)
    assert done.exit_code == 0, done.output
    assert 0 < sum(server.counts().values()) <= 3 * files


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_requests_whose_refusal_has_no_text_are_repeated_too(server: Server) -> None:
    files = Store(server.url("head")).files
    files.write("runs/x.json", b"1")
    server.refuse(0.3)
    server.counts()
    for _ in range(30):  # answers to HEAD have none
        remote = files._remote
        assert remote is not None
        remote._filesystem.invalidate_cache()
        assert remote._filesystem.info(f"{BUCKET}/head/runs/x.json")["size"] == 1
    server.refuse(REFUSED)
    assert server.counts()["refused"] > 3


def test_a_shard_is_seen_whole_or_not_at_all(server: Server) -> None:
    store = Store(server.url("commit"))
    sizes, contents = set(), [bytes([digit]) * 2**20 for digit in range(8)]
    for content in contents:
        store.files.write("table/run_id=x/shard-00000.parquet", content)
        assert Store(store.url).files.read("table/run_id=x/shard-00000.parquet") == content
        sizes |= {version.size for version in Store(store.url).files.find("", "").values()}
    assert sizes == {2**20}, "no temporary key, no part"


def test_runs_are_listed_merged_checked_exported_and_deleted_under_refusals(server: Server, tmp_path: Path) -> None:
    server.refuse(REFUSED)
    store, run = many_files(server.url("many"), FEW)
    before = rows_of(store, run)

    def printed(*words: str) -> str:
        done = CliRunner().invoke(main, ["runs", *words, "--store", server.url("many")])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    (listed,) = json.loads(printed("list", "--json"))
    assert (listed["status"], listed["shards_done"]) == ("finished", len(FEW))
    printed("compact", run)
    assert len(Store(store.url).files.find("head_scan", ".parquet")) == 1
    assert rows_of(Store(store.url), run) == before
    (checked,) = json.loads(printed("check", "--json"))["runs"]
    assert (checked["intact"], checked["missing"]) == (2, [])
    printed("export", run, "--out", str(tmp_path / "rows.parquet"))
    assert len(pd.read_parquet(tmp_path / "rows.head_scan.parquet")) == len(before)
    printed("delete", run, "--yes")
    assert {name for name in Store(store.url).files.find("", "") if "/" in name} == set()
    assert server.counts()["refused"] > 0


def test_a_file_that_is_gone_may_be_deleted_again(server: Server) -> None:
    server.refuse(0)
    files = Store(server.url("twice")).files
    files.write("runs/x.json", b"1")
    files.remove("runs/x.json")
    files.remove("runs/x.json")  # as when the answer to the first was lost
    assert files.find("", "") == {}


def test_a_store_that_is_down_for_good_is_told_in_one_line_within_about_a_minute(server: Server) -> None:
    server.refuse(1)
    elsewhere = {
        name: value.replace(server.address, "http://127.0.0.1:9") for name, value in server.environment.items()
    }
    program = [sys.executable, "-m", "mathinterp"]
    scan = ["scan", "heads", "--limit", "8", "--layers", "0"]
    began = time.monotonic()
    asked = [
        subprocess.Popen(
            [*program, *words, "--store", server.url("down")], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, **changes},
        )
        for words in (["sql", "SELECT 1"], scan) for changes in ({}, elsewhere)
    ]  # fmt: skip
    told = [each.communicate(timeout=150) for each in asked]
    server.refuse(0)
    assert time.monotonic() - began < 90
    assert [each.returncode for each in asked] == [1] * 4, told
    for number, (out, err) in enumerate(told):
        assert (out, len(err.splitlines())) == ("", 1), err
        tried = "cannot be read|is not writable" if number > 1 else "cannot be read"  # a scan may write first
        where = re.escape(server.url("down"))
        assert re.search(f"store '{where}' ({tried}) .*; the same command goes on from here", err), err


def test_a_store_without_the_right_to_it_is_told_in_one_line(server: Server) -> None:
    scan = ["scan", "heads", "--limit", "8", "--layers", "0"]
    for status in {"s3": (403,), "gs": (401, 403)}[server.scheme]:
        server.refuse(1, status)
        commands = (["sql", "SELECT 1"], ["report"], scan)
        told = [CliRunner().invoke(main, [*words, "--store", server.url("secret")]) for words in commands]
        server.refuse(0)
        lines = [done.output.strip() for done in told]
        assert [(done.exit_code, line.count("\n")) for done, line in zip(told, lines, strict=True)] == [(2, 0)] * 3, (
            lines
        )
        assert "give this machine the right to it" in lines[0]
        assert "is not writable" in lines[2]


def test_an_empty_prefix_and_a_bucket_that_is_not_there_are_told_in_one_line(server: Server) -> None:
    for words in (["sql", "SELECT 1"], ["check"], ["report"]):
        done = CliRunner().invoke(main, [*words, "--store", server.url("nothing")])
        assert (done.exit_code, len(done.output.strip().splitlines())) == (2, 1), done.output
        assert "there is no store" in done.output
    scan = ["scan", "heads", "--limit", "8", "--layers", "0", "--store", server.url("results", "no-such-bucket")]
    done = CliRunner().invoke(main, scan)
    assert done.exit_code == 2, done.output
    assert "is not writable (The specified bucket does not exist)" in done.output
