"""The store's place is a name and nothing else: no part of its path becomes a column, a pattern or SQL."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import duckdb
import pyarrow as pa
import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.errors import UserError
from mathinterp.store import Store, query
from mathinterp.store.catalog import catalog
from tests.small_store import FINGERPRINT, fill, open_run, prompt

COLUMNS = "layer=3/head=7/correct=false/prompt_id=b/operation=mul"
OURS = f"run_id=zz/prompts_fingerprint={FINGERPRINT}0"
RECORDS = "scan=paths/model=other/parameters=7/dtype=int8/notes=9"
PLACES = [
    COLUMNS, OURS, RECORDS, "head_scan/run_id=zz/shard-00000.parquet", "a b", "it's", 'a "quoted" name',
    "a%20b", "100%", "back\\slash", "end\\", "\\", "ünï", "e\u0301", "数 学",
    "a=b=c", "=", "# 1", "$root", "${head_scan}",
    "semi;colon",
    "'; DROP VIEW runs; --", "-- note", "{a,b}", "~", "..x", "tab\there", "family \U0001f468\u200d\U0001f469",
]  # fmt: skip


def plain_value(field: pa.Field):
    """One value of a column's type."""
    if pa.types.is_list(field.type):
        return [plain_value(field.type.value_field)]
    if pa.types.is_boolean(field.type):
        return True
    if pa.types.is_integer(field.type):
        return 1
    return 0.5 if pa.types.is_floating(field.type) else "a"


def one_row(table: str) -> pa.Table:
    """A row of a table."""
    schema = catalog().tables[table].schema
    return pa.Table.from_pylist([{field.name: plain_value(field) for field in schema}], schema)


def fill_every_table(store: Store) -> str:
    """A finished run with a row in every table; returns its id."""
    tables = [table for table, stored in catalog().tables.items() if stored.partition == "run_id"]
    run = open_run(store, [f"{table}/00000" for table in tables])
    store.write_prompts(FINGERPRINT, [prompt("a")])
    for table in tables:
        store.write_shard(run.run_id, table, 0, one_row(table), {})
    assert run.finish() == []
    return run.run_id


def every_view(client: duckdb.DuckDBPyConnection) -> dict[str, list]:
    """View -> its rows, without what differs between two runs of one machine."""
    times = ("started_at", "finished_at", "wall_seconds")
    return {
        view: sorted(repr({k: v for k, v in row.items() if k not in times}) for row in rows(client, view))
        for view in query.views_of("SHOW ALL TABLES")
    }


def rows(client: duckdb.DuckDBPyConnection, view: str) -> list[dict]:
    """All rows of a view, which is planned once; a relation would be planned twice."""
    found = client.execute(f"SELECT * FROM {view}")
    names = [column[0] for column in found.description]
    assert len(set(names)) == len(names)
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def statements(place: Path) -> list[str]:
    """The statements of the views.sql of the store at ``place``."""
    return [part.query for part in duckdb.extract_statements((place / "views.sql").read_text())]


def only(views: Sequence[str], text: str) -> str:
    """What of a views.sql these views need, and all macros."""
    parts = [part.query for part in duckdb.extract_statements(text)]
    needed = query.views_of(" ".join(views))
    made = {part: re.search(r"CREATE OR REPLACE VIEW (\w+)", part) for part in parts}
    return ";\n".join(part for part, view in made.items() if view is None or view[1] in needed)


