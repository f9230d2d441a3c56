"""What only stores on gs:// have: gcsfs's own questions, errors and logs, uploads in parts, placeholders of folders.

Needs `pip install 'mathinterp[gcs-test]'` (gcp-storage-emulator, gcsfs); skipped where they are absent. What holds for
S3 as well: tests/test_object_store.py.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.store import Store
from mathinterp.store.remote import WHOLE_BYTES
from tests.gs_server import gs_server
from tests.refusing import BUCKET, Server
from tests.runs_case import many_files, rows_of

pytestmark = pytest.mark.slow

PART_BYTES = 50 * 2**20  # a larger object goes up in parts of this size, which gcsfs chooses


@pytest.fixture(scope="module")
def gs() -> Iterator[Server]:
    with gs_server() as running:
        yield running


def test_a_command_tells_nothing_but_its_answer(gs: Server) -> None:
    many_files(gs.url("quiet"))
    command = [sys.executable, "-m", "mathinterp", "sql", "SELECT count(*) AS n FROM head_scan"]
    done = subprocess.run([*command, "--store", gs.url("quiet")], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_question_goes_out_by_grpc_unless_it_is_asked_for(gs: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from gcsfs.core import GCSFileSystem
    from gcsfs.extended_gcsfs import ExtendedGcsFileSystem

    def opened() -> type:
        remote = Store(gs.url("kind")).files._remote
        assert remote is not None
        return type(remote._filesystem)

    assert opened() is GCSFileSystem
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "true")
    assert opened() is ExtendedGcsFileSystem


def test_what_gcsfs_logs_reaches_those_who_listen(gs: Server, caplog: pytest.LogCaptureFixture) -> None:
    gs.refuse(1, 401)
    with caplog.at_level(logging.ERROR, "gcsfs"):
        CliRunner().invoke(main, ["sql", "SELECT 1", "--store", gs.url("logged")])
    gs.refuse(0)
    assert "non-retriable exception" in caplog.text


def test_a_large_file_goes_up_in_parts_and_is_read_in_parts(gs: Server) -> None:
    content = os.urandom(2**20) * (PART_BYTES // 2**20 + 10)
    name = "table/run_id=x/shard-00000.parquet"
    gs.refuse(0)
    before = Store(gs.url("large")).files
    before.write(name, b"old")
    gs.counts()
    gs.refuse(0.3, 503)
    before.write(name, content)
    counts = gs.counts()
    assert counts["POST"] == 3, "the beginning, and two parts"
    assert counts["refused"] > 0
    files = Store(gs.url("large")).files
    (version,) = files.find("", "").values()
    assert version.size == len(content) > WHOLE_BYTES
    with files.open(name) as file:
        file.seek(-8, os.SEEK_END)
        assert file.read() == content[-8:]
        file.seek(0)
        assert file.read() == content
    gs.refuse(0)


def test_folders_that_the_console_made_are_no_files(gs: Server, tmp_path: Path) -> None:
    gs.refuse(0)
    remote = Store(gs.url("made")).files._remote
    assert remote is not None
    for folder in ("", "runs/", "head_scan/"):  # empty objects with a slash at the end
        remote._filesystem.pipe_file(f"{BUCKET}/made/{folder}", b"")
    store, run = many_files(gs.url("made"))
    assert len(rows_of(store, run)) > 12
    report = ["report", "--out", str(tmp_path / "report")]
    for words in (["check"], ["runs", "check"], ["runs", "list"], ["runs", "compact", run], report):
        done = CliRunner().invoke(main, [*words, "--store", store.url])
        assert done.exit_code == 0, (words, done.output)
        assert "warning" not in done.output, (words, done.output)


def test_the_time_of_writing_and_a_version_are_told(gs: Server) -> None:
    gs.refuse(0)
    files = Store(gs.url("told")).files
    files.write("runs/x.json", b"1")
    (first,) = files.find("", "").values()
    seconds = files.modified("runs/x.json")
    assert seconds is not None
    files.write("runs/x.json", b"2")
    (second,) = files.find("", "").values()
    assert (first.size, second.size) == (1, 1)
    assert first.stamp != second.stamp
    assert 0 <= (files.modified("runs/x.json") or 0) - seconds < 60
