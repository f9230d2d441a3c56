"""Damage that a reader of Parquet does not see, and prompts that are missing, unsealed or being written."""

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.store import Store
from tests.small_store import FINGERPRINT, fill, open_run, prompt, write_head


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Store, str]:
    """A finished run of a baseline and one head."""
    store, head = Store(tmp_path), {"layer": 0, "head": 0, "prompt_id": "a"}
    return store, fill(store, [prompt("a")], [{"prompt_id": "a"}], [head])


def empty_pages(path: Path) -> None:
    """The headers of all columns' first pages, which have no checksum, say that these are no data."""
    group, content = pq.read_metadata(path).row_group(0), bytearray(path.read_bytes())
    for column in range(group.num_columns):
        content[group.column(column).data_page_offset + 1] ^= 1
    path.write_bytes(content)


def other_values(path: Path) -> None:
    """A good file of as many rows."""
    table = pq.read_table(path)
    pq.write_table(table.take(list(reversed(range(len(table))))), path, write_page_checksum=True)


@pytest.mark.parametrize(
    ("change", "finished", "what"),
    [
        (empty_pages, False, "0 of 500 rows can be read"),
        (empty_pages, True, "its checksum is not the one that the record of its run has"),
        (other_values, True, "its checksum is not the one that the record of its run has"),
    ],
)
def test_a_shard_that_lost_rows_in_silence_is_not_read(tmp_path, change, finished, what) -> None:
    store = Store(tmp_path)
    run = open_run(store, ["head_scan/00000"])
    path = Path(write_head(store, run.run_id, count=500)["path"])
    if finished:
        run.finish()
    assert len(store.read_shard(run.run_id, "head_scan/00000")) == 500
    change(path)
    pq.read_table(path, page_checksum_verification=True)  # Arrow says nothing
    with pytest.raises(UserError, match=what):
        store.read_shard(run.run_id, "head_scan/00000")


def test_check_of_one_run_names_its_missing_prompts_and_counts_those_without_checksum(filled) -> None:
    store, run = filled
    other = fill(
        store, [prompt("x")], [{"prompt_id": "x"}], [{"layer": 0, "head": 0, "prompt_id": "x"}], dtype="float64"
    )
    command = ["check", "--store", store.url, "--runs", run, "--json"]
    for each in Path(store.url).glob("*/*/*.sha256"):
        each.unlink()
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    (told,) = json.loads(done.stdout)["runs"]
    assert (told["intact"], told["unproved"]) == (2, 2)
    os.remove(Path(store.url, "prompts", f"prompts_fingerprint={FINGERPRINT}", "prompts.parquet"))
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 1
    assert f"no readable prompts of run {run}" in done.stderr
    assert other not in done.stderr


def test_prompts_that_are_being_written_are_not_distrusted(filled, monkeypatch) -> None:
    store, run = filled
    path = next(Path(store.url).glob("prompts/*/prompts.parquet"))
    seal, waited = path.with_name(path.name + ".sha256"), []
    written = seal.read_text()
    seal.write_text("0" * 64)

    def second_write(seconds: float) -> None:
        waited.append(seconds)
        seal.write_text(written)

    monkeypatch.setattr("time.sleep", second_write)
    assert Store(store.url).has_finished(run, FINGERPRINT)
    assert len(waited) == 1
