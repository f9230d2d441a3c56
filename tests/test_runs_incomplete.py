"""``runs compare`` and ``runs export`` of runs that lack rows, or have damaged ones, say so or refuse."""

import json
import logging
import shlex
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.store import Store
from mathinterp.store.catalog import catalog
from mathinterp.store.manifest import file_of
from tests.runs_case import FEW, many_files, places
from tests.small_store import FINGERPRINT, open_run, prompt, scores

TWO = ["baseline/00000", "head_scan/00000"]


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return places(tmp_path)[request.param]


def command(*words: str | Path):
    return CliRunner().invoke(main, ["runs", *map(str, words)])


def two_runs(place: str, shards: list[str] = FEW) -> tuple[str, str]:
    """Runs of the same rows."""
    return many_files(place, shards)[1], many_files(place, shards, model_fingerprint="other")[1]


def compared(place: str, run: str, other: str) -> tuple[dict[str, Any], str, str]:
    """What JSON has, the last printed line, and the warnings beside it."""
    shown, done = (
        command("compare", run, other, "--store", place),
        command("compare", run, other, "--store", place, "--json"),
    )
    assert (shown.exit_code, done.exit_code) == (0, 0), (shown.output, done.output)
    assert shown.stderr == done.stderr
    return json.loads(done.stdout), shown.stdout.splitlines()[-1], done.stderr


def test_rows_that_are_gone_from_both_runs_are_not_the_same(place: str) -> None:
    run, other = two_runs(place)
    for each in (run, other):
        Store(place).files.remove(file_of(each, "head_scan/00001"))
    found, verdict, warned = compared(place, run, other)
    assert found["same_rows"] is None
    lacks = f"{run} lacks 1 of 5 shards; {other} lacks 1 of 5 shards."
    assert verdict == f"No difference in the rows that are there in both; {lacks}"
    assert len(warned.splitlines()) == 1
    assert f"unfinished: {run} (heads: 4 of 5 shards), {other} (heads: 4 of 5 shards); only the rows" in warned


