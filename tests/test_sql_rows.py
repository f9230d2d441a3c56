"""What ``sql`` prints and writes: few rows as a table, all as JSON, CSV or a file; the views without a query."""

import csv
import io
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import mathinterp as mi
from mathinterp.cli.main import main
from mathinterp.cli.sql import SHOWN
from mathinterp.errors import UserError
from mathinterp.frame import Frame
from mathinterp.store import Store, query
from mathinterp.store.export import export, write_csv
from mathinterp.store.listing import _counted, list_views
from mathinterp.store.query import unique_names, views_of
from tests.small_store import fill, prompt

MANY = "SELECT i, i / 7 AS share, 'prompt ' || i AS text, i % 3 = 0 AS correct FROM range({}) t(i)"
ODD = "SELECT 'a,\"b\nc' AS text, NULL::INT AS gap, [1, NULL] AS list, {'x': 'é'} AS struct, 'nan'::DOUBLE AS nan,"
ODD += " 0.1::FLOAT AS small, true AS yes, INTERVAL 1 DAY AS day, 1::HUGEINT AS huge, '' AS empty, NULL AS nothing"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """A finished head scan of one head and two prompts."""
    made = Store(tmp_path_factory.mktemp("rows") / "store")
    heads = [{"layer": 0, "head": 1, "prompt_id": p} for p in ("1", "2")]
    fill(made, [prompt("1"), prompt("2")], [{"prompt_id": "1"}, {"prompt_id": "2"}], heads)
    return made


def sql(store: Store, *words: object):
    return CliRunner().invoke(main, ["sql", "--store", store.url, *map(str, words)])


@pytest.mark.slow
def test_a_table_shows_the_first_rows_and_says_how_many_there_are(store):
    shown = sql(store, MANY.format(SHOWN + 1)).stdout.splitlines()
    assert shown[-1] == f"showing {SHOWN} of {SHOWN + 1} rows; --csv or --output FILE for all"
    assert len(shown) == SHOWN + 2
    assert len(sql(store, MANY.format(SHOWN)).stdout.splitlines()) == SHOWN + 1


def test_a_table_tells_what_is_no_number_from_what_is_missing(store):
    shown = sql(store, "SELECT 'NaN'::DOUBLE AS a, 'inf'::DOUBLE AS b, '-inf'::DOUBLE AS c, NULL::DOUBLE AS d").stdout
    assert shown.splitlines()[1].split() == ["NaN", "inf", "-inf", "-"]


@pytest.mark.slow
def test_tables_are_shown_without_making_them(store, monkeypatch):
    by_duckdb = store.rows("FROM (SHOW TABLES)")
    made, own_views = [], query.own_views
    monkeypatch.setattr(query, "own_views", lambda good, views: made.extend(views) or own_views(good, views))
    for words in ("SHOW TABLES", " show\n tables ; "):
        assert store.rows(words) == by_duckdb
    assert [*csv.DictReader(io.StringIO(sql(store, "--csv", "SHOW TABLES").stdout))] == by_duckdb
    assert made == []
    assert len(by_duckdb) > 100


