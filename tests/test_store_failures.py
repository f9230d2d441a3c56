"""Full, read-only, vanished and failing stores: one line and an exit code by cause; few requests for each file."""

import errno
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

from mathinterp.cli.main import main
from mathinterp.cluster import job
from mathinterp.cluster.dispatch import Dispatcher
from mathinterp.cluster.events import Failed, Ready
from mathinterp.cluster.run import run_scan
from mathinterp.errors import Unfinished
from mathinterp.experiments.base import Shard
from mathinterp.models.catalog import ModelSpec
from mathinterp.prompts.prompt import Prompt
from mathinterp.store import Store
from mathinterp.store.files import StoreFailed
from mathinterp.store.manifest import save_record
from mathinterp.store.remote import open_filesystem
from tests.small_store import fill, open_run, prompt, write_head
from tests.toy_scan import ToyScan


class Counting(MemoryFileSystem):
    """An object store that counts requests and fails those that it is told to."""

    protocol = "counting"
    requests: ClassVar[Counter] = Counter()
    failing: type[Exception] | None = None

    def _asked(self, what: str) -> None:
        Counting.requests[what] += 1
        if Counting.failing is not None:
            raise Counting.failing("503 Slow Down")

    def find(self, *arguments, **options):
        self._asked("list")
        return super().find(*arguments, **options)

    def cat_file(self, *arguments, **options):
        self._asked("get")
        return super().cat_file(*arguments, **options)

    def pipe_file(self, *arguments, **options):
        self._asked("put")
        return super().pipe_file(*arguments, **options)

    def _open(self, *arguments, **options):
        self._asked("open")
        return super()._open(*arguments, **options)

    def info(self, *arguments, **options):
        self._asked("head")
        return super().info(*arguments, **options)


@pytest.fixture
def remote():
    """The place of a store that counts; a store there has seven files."""
    fsspec.register_implementation("counting", Counting, clobber=True)
    Counting.failing = None
    url = f"counting://{uuid4().hex}/results"
    fill(Store(url), [prompt("a")], [{"prompt_id": "a"}], [{"layer": 0, "head": 0, "prompt_id": "a"}],
         [{"layer": 0, "prompt_id": "a"}])  # fmt: skip
    Counting.requests.clear()
    yield url
    Counting.failing = None


@pytest.mark.slow
def test_a_query_of_seven_files_makes_at_most_three_requests_for_each(remote) -> None:
    done = CliRunner().invoke(main, ["sql", "--store", remote, "--json", "SELECT * FROM head_effects"])
    assert done.exit_code == 0, done.output
    assert sum(Counting.requests.values()) <= 3 * 7, Counting.requests


def test_queries_of_one_run_list_the_tables_that_it_has_and_no_others(remote) -> None:
    store = Store(remote)
    (run,) = (row["run_id"] for row in store.rows("SELECT run_id FROM runs"))
    Counting.requests.clear()
    with store.held(run):
        (row,) = store.rows("SELECT shards, shards_done FROM runs WHERE run_id = $run", {"run": run})
    assert row == {"shards": 3, "shards_done": 3}
    assert Counting.requests["list"] == 2 * (1 + 3), "records and three tables, twice: for the answer, and for warnings"


@pytest.mark.parametrize(
    ("failing", "code"), [(OSError, 1), (TimeoutError, 1), (RuntimeError, 1), (PermissionError, 2)]
)
def test_an_object_store_that_fails_is_told_in_one_line(remote, failing, code) -> None:
    Counting.failing = failing
    for command in (["sql", "SELECT * FROM runs"], ["check"], ["report"]):
        done = CliRunner().invoke(main, [*command, "--store", remote])
        assert done.exit_code == code, (done.output, done.exception)
        assert len(done.output.strip().splitlines()) == 1
        assert "503 Slow Down" in done.output


def test_retries_are_those_of_the_object_stores_library(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url, **options: asked.append(options) or (object(), url))
    open_filesystem("s3://bucket/results")
    assert asked == [{"config_kwargs": {"retries": {"max_attempts": 4, "mode": "standard"}}}]
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"retries": {"max_attempts": 2}}})
    open_filesystem("s3://bucket/results")
    assert asked[1] == {}, "what the user has configured stays"