def test_swapped_files_are_missing_ones(place: str) -> None:
    run, other = two_runs(place)
    files, names = Store(place).files, [file_of(each, "head_scan/00001") for each in two_runs(place)]
    contents = [files.read(name) for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        files.write(name, content)
    found, verdict, warned = compared(place, run, other)
    assert (found["same_rows"], found["shards"]) == (None, ["4 of 5", "4 of 5"])
    assert "lacks 1 of 5 shards" in verdict
    assert "unfinished: " in warned


def test_runs_that_are_only_begun_have_no_rows_to_compare(place: str) -> None:
    run, other = (open_run(Store(place), FEW, dtype=dtype).run_id for dtype in ("float32", "float64"))
    found, verdict, warned = compared(place, run, other)
    assert found["same_rows"] is None
    assert verdict == f"No rows are there in both; {run} lacks 5 of 5 shards; {other} lacks 5 of 5 shards."
    assert "(heads: 0 of 5 shards)" in warned


def test_a_run_that_was_not_closed_is_not_finished(place: str) -> None:
    other = many_files(place, FEW)[1]
    store = Store(place)
    run = open_run(store, FEW[:1], dtype="float64")
    store.write_shard(run.run_id, "baseline", 0, store.read_shard(other, FEW[0]), {})
    found, verdict, _ = compared(place, run.run_id, run.run_id)
    assert found["same_rows"] is None
    assert f"{run.run_id} is not finished" in verdict


def test_a_row_that_the_other_run_may_have_in_a_missing_shard_is_no_difference(place: str) -> None:
    run, other = two_runs(place)
    Store(place).files.remove(file_of(run, "head_scan/00001"))
    assert Store(place).runs.compare(run, other).same_rows is None
    assert Store(place).runs.compare(other, run).same_rows is None
    longer = many_files(place, [*FEW, "head_scan/00007"], dtype="float64")[1]  # which is whole, and has more
    Store(place).files.remove(file_of(longer, "head_scan/00001"))
    found, verdict, _ = compared(place, longer, other)
    assert found["same_rows"] is False
    assert verdict == f"Rows differ in head_scan; {longer} lacks 1 of 6 shards."


def test_rows_that_are_there_and_differ_do_so_whatever_is_missing(place: str) -> None:
    store, ids = Store(place), []
    for dtype, logprob in (("float32", -0.5), ("float64", -0.25)):
        run = open_run(store, ["head_scan/00000", "head_scan/00001"], dtype=dtype)
        store.write_prompts(FINGERPRINT, [prompt("a")])
        rows = scores("head_scan", [{"layer": 0, "head": 0, "prompt_id": "a", "logprob": logprob}])
        store.write_shard(run.run_id, "head_scan", 0, rows, {})
        run.finish()
        ids.append(run.run_id)
    found, verdict, _ = compared(place, *ids)
    assert found["same_rows"] is False
    assert verdict == f"Rows differ in head_scan; {ids[0]} lacks 1 of 2 shards; {ids[1]} lacks 1 of 2 shards."


def test_whole_runs_are_compared_without_a_warning(place: str) -> None:
    run, other = two_runs(place)
    found, verdict, warned = compared(place, run, other)
    assert (found["same_rows"], verdict, warned) == (True, "All rows are the same.", "")


@pytest.mark.parametrize("view", [[], ["--view", "head_effects"]])
def test_an_export_of_a_run_that_lacks_rows_is_warned_of_once(place: str, tmp_path: Path, view: list[str]) -> None:
    run, other = two_runs(place, TWO)
    for each in (run, other):
        Store(place).files.remove(file_of(each, "head_scan/00000"))
    done = command("export", run, "--out", tmp_path / "x.csv", "--store", place, *view)
    assert done.exit_code == 0
    [line] = done.stderr.splitlines()
    assert f"unfinished: {run} (heads: 1 of 2 shards); " in line
    assert other not in line


@pytest.mark.slow
def test_an_export_warns_of_what_it_reads_alone(place: str, tmp_path: Path) -> None:
    run, other = two_runs(place)
    Store(place).files.remove(file_of(run, "head_scan/00001"))
    for chosen, view in ((run, "baseline"), (run, "prompts"), (run, "runs"), (other, "head_effects"), (other, None)):
        more = ["--view", view] if view else []
        done = command("export", chosen, "--out", tmp_path / f"{chosen}-{view}.csv", "--store", place, *more)
        assert (done.exit_code, done.stderr) == (0, ""), view


def test_an_export_is_warned_of_whatever_was_asked_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    store.files.remove(file_of(run, "head_scan/00001"))
    store.rows(f"SELECT * FROM baseline WHERE run_id = '{run}'")  # whole, as far as this reads it
    with caplog.at_level(logging.WARNING, logger="mathinterp"):
        store.runs.export(run, tmp_path / "x.csv")
    assert [f"{run} (heads: 4 of 5 shards)" in each.getMessage() for each in caplog.records] == [True]


def flip(store: Store, name: str) -> None:
    """One bit of a float in the first data page: footer and size stay, and readers of Parquet see another value."""
    content = bytearray(store.files.read(name))
    group = pq.read_metadata(BytesIO(content)).row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    [column] = [each for each in columns if each.path_in_schema in ("logit", "text")]
    content[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    store.files.write(name, bytes(content))


@pytest.mark.parametrize("finished", [True, False])
def test_a_flipped_bit_ends_comparison_and_export_with_what_mends_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    monkeypatch.setattr("sys.argv", ["mathinterp", "scan", "heads", "--limit", "5"])
    other, store = many_files(place, FEW)[1], Store(place)
    run = open_run(store, FEW, dtype="float64").run_id if not finished else many_files(place, FEW, dtype="float64")[1]
    for shard in FEW[:3] if not finished else []:
        table, index = shard.split("/")
        store.write_shard(run, table, int(index), store.read_shard(other, shard), {})
    name = file_of(run, "head_scan/00001")
    flip(store, name)
    words = ["--store", place]
    exports = [["export", run, "--out", tmp_path / "x.csv", *view] for view in ([], ["--view", "head_effects"])]
    for asked in (["compare", run, other], ["compare", other, run], *exports):
        done = command(*asked, *words)
        assert done.exit_code == 2, done.output
        [line] = done.stderr.splitlines()
        assert f"damaged: {name} (" in line
        *mend, there = shlex.split(line.partition("Mend: ")[2].removesuffix("."))
        assert mend == ["mathinterp", "scan", "heads", "--limit", "5", "--store"]
        assert there == place or (Path.cwd() / there).resolve() == Path(place).resolve()  # shorter from here
    assert done.stdout == ""
    assert list(tmp_path.glob("x*")) == []
    with pytest.raises(UserError, match=f"{name} .*the command that made run {run}, again"):
        Store(place).runs.compare(run, other)
    for view in ("baseline", "prompts"):  # whose files are good
        done = command("export", run, "--out", tmp_path / f"{view}.csv", "--view", view, *words)
        assert (done.exit_code, done.stderr) == (0, "")
    assert line.partition(": ")[2] in command("check", *words).stdout


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [True, False])
def test_an_export_reads_prompts_against_their_checksum(place: str, tmp_path: Path, sealed: bool) -> None:
    store, run = many_files(place, FEW)
    name = f"prompts/prompts_fingerprint={FINGERPRINT}/prompts.parquet"
    if not sealed:
        store.files.remove(f"{name}.sha256")
    flip(store, name)
    done = command("export", run, "--out", tmp_path / "x.csv", "--view", "prompts", "--store", place)
    assert done.exit_code == 2
    assert f"damaged: {name} (" in done.stderr
    assert "Mend: " in done.stderr
    done = command("export", run, "--out", tmp_path / "x.csv", "--view", "head_scan", "--store", place)
    assert (done.exit_code, done.stderr) == (0, "")  # which has no prompts


def test_an_export_of_rows_of_another_run_reads_its_files_against_their_checksums(tmp_path: Path) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    of = open_run(store, ["stability_nodes/00000"], scan="stability", parameters={"of": run, "draws": 1, "seed": 0})
    schema = catalog().tables["stability_nodes"].schema
    rows = pa.Table.from_pylist([{field.name: None for field in schema}], schema)
    receipt = store.write_shard(of.run_id, "stability_nodes", 0, rows, {})
    of.finish()
    name = file_of(of.run_id, "stability_nodes/00000")
    content = store.files.read(name)
    assert Store(store.url).runs.export(run, tmp_path / "x.csv", view="stability")
    store.files.write(name, content[:4] + bytes([content[4] ^ 1]) + content[5:])
    assert receipt["bytes"] == len(content)
    with pytest.raises(UserError, match=f"damaged: {name}"):
        Store(store.url).runs.export(run, tmp_path / "y.csv", view="stability")


def test_the_endings_that_are_named_are_those_that_an_export_takes(tmp_path: Path) -> None:
    store, run = many_files(tmp_path / "store", FEW)
    for name in ("x.txt", "x.json", "x"):
        done = command("export", run, "--out", tmp_path / name, "--store", store.url)
        assert done.exit_code == 2
        assert done.stderr.rstrip().endswith("must end in .parquet, .csv")
