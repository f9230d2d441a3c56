"""A store on S3 (moto on this machine) that refuses a tenth of all requests: commit, kill -9, resume, two drivers, SQL.

Needs `pip install 'mathinterp[s3-test]'` (moto, s3fs); skipped where they are absent.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.store import Store
from tests.s3_server import BUCKET, S3, s3_server

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


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


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
def half_done(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str], str]:
    """A store whose first driver was killed with two shards in the bucket; what these are; an undisturbed local one."""
    local, url = str(tmp_path_factory.mktemp("local")), f"s3://{BUCKET}/half"
    mi.run(mi.experiments.Heads(), mi.load("bundled"), mi.prompts("two_digit", limit=8), store=local, progress=False)
    s3.refuse(REFUSED)
    killed = driver("killed", url, tmp_path_factory.mktemp("none"))
    killed.communicate(timeout=200)
    assert killed.returncode == -signal.SIGKILL
    there = shards(url)
    assert len(there) == 2
    return url, there, local


def test_two_drivers_end_a_half_done_run_together_without_a_row_lost_or_doubled(
    s3: S3, half_done: tuple[str, dict[str, str], str], tmp_path: Path
) -> None:
    url, there, local = half_done
    both = [driver("together", url, tmp_path) for _ in range(2)]
    told = [each.communicate(timeout=200) for each in both]
    assert [each.returncode for each in both] == [0, 0], told
    assert [out.split() for out, _ in told] == [["2", str(SHARDS - 2)]] * 2
    assert s3.counts()["refused"] > 5
    now = shards(url)
    assert len(now) == SHARDS
    assert there.items() <= now.items(), "what was committed was not written again"
    found = rows(url)
    assert len(found) > 64 * 8
    pd.testing.assert_frame_equal(found, rows(local))
    assert not found.duplicated(["layer", "head", "prompt_id", "position"]).any()


def test_list_sql_check_and_report_of_it_under_refusals(
    s3: S3, half_done: tuple[str, dict[str, str], str], tmp_path: Path
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


def test_a_query_makes_at_most_three_requests_per_file(s3: S3, half_done: tuple[str, dict[str, str], str]) -> None:
    url, *_ = half_done
    s3.refuse(0)
    files = len(Store(url).files.find("", ""))
    s3.counts()
    done = CliRunner().invoke(main, ["sql", "--store", url, "--json", "SELECT * FROM head_effects"])
    s3.refuse(REFUSED)
    assert done.exit_code == 0, done.output
    assert 0 < sum(s3.counts().values()) <= 3 * files


def test_requests_whose_refusal_has_no_text_are_repeated_too(s3: S3) -> None:
    files = Store(f"s3://{BUCKET}/head").files
    files.write("runs/x.json", b"1")
    s3.refuse(0.3)
    s3.counts()
    for _ in range(30):  # answers to HEAD have none
        remote = files._remote
        assert remote is not None
        remote._filesystem.invalidate_cache()
        assert remote._filesystem.info(f"{BUCKET}/head/runs/x.json")["size"] == 1
    s3.refuse(REFUSED)
    assert s3.counts()["refused"] > 3


def test_a_shard_is_seen_whole_or_not_at_all(s3: S3) -> None:
    store = Store(f"s3://{BUCKET}/commit")
    sizes, contents = set(), [bytes([digit]) * 2**20 for digit in range(8)]
    for content in contents:
        store.files.write("table/run_id=x/shard-00000.parquet", content)
        assert Store(store.url).files.read("table/run_id=x/shard-00000.parquet") == content
        sizes |= {version.size for version in Store(store.url).files.find("", "").values()}
    assert sizes == {2**20}, "no temporary key, no part"


def test_an_empty_prefix_and_a_bucket_that_is_not_there_are_told_in_one_line(s3: S3) -> None:
    for words in (["sql", "SELECT 1"], ["check"], ["report"]):
        done = CliRunner().invoke(main, [*words, "--store", f"s3://{BUCKET}/nothing"])
        assert (done.exit_code, len(done.output.strip().splitlines())) == (2, 1), done.output
        assert "there is no store" in done.output
    scan = ["scan", "heads", "--limit", "8", "--layers", "0", "--store", "s3://no-such-bucket/results"]
    done = CliRunner().invoke(main, scan)
    assert done.exit_code == 2, done.output
    assert "is not writable (The specified bucket does not exist)" in done.output