@pytest.mark.slow
def test_all_rows_as_csv_and_json(store):
    count = 45_000  # several batches
    printed = sql(store, "--csv", MANY.format(count)).stdout
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert len(rows) == count
    assert rows[7] == {"i": "7", "share": "1", "text": "prompt 7", "correct": "false"}
    assert json.loads(sql(store, "--json", MANY.format(count)).stdout) == store.rows(MANY.format(count))
    assert sql(store, "--json", "SELECT 1 AS a, 'é' AS b").stdout == '[{"a": 1, "b": "é"}]\n'
    assert sql(store, "--csv", "SELECT 1 AS a WHERE false").stdout == '"a"\n'


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".csv", ".parquet", ".json"])
def test_all_rows_in_a_file(store, tmp_path, ending):
    file = tmp_path / f"rows{ending}"
    file.write_text("earlier")
    done = sql(store, MANY.format(45_000), "--output", file)
    assert done.exit_code == 0, done.output
    assert "45,000 rows" in done.stdout
    read = {".csv": pd.read_csv, ".json": pd.read_json, ".parquet": pd.read_parquet}[ending](file)
    pd.testing.assert_frame_equal(read, store.dataframe(MANY.format(45_000)))
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.slow
def test_values_that_a_form_has_no_word_for(store, tmp_path):
    (row,) = csv.DictReader(io.StringIO(sql(store, "--csv", ODD).stdout))
    assert (row["text"], row["gap"], row["list"], row["struct"]) == ('a,"b\nc', "", "[1, null]", '{"x": "é"}')
    assert (row["nan"], row["small"], row["yes"], row["huge"], row["empty"]) == ("nan", "0.1", "true", "1", "")
    assert '"",' in sql(store, "--csv", "SELECT '' AS empty, NULL AS gap").stdout, "an empty text is no missing value"
    refused = sql(store, ODD, "--output", tmp_path / "odd.parquet")
    assert refused.exit_code == 2
    assert "cast it" in refused.stderr
    assert [*tmp_path.iterdir()] == []
    twice = "SELECT 1 AS a, 2 AS a"
    assert sql(store, twice, "--output", tmp_path / "twice.parquet").exit_code == 0
    assert pq.read_table(tmp_path / "twice.parquet").to_pylist() == [{"a": 1, "a_1": 2}]
    assert json.loads(sql(store, "--json", twice).stdout) == [{"a": 1, "a_1": 2}]


def test_no_column_is_lost_to_another_of_the_same_number(store, tmp_path):
    asked, kept = "SELECT 1 AS a, 2 AS a_1, 3 AS a", {"a": 1, "a_1": 2, "a_2": 3}
    assert json.loads(sql(store, "--json", asked).stdout) == [kept]
    assert sql(store, asked).stdout.split() == ["a", "a_1", "a_2", "1", "2", "3"]
    assert sql(store, asked, "--output", tmp_path / "rows.parquet").exit_code == 0
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == [kept]
    assert unique_names(["a", "a", "a", "b", "a_1", "b"]) == ["a", "a_2", "a_3", "b", "a_1", "b_1"]


def test_types_that_only_duckdb_knows_are_text_in_csv():
    """As BIGNUM is, which not every version of DuckDB has."""
    values = pa.ExtensionArray.from_storage(pa.opaque(pa.binary(), "bignum", "DuckDB"), pa.array([b"\x01", None]))
    file = io.BytesIO()
    assert (
        write_csv(pa.RecordBatchReader.from_batches((made := pa.table({"x": values})).schema, made.to_batches()), file)
        == 2
    )
    assert file.getvalue().decode().splitlines() == ['"x"', "\"b'\\x01'\"", ""]


LATE = "SELECT CASE WHEN i < 90000 THEN i ELSE error('too late') END AS i FROM range(100000) t(i)"


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".json"])
def test_an_error_in_the_middle_leaves_the_file_as_it_was(store, tmp_path, ending):
    file = tmp_path / f"rows{ending}"
    file.write_text("earlier")
    failed = sql(store, LATE, "--output", file)
    assert failed.exit_code == 2
    assert failed.stderr.count("\n") == 1
    assert "too late" in failed.stderr
    assert file.read_text() == "earlier"
    assert [*tmp_path.iterdir()] == [file]