def plain_client(views: str) -> duckdb.DuckDBPyConnection:
    """A DuckDB client that knows nothing of mathinterp and has read the text of views.sql."""
    client = duckdb.connect()
    client.execute(views)
    return client


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The views of a store at an ordinary place."""
    store = Store(tmp_path_factory.mktemp("plain") / "results")
    fill_every_table(store)
    views = every_view(store.connect())
    assert sum(map(bool, views.values())) > 40
    return views


@pytest.fixture
def views_as_tables(expected, monkeypatch):
    """Views become tables of what ``expected`` has from views: each is computed once, not for each that reads it."""
    texts = query._texts
    made = "CREATE OR REPLACE VIEW", "CREATE TABLE"
    monkeypatch.setattr(query, "_texts", lambda *asked: [text.replace(*made) for text in texts(*asked)])


@pytest.mark.slow
@pytest.mark.parametrize("place", [f"{COLUMNS}/{OURS}/{RECORDS}", "back\\slash"])
def test_every_view_is_the_same_under_any_place_on_a_disk(expected, views_as_tables, place, tmp_path):
    store = Store(tmp_path / place)
    fill_every_table(store)
    assert every_view(store.connect()) == expected
    assert every_view(plain_client((tmp_path / place / "views.sql").read_text())) == expected


@pytest.mark.slow
@pytest.mark.parametrize("place", [f"{COLUMNS}/{OURS}/{RECORDS}", "back\\slash"])
def test_every_view_is_the_same_under_any_place_in_an_object_store(expected, views_as_tables, place):
    store = Store(f"memory://{uuid4().hex}/{place}")
    fill_every_table(store)
    assert every_view(store.connect()) == expected


def fill_a_little(store: Store) -> str:
    """A finished run with one head; returns its id."""
    return fill(store, [prompt("a")], [{"prompt_id": "a"}], [{"layer": 0, "head": 1, "prompt_id": "a"}])


@pytest.fixture(scope="module")
def plain_statements(tmp_path_factory) -> list[str]:
    """Those of a store at an ordinary place, which any client can execute."""
    place = tmp_path_factory.mktemp("plain") / "results"
    fill_a_little(Store(place))
    plain_client((place / "views.sql").read_text())
    return statements(place)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_place_is_only_a_name(kind, place, tmp_path, plain_statements):
    store = Store(tmp_path / place if kind == "disk" else f"memory://{uuid4().hex}/{place}")
    run = fill_a_little(store)
    row = {"run_id": run, "layer": 0, "head": 1, "prompt_id": "a", "correct": True}
    asked = f"SELECT {', '.join(row)} FROM head_scan WHERE run_id = '{run}'"
    with store.held():
        assert store.rows(asked) == [row]
        assert store.rows("SELECT scan, status FROM runs") == [{"scan": "heads", "status": "finished"}]
    assert store.finished_shards(run) == {"baseline/00000", "head_scan/00000"}
    if kind == "disk":
        # A plain client executes what names the place; the rest is letter for letter what it executed elsewhere.
        pairs = zip(statements(tmp_path / place), plain_statements, strict=True)
        client = plain_client(";\n".join(own for own, plain in pairs if own != plain))
        assert [r["run_id"] for r in rows(client, "head_scan")] == [run]


@pytest.mark.parametrize("place", ["plain", "back\\slash"])
def test_the_views_see_each_shard_as_soon_as_it_is_written(place, tmp_path):
    store = Store(tmp_path / place)
    run = open_run(store, ["baseline/00000", "baseline/00001"]).run_id
    for index in range(2):
        store.write_shard(run, "baseline", index, one_row("baseline"), {})
        client = plain_client(only(["baseline", "runs"], (tmp_path / place / "views.sql").read_text()))
        assert len(rows(client, "baseline")) == index + 1
        assert [r["shards_done"] for r in rows(client, "runs")] == [index + 1]


def test_a_run_is_read_from_its_own_files_alone(tmp_path):
    """Only the files of the run asked for are opened: the name of the folder decides, as with hive partitions."""
    store = Store(tmp_path / "layer=3")
    runs = [fill(store, [prompt("a")], [{"prompt_id": "a"}], model_fingerprint=f"weights-{i}") for i in range(3)]
    found = store.connect("baseline").sql(f"EXPLAIN ANALYZE SELECT * FROM baseline WHERE run_id = '{runs[1]}'")
    assert "Total Files Read: 1 " in found.fetchall()[0][1]


@pytest.mark.parametrize(
    "place", ["two\nlines", "a\rb", "null\x00", "bell\x07", "line\u2028", os.fsdecode(b"latin\xe9")]
)
def test_a_place_that_is_no_line_of_text_is_refused(place, tmp_path):
    for store in (tmp_path / place, f"memory://x/{place}"):
        with pytest.raises(UserError, match="line break, a control character or bytes not UTF-8"):
            Store(store)
    assert list(tmp_path.iterdir()) == []


def test_the_home_of_nobody_is_refused():
    with pytest.raises(UserError, match="no home folder of that name"):
        Store("~nobody-of-this-name/results")


@pytest.mark.slow
def test_a_query_that_reads_a_file_in_memory_twice_at_once_misses_nothing():
    store = Store(f"memory://{uuid4().hex}/results")
    fill_every_table(store)
    found = {len(store.rows("SELECT * FROM head_rankings")) for _ in range(15)}
    assert len(found) == 1


@pytest.mark.slow
def test_the_command_line_reads_and_draws_a_store_at_an_odd_place(tmp_path):
    place = tmp_path / "layer=3" / "it's 100%" / "back\\slash"
    run = fill(Store(place), [prompt("a")], [{"prompt_id": "a"}], [{"layer": 0, "head": 1, "prompt_id": "a"}])
    done = CliRunner().invoke(main, ["sql", "--store", str(place), "--json", "SELECT layer, head FROM head_effects"])
    assert done.exit_code == 0, done.output
    assert {(row["layer"], row["head"]) for row in json.loads(done.stdout)} == {(0, 1)}
    done = CliRunner().invoke(main, ["report", "--store", str(place), "--out", str(tmp_path / "layer=3" / "page")])
    assert done.exit_code == 0, done.output
    assert run in (tmp_path / "layer=3" / "page" / "index.html").read_text()


def test_the_command_line_names_a_place_as_a_shell_reads_it(capsys):
    from mathinterp.cli.output import print_sql_hint

    print_sql_hint("it's [my] place", ["SELECT 1"])
    shown = capsys.readouterr().out
    assert "--store 'it'\"'\"'s [my] place' " in shown
    assert "Results: it's [my] place " in shown