@pytest.mark.slow
def test_a_full_disk_is_found_before_anything_runs(tmp_path) -> None:
    code = (
        "import resource, signal; from mathinterp.store import Store; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); Store({str(tmp_path)!r}).check_writable()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert "UserError: store" in done.stderr
    assert "is not writable (File too large)" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_a_disk_that_gives_out_midway_ends_in_one_line_and_leaves_nothing(tmp_path, monkeypatch, error) -> None:
    store = Store(tmp_path)
    run = open_run(store)

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreFailed, match=f"store '{tmp_path}' cannot be written .{error.strerror}.$"):
        write_head(store, run.run_id)
    assert list(tmp_path.rglob("*.tmp")) == []
    assert issubclass(StoreFailed, Unfinished)
    monkeypatch.setattr("mathinterp.cli.sql.sql.callback", lambda **_: run.finish())
    done = CliRunner().invoke(main, ["sql", "SELECT 1"])
    assert (done.exit_code, len(done.output.strip().splitlines())) == (1, 1)
    assert "the same command goes on from here" in done.output


@pytest.mark.slow
def test_what_was_computed_waits_for_a_store_that_is_away(tmp_path) -> None:
    """A share that is not mounted for a while: no other store is begun in its place."""
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    other: list[bool] = []

    def leave_for_a_while() -> None:
        while len(list(store.glob("mlp_scan/run_id=*/shard-*.parquet"))) < 2:
            time.sleep(0.01)
        store.rename(elsewhere)
        time.sleep(2.0)
        other.append(store.exists())
        elsewhere.rename(store)

    threading.Thread(target=leave_for_a_while, daemon=True).start()
    prompts = [Prompt("p", "3 plus 5 is", "8", operation="add")]
    summary = run_scan(ToyScan(8, 0.2), ModelSpec("random:llama-tiny"), prompts, str(store), progress=False)
    assert (other, summary.complete, summary.done) == ([False], True, 8)
    assert Store(store).rows("SELECT count(DISTINCT layer) AS n FROM mlp_scan") == [{"n": 8}]


def test_only_what_may_pass_is_waited_for(tmp_path, monkeypatch) -> None:
    waited: list[float] = []
    now = [0.0]

    def write(*_: object, **__: object) -> None:
        now[0] += 1.0
        raise StoreFailed("store 'x' cannot be written") from OSError(code, "why")

    monkeypatch.setattr(job.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(job.time, "sleep", waited.append)
    for code, waits in ((errno.ENOSPC, False), (errno.EROFS, False), (errno.ESTALE, True), (errno.EIO, True)):
        waited.clear()
        with pytest.raises(StoreFailed):
            job.patiently(write)
        assert bool(waited) == waits, code
    assert now[0] > job.AWAY_SECONDS


def test_a_store_that_gives_out_ends_a_run_at_once() -> None:
    class Full:
        def __init__(self):
            self.events = [Ready(0)]
            self.tries = 0

        def start(self, slot):
            pass

        def submit(self, slot, shard):
            self.tries += 1
            self.events.append(Failed(slot, shard, StoreFailed("store 'x' cannot be written (full)")))

        def wait(self, timeout):
            events, self.events = self.events, []
            return events

    workers = Full()
    with pytest.raises(StoreFailed, match="full"):
        Dispatcher(workers, [Shard("baseline", 0)], replicas=1).run()
    assert workers.tries == 1


@pytest.mark.slow
def test_of_a_store_that_is_gone_nothing_is_concluded(tmp_path, monkeypatch) -> None:
    from mathinterp.cluster import run as runs

    closed = runs.summarize

    def deleted(*arguments):
        shutil.rmtree(tmp_path / "store")
        return closed(*arguments)

    monkeypatch.setattr(runs, "summarize", deleted)
    monkeypatch.chdir(tmp_path)
    words = ["scan", "heads", "--limit", "4", "--layers", "0", "--store", "store"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1, (done.output, done.exception)
    assert "0 of 0" not in done.output
    assert "is no longer in" in done.output


def test_no_write_begins_a_store_in_the_place_of_one_that_is_away(tmp_path):
    store = Store(tmp_path / "store")
    run = fill(store, [prompt("a")], [{"prompt_id": "a"}])
    record = store.record(run)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreFailed, match="No such file"):
        write_head(store, run)
    with pytest.raises(StoreFailed, match="No such file"):
        save_record(store.files, record)
    assert not (tmp_path / "store").exists()
