"""SQL over a store only reads: one statement, nothing but the store, whatever is tried."""

import json
import multiprocessing
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import duckdb
import pyarrow as pa
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.store import Store, query
from mathinterp.store.catalog import catalog
from mathinterp.store.sql_errors import told
from mathinterp.tuning.chosen import ranking_of
from mathinterp.tuning.settings import Choice
from tests.small_store import fill, prompt

READS = [
    "SELECT 1 AS a", "(SELECT 1 AS a)", "WITH t AS (SELECT 1 AS a) SELECT * FROM t", "VALUES (1)", "FROM range(1)",
    "TABLE runs", "DESCRIBE runs", "DESCRIBE SELECT 1", "SHOW TABLES", "SHOW runs", "SUMMARIZE runs",
    "EXPLAIN SELECT 1", "explain analyze SELECT * FROM runs", "EXPLAIN (FORMAT json) SELECT 1",
    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 3) FROM r",
    "SELECT 1 UNION ALL SELECT 2 ORDER BY ALL", "PIVOT runs ON status IN ('finished') USING count(*)",
    "SELECT 'COPY (SELECT 1) TO ''x''; \"type\":\"COPY_QUERY_NODE\"' AS a; -- a comment",
]  # fmt: skip
WRITES = [
    "COPY (SELECT 42) TO '{file}'",
    "EXPLAIN ANALYZE COPY (SELECT 42) TO '{file}'",
    "EXPLAIN (ANALYZE) COPY (SELECT 42) TO '{file}'",
    "EXPLAIN (FORMAT ')SELECT 1 --') COPY (SELECT 42) TO '{file}'",
    "WITH t AS (COPY (SELECT 42) TO '{file}') SELECT 1",
    "WITH t AS (SELECT 1), u AS (COPY (SELECT 42) TO '{file}') FROM t",
    "EXPLAIN ANALYZE WITH t AS (COPY (SELECT 42) TO '{file}') SELECT 1",
    "FROM query('WITH t AS (COPY (SELECT 42) TO ''{file}'') SELECT 1')",
    "SELECT 1; COPY (SELECT 42) TO '{file}'",
    "ATTACH '{file}'", "ATTACH '{file}' AS other; CREATE TABLE other.t AS SELECT 1", "EXPORT DATABASE '{file}'",
    "CALL enable_logging(storage = 'file', storage_path = '{file}')",
    "FROM enable_logging(storage = 'file', storage_path = '{file}')",
    "FROM enable_profiling(save_location = '{file}')",
    "SET temp_directory = '{file}'", "PRAGMA database_list", "CREATE TABLE t (a INT)", "DROP VIEW runs",
    "WITH t AS (INSERT INTO runs VALUES (1) RETURNING *) FROM t",
    "PREPARE p AS SELECT 1", "INSTALL httpfs", "LOAD httpfs", "BEGIN", "CHECKPOINT", "PIVOT runs ON status",
    "", "-- nothing",
]  # fmt: skip


def files_below(folder: Path) -> dict[str, bytes | None]:
    """Every path, and the content of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A small store."""
    made = Store(tmp_path_factory.mktemp("filled") / "store")
    fill(made, [prompt("1")], [{"prompt_id": "1"}], [{"layer": 0, "head": 1, "prompt_id": "1"}])
    return Path(made.url)


@pytest.fixture
def store(filled, tmp_path) -> Store:
    """A small store of the test's own, and a file that is none of its."""
    (tmp_path / "secret.csv").write_text("word\nhidden\n")
    return Store(shutil.copytree(filled, tmp_path / "store"))


@pytest.mark.slow
@pytest.mark.parametrize("sql", READS)
def test_whatever_reads_is_allowed(store, sql):
    with store.held():  # all views are made once
        assert store.stream(sql).read_all().num_rows >= 1
        assert store.arrow(sql).num_rows >= 1