def test_a_link_is_replaced_and_not_written_through(store, tmp_path):
    (tmp_path / "kept.csv").write_text("kept")
    (tmp_path / "rows.csv").symlink_to(tmp_path / "kept.csv")
    export(store.stream("SELECT 1 AS a"), tmp_path / "rows.csv")
    assert (tmp_path / "kept.csv").read_text() == "kept"
    assert (tmp_path / "rows.csv").read_text() == '"a"\n1\n'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--csv", "--json", "SELECT 1"], "one of --json, --csv and --output"),
        (["SELECT 1", "--output", "rows.txt"], "--output 'rows.txt' must end in .csv, .parquet, .json"),
        (["SELECT 1", "--output", "nowhere/rows.csv"], "is no folder"),
        (["SELECT 1; SELECT 2"], "2 statements; give one SELECT"),
        (["SELECT 1", "--output", "folder.csv"], "is a folder"),
    ],
)
def test_refused_in_one_line(store, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    done = sql(store, *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.csv"]


@pytest.mark.slow
def test_views_are_listed_with_what_they_say_and_hold(store, monkeypatch):
    listed = list_views(store, seconds=600)
    views = {row["view"]: row for row in listed.to_pylist()}
    assert {row["view"] for row in json.loads(sql(store, "--json").stdout)} == set(views)
    assert set(views) == set(views_of("SHOW ALL TABLES"))
    assert views["runs"]["about"] == "one row per run."
    assert views["runs"]["columns"][:2] == ["run_id", "scan"]
    assert (views["runs"]["rows"], views["head_scan"]["rows"], views["path_scan"]["rows"]) == (1, 2, 0)
    assert views["head_effects"]["rows"] == len(store.rows("SELECT * FROM head_effects")) > 0
    assert [row for row in views.values() if not row["about"]] == []
    assert all(row["about"][-1] in ".?" for row in views.values())
    monkeypatch.setattr("mathinterp.store.listing.list_views", lambda _: listed)  # counted to the end
    lines = sql(store).stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("runs ")]
    assert line.split()[-1] == "1"
    assert "run_id, scan, model" in line


@pytest.mark.slow
def test_counting_ends_with_its_time(store):
    started = time.process_time()
    listed = list_views(store, seconds=0.0)
    assert listed["rows"].null_count > 50
    assert listed["columns"].null_count == 0
    assert time.process_time() - started < 20  # of processor: others may keep it waiting


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is told by /proc")
def test_many_rows_take_seconds_and_little_memory(store, tmp_path):
    """290,726 rows took a quarter of an hour and 1.8 GB, when all of them were printed; in a process of its own."""
    code = "import re, sys; from mathinterp.cli.main import main; main(standalone_mode=False);"
    code += "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    for words in (["--csv"], ["--json"], []):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        command = [sys.executable, "-c", code, "sql", "--store", store.url, MANY.format(290_726), *words]
        with (tmp_path / "rows").open("w") as printed:
            done = subprocess.run(command, stdout=printed, stderr=subprocess.PIPE, text=True, check=True)
        assert int(done.stderr.splitlines()[-1]) < 400_000  # KiB; 145 to 160 MiB were seen
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 30


def test_a_store_that_is_not_there_is_no_empty_one(tmp_path):
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "nowhere", tmp_path / "empty"):
        with pytest.raises(UserError, match=r"there is no store at '.*'; run a scan first"):
            mi.open_store(str(place))
        with pytest.raises(UserError, match="there is no store at"):
            Store(place).sql("SELECT * FROM runs")


def test_integers_with_gaps_in_a_long_frame_stay_exact(store):
    table = store.arrow("SELECT CASE WHEN i % 2 = 0 THEN i + 9007199254740993 END AS i FROM range(100000) t(i)")
    frame = Frame.of(table)
    assert str(frame["i"].dtype) == "Int64"
    assert frame["i"].tolist()[-2:] == [9007199254740993 + 99998, pd.NA]
    assert frame.arrow().equals(table)


def test_counting_that_is_interrupted_while_it_fetches_leaves_the_rest_uncounted() -> None:
    class Interrupted:
        def interrupt(self) -> None: ...

        def execute(self, sql: str) -> "Interrupted":
            self.sql = sql
            return self

        def fetchall(self) -> list[tuple[int]]:
            if self.sql.endswith("first"):
                return [(3,)]
            raise RuntimeError("Query interrupted")

    assert _counted(Interrupted(), ["first", "second"], 60.0) == {"first": 3}