@pytest.mark.slow
@pytest.mark.parametrize("allow_files", [False, True])
@pytest.mark.parametrize("sql", WRITES)
def test_nothing_is_written_anywhere(store, tmp_path, monkeypatch, sql, allow_files):
    monkeypatch.chdir(tmp_path)
    before = files_below(tmp_path)
    record = next((tmp_path / "store" / "runs").iterdir())
    for file in (tmp_path / "new", tmp_path / "store" / "new.csv", record):
        with pytest.raises(UserError, match=r"^SQL: [^\n]*$"):
            store.stream(sql.format(file=file), allow_files=allow_files).read_all()
    assert files_below(tmp_path) == before


def test_what_does_more_than_read_is_refused_before_a_file_is_looked_at(store, monkeypatch):
    monkeypatch.setattr(store, "_survey", None)
    for ask in (store.arrow, store.stream):
        with pytest.raises(UserError, match="this only reads"):
            ask("DROP VIEW runs")


OUTSIDE = [
    "SELECT * FROM read_csv('{outside}')", "FROM read_text('{outside}')", "FROM '{outside}'",
    "FROM read_text('{store}/../secret.csv')", "FROM read_text('file://{outside}')", "FROM glob('{above}/*')",
    "FROM read_text('{store}/link')", "FROM read_blob('/dev/null')", "FROM read_csv('https://example.com/x.csv')",
    "FROM 's3://bucket/x.parquet'", "DESCRIBE TABLE '{outside}'", "FROM read_text('{above}/store-beside')",
    "FROM query('FROM read_text(''{outside}'')')", "FROM duckdb_secrets()",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sql", OUTSIDE)
def test_nothing_outside_of_the_store_is_read(store, tmp_path, sql):
    (tmp_path / "store" / "link").symlink_to(tmp_path / "secret.csv")
    (tmp_path / "store-beside").write_text("hidden")
    text = sql.format(outside=tmp_path / "secret.csv", store=store.url, above=tmp_path)
    with pytest.raises(UserError, match="a query reads the store alone"):
        store.arrow(text)


@pytest.mark.slow
def test_allow_files_opens_reading(store, tmp_path):
    text = f"SELECT * FROM read_csv('{tmp_path / 'secret.csv'}')"
    assert store.stream(text, allow_files=True).read_all().to_pylist() == [{"word": "hidden"}]
    words = ["sql", "--store", store.url, "--json", text]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2
    assert "--allow-files" in refused.stderr
    assert json.loads(CliRunner().invoke(main, [*words, "--allow-files"]).stdout) == [{"word": "hidden"}]


def test_its_own_files_can_be_read_by_name(store):
    found = store.rows(f"SELECT count(*) AS n FROM read_parquet('{store.url}/head_scan/*/*.parquet')")
    assert found == [{"n": 1}]


def test_no_variable_of_python_is_a_table(store):
    words = duckdb.sql("SELECT 1 AS a").to_arrow_table()
    with pytest.raises(UserError, match="words does not exist"):
        store.rows("FROM words")
    assert words.num_rows == 1


@pytest.mark.slow
def test_an_object_store_is_read_within_its_prefix():
    prefix = uuid4().hex
    inside, beside = Store(f"memory://{prefix}/store"), Store(f"memory://{prefix}/beside")
    for made in (inside, beside):
        fill(made, [prompt("1")], [{"prompt_id": "1"}])
    assert inside.rows("SELECT prompt_id FROM baseline") == [{"prompt_id": "1"}]
    own = inside.files.address("baseline/*/*.parquet")
    assert inside.rows(f"SELECT count(*) AS n FROM '{own}'") == [{"n": 1}]
    for text in (f"FROM '{beside.files.address('baseline/*/*.parquet')}'", f"FROM read_text('{__file__}')"):
        with pytest.raises(UserError, match="a query reads the store alone"):
            inside.rows(text)
    with pytest.raises(UserError, match="only reads"):
        inside.rows(f"COPY (SELECT 1) TO '{inside.files.address('runs/x.json')}'")


@pytest.mark.parametrize("sql", ["COPY (SELECT 0 AS layer, 1 AS head) TO '{file}'", "SELECT 1; SELECT 2"])
def test_heads_are_chosen_by_a_query_that_only_reads(store, tmp_path, sql):
    with pytest.raises(UserError, match="give one SELECT"):
        ranking_of(Choice(heads_sql=sql.format(file=tmp_path / "new")), store)
    assert not (tmp_path / "new").exists()
    assert [*ranking_of(Choice(heads_sql="SELECT layer, head FROM head_scan"), store)] == [(0, 1)]


def test_settings_are_locked_for_queries_and_external_access_for_good(store):
    connection = store.connect("runs")
    connection.execute("SET threads = 1")  # for those who hold a connection
    with pytest.raises(duckdb.Error):
        connection.execute("SET enable_external_access = true")
    with pytest.raises(duckdb.Error, match="disabled by configuration"):
        connection.execute(f"FROM read_text('{os.path.abspath(__file__)}')")


def test_within_a_block_a_query_is_asked_once_and_after_it_anew(tmp_path, monkeypatch):
    asked, arrow = [], query.arrow
    monkeypatch.setattr(query, "arrow", lambda *given: asked.append(given[1]) or arrow(*given))
    made = Store(tmp_path / "store")
    fill(made, [prompt("1")], [{"prompt_id": "1"}])
    sql, count = "SELECT count(*) AS n FROM runs WHERE model = $model", {"model": "m"}
    with made.held():
        assert made.rows(sql, count) == made.rows(sql, count) == [{"n": 1}]
        assert made.rows(sql, {"model": "other"}) == [{"n": 0}]
        assert asked == [sql, sql]
        fill(made, [prompt("1")], [{"prompt_id": "1"}], model_fingerprint="weights-2")
    assert made.rows(sql, count) == made.rows(sql, count) == [{"n": 2}]
    assert asked == [sql] * 4


def test_queries_share_a_database_and_see_nothing_of_each_other(tmp_path, monkeypatch):
    made_ones, database = [], query.database
    monkeypatch.setattr(query, "database", lambda *given, **more: made_ones.append(1) or database(*given, **more))
    made = Store(tmp_path / "store")
    run = fill(made, [prompt("1")], [{"prompt_id": "1"}])
    counted = "SELECT count(*) AS n FROM baseline"
    assert made.rows(counted) == [{"n": 1}]
    monkeypatch.setattr(query, "CATALOG_WORDS", re.compile("no such word"))  # else all views are made for the next one
    assert made.rows("SELECT count(*) AS n FROM duckdb_views() WHERE NOT internal") == [{"n": 0}]
    assert made.rows("SELECT getvariable('files_baseline') IS NULL AS none") == [{"none": True}]
    reading = made.stream("SELECT unnest(range(5000)) AS n, prompt_id FROM baseline")
    fill(made, [prompt("1")], [{"prompt_id": "1"}], model_fingerprint="weights-2")
    assert made.rows(counted) == [{"n": 2}]
    assert made.rows(f"{counted} WHERE run_id = $run", {"run": run}) == [{"n": 1}]
    assert reading.read_all().num_rows == 5000
    assert len(made_ones) == 1


def test_a_database_that_failed_for_good_is_not_asked_again(store, monkeypatch):
    asked, arrow = [], query.arrow

    def failing(connection, *given):
        asked.append(connection)
        if len(asked) > 1:
            return arrow(connection, *given)
        with told():
            raise duckdb.FatalException("FATAL Error: the database has been invalidated")

    monkeypatch.setattr(query, "arrow", failing)
    with pytest.raises(UserError, match="invalidated"):
        store.rows("SELECT 1 AS one")
    assert store._shared is None
    assert store.rows("SELECT 1 AS one") == [{"one": 1}]


def test_a_stream_whose_database_fails_for_good_leaves_none_behind(store, monkeypatch):
    def batches():
        raise OSError("FATAL Error: it was invalidated")  # as Arrow says it
        yield

    schema = pa.schema([("a", pa.int64())])
    reading = SimpleNamespace(to_arrow_reader=lambda most: pa.RecordBatchReader.from_batches(schema, batches()))
    with store.held():
        assert store.rows("SELECT 1 AS one") == [{"one": 1}]
        with monkeypatch.context() as patch:
            patch.setattr(store, "_told_connection", lambda *given, **more: SimpleNamespace(sql=lambda sql: reading))
            with pytest.raises(UserError, match="it was invalidated"):
                store.stream("SELECT 1 AS one").read_all()
        assert store._shared is None


def test_connections_that_are_held_are_made_anew_when_their_database_has_failed(store, monkeypatch):
    asked, arrow = [], query.arrow

    def failing(connection, sql, values):
        asked.append(connection)
        if "fails" in sql:
            with told():
                raise duckdb.FatalException("FATAL Error: the database has been invalidated")
        return arrow(connection, sql, values)

    monkeypatch.setattr(query, "arrow", failing)
    with store.held():
        assert store.rows("SELECT count(*) AS n FROM runs") == [{"n": 1}]
        with store.held(), pytest.raises(UserError, match="invalidated"):
            store.rows("SELECT 1 AS fails")
        assert store.rows("SELECT count(*) + 1 AS n FROM runs") == [{"n": 2}]
    assert len({*map(id, asked)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True])
def test_a_store_that_was_used_answers_in_a_fork_too(store, held):
    """DuckDB's threads are not there, and the end of a database waits for them."""
    counted = "SELECT count(*) AS n FROM head_effects"
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    with store.held() if held else nullcontext():
        there = store.rows(counted)
        child = fork.Process(target=lambda: answers.put(store.rows(f"{counted} WHERE layer >= 0")))
        child.start()
        child.join(20)
    child.kill()
    assert child.exitcode == 0
    assert answers.get() == there


def test_limits_that_are_set_later_hold_for_the_next_query(store):
    asked = "SELECT current_setting('memory_limit') AS limit"
    before = store.rows(asked)
    store.limits = {"memory_limit": "64MiB"}
    assert store.rows(asked) == [{"limit": "64.0 MiB"}] != before


def test_the_settings_of_a_closed_connection_hold_for_queries_that_share_it(store):
    names = (
        "python_enable_replacements", "enable_external_access", "autoload_known_extensions",
        "enable_external_file_cache",
    )  # fmt: skip
    shown = ", ".join(f"current_setting('{name}') AS {name}" for name in names)
    assert store.rows(f"SELECT {shown}") == [dict.fromkeys(names, False)]


@pytest.mark.parametrize("begins", ["CREATE VIEW", "CREATE OR REPLACE\n  VIEW"])
def test_a_view_is_of_one_query_however_its_text_begins(store, monkeypatch, begins):
    views = dict(catalog().views)
    views["runs"] = views["runs"].replace("CREATE OR REPLACE VIEW", begins)
    monkeypatch.setattr(catalog(), "views", views)
    for _ in range(2):
        assert store.rows("SELECT count(*) AS n FROM runs") == [{"n": 1}]
    with pytest.raises(UserError, match="runs does not exist"):
        query.arrow(store._shared[1].cursor(), "FROM runs")


@pytest.mark.slow
def test_the_catalog_shows_views_where_other_programs_look_for_them(store):
    words = "SELECT count(*) AS n FROM information_schema.tables WHERE table_catalog = current_database()"
    with store.held():
        assert store.rows("SELECT count(*) AS n FROM runs") == [{"n": 1}]
        assert store.rows(words) == [{"n": len(catalog().order)}]
        assert store.rows("SELECT count(*) AS n FROM memory.main.runs") == [{"n": 1}]
        assert len(store.rows("SHOW TABLES FROM main")) == len(catalog().order)
