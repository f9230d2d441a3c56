"""SQL over a store: the text of its views, a DuckDB connection that has them, and results in plain forms.

Knows DuckDB; which files can be trusted is told to it, and which views there are it asks the catalog. A row's run is
read from the last folder of its file's name and from nothing above: DuckDB's own hive partitions would turn a folder
"layer=3" above the store into a column.
"""

import datetime
import decimal
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from string import Template
from typing import Any

import duckdb
import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.store.catalog import catalog
from mathinterp.store.files import StoreFiles
from mathinterp.store.manifest import RUN_ID_LENGTH
from mathinterp.store.reading import NO_LIMITS, check_reads, closed_connection
from mathinterp.store.schema import RUN_COLUMNS, sql_columns
from mathinterp.store.sql_errors import ends_database, told
from mathinterp.store.survey import ELSEWHERE, SHARD_FILE
from mathinterp.text import one_line, quoted

VIEWS_FILE = "views.sql"  # in a store
_HEADER = """\
-- Views over the results in $root
-- For any DuckDB client:  .read views.sql  (or paste it); object stores need  INSTALL httpfs; LOAD httpfs;  first.
-- Written by mathinterp and rewritten by every scan and by 'mathinterp sql': after moving the store, run
-- 'mathinterp sql --store <new place>' once, or replace the old place in this file by the new one.
"""

BATCH = 20_000  # rows that a stream holds at once
_SHOW_TABLES = re.compile(r"\s*SHOW\s+TABLES\s*;?\s*", re.IGNORECASE)
_CREATE = re.compile(r"\bCREATE\s+(?:OR\s+REPLACE\s+)?(?:TEMP(?:ORARY)?\s+)?VIEW\b", re.IGNORECASE)
CATALOG_WORDS = re.compile(r"\b(?:information_schema|pg_catalog|sqlite_master|show|duckdb_\w+)\b", re.IGNORECASE)


def views_sql(files: StoreFiles, good: Mapping[str, Sequence[str]], bad: Sequence[str]) -> str:
    """The text of views.sql: all views, for any client.

    Args:
        good: table (and "runs") -> names of its trusted files.
        bad: names of files that must not be read; tables that have one list their good files one by one.
    """
    sources = {
        table: _rows_source(table, good[table], _file_list(files, table, good, bad)) for table in catalog().tables
    }
    sources["run_records"] = _records_source(good["runs"], _file_list(files, "runs", good, bad))
    sources["shard_files"] = _shard_files_source(_all_shard_files(files, good, bad), bad)
    parts = [Template(_HEADER).substitute(root=one_line(files.root))]
    parts += [f"-- left out: {one_line(name)}\n" for name in bad]
    return "\n".join([*parts, catalog().functions, *_texts(catalog().order, sources)])


def own_views(good: Mapping[str, Sequence[str]], views: Sequence[str], *, temporary: bool = True) -> str:
    """The text of some views, in an order in which each comes after those it mentions, for ``add_views``.

    Temporary ones are seen by the cursor alone that makes them.

    They read lists of files, records and shards from variables of the connection, which ``add_views`` sets: DuckDB then
    looks for no file, and reads no name or record, twice.
    """
    sources = {table: _rows_source(table, good[table], _variable(table)) for table in good if table in catalog().tables}
    sources |= {name: f"(SELECT unnest({_variable(name)}, max_depth := 2))" for name in ("run_records", "shard_files")}
    text = "\n".join(_texts(views, sources))
    return _CREATE.sub("CREATE OR REPLACE TEMP VIEW", text) if temporary else text


def _texts(views: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    return [Template(catalog().views[name]).substitute(sources) for name in views]


def views_of(sql: str) -> list[str]:
    """The views that a query needs, in order: those whose names occur in it and those that these mention.

    Making a view costs DuckDB some ten milliseconds, and there are more than a hundred. A query about the catalog
    itself needs all, but SHOW TABLES alone none: see ``_plainer``.
    """
    if shows_tables(sql):
        return []
    if CATALOG_WORDS.search(sql):
        return list(catalog().order)
    return catalog().needed({word.lower() for word in re.findall(r"\w+", sql)})


def shows_tables(sql: str) -> bool:
    """Whether it is SHOW TABLES alone."""
    return _SHOW_TABLES.fullmatch(sql) is not None


def names_database(sql: str) -> bool:
    """Whether a query may tell views of a database from those of a cursor, as the catalog does."""
    return not shows_tables(sql) and re.search(rf"\bmemory\b|{CATALOG_WORDS.pattern}", sql, re.IGNORECASE) is not None


def reads_table(views: str, table: str) -> bool:
    """Whether the text of a views.sql reads files of ``table`` (else its view is an empty one)."""
    return f"/{table}/{catalog().tables[table].partition}=" in views


def database(
    files: StoreFiles, *, allow_files: bool = False, locked: bool = True, limits: Mapping[str, str] = NO_LIMITS
) -> duckdb.DuckDBPyConnection:
    """A closed connection (see reading.py) with the functions that views need.

    Making one takes DuckDB some 40 ms, a cursor of one nothing.
    """
    connection = closed_connection(files, allow_files=allow_files, locked=locked, limits=limits)
    connection.execute(catalog().functions)
    return connection


def add_views(
    connection: duckdb.DuckDBPyConnection,
    files: StoreFiles,
    views: str,
    good: Mapping[str, Sequence[str]],
    known: dict[str, list[str]] | None = None,
) -> None:
    """Make views of ``own_views`` in a connection, which gets what they read: names of files, records and shards.

    Args:
        known: what the connection has already, by variable; kept up to date.
    """
    known = {} if known is None else known
    with told():
        for name, names, sql, values in _contents(files, views, good):
            if known.get(name) != names:
                connection.execute(f"SET VARIABLE files_{name} = ({sql})", values)
                known[name] = names
        connection.execute(views)


def _contents(
    files: StoreFiles, views: str, good: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, list[str], str, dict[str, Any]]]:
    """Of the variables that the text of some views mentions: the files that decide each, its SQL, its values."""
    shards = [name for table, names in good.items() if _has_shards(table) for name in names]
    for name in [name for name in (*good, "run_records", "shard_files") if _variable(name) in views]:
        if name == "run_records":
            listed = f"[{', '.join(quoted(files.address(record)) for record in good['runs'])}]"
            sql = f"SELECT coalesce(list(r), []) FROM {_records_source(good['runs'], listed)} AS r"
            yield name, list(good["runs"]), sql, {}
        elif name == "shard_files":
            parts = [SHARD_FILE.fullmatch(shard) for shard in shards]
            named = {"runs": [p["run"] for p in parts if p], "keys": [f"{p['table']}/{p['index']}" for p in parts if p]}
            pairs = "SELECT unnest($runs::VARCHAR[]) AS run_id, unnest($keys::VARCHAR[]) AS shard"
            yield name, shards, f"SELECT coalesce(list(s), []) FROM ({pairs}) AS s", named
        else:
            chosen = "SELECT coalesce(list(name ORDER BY name), []::VARCHAR[]) FROM (SELECT unnest($names) AS name)"
            yield name, list(good[name]), chosen, {"names": [files.address(each) for each in good[name]]}


def _variable(table: str) -> str:
    return f"getvariable('files_{table}')"


def _has_shards(table: str) -> bool:
    return table == ELSEWHERE or table in catalog().of_runs


def require_reading(sql: str) -> None:
    """Raise UserError unless ``sql`` is one statement that only reads; no file is looked at."""
    with told():
        check_reads(_parser().cursor(), sql)


@lru_cache(maxsize=1)
def _parser() -> duckdb.DuckDBPyConnection:
    return duckdb.connect()


def arrow(connection: duckdb.DuckDBPyConnection, sql: str, values: Mapping[str, Any] | None = None) -> pa.Table:
    """The rows of a query, ``$name`` in it taking its value from ``values``; raises UserError."""
    named = {name: value for name, value in (values or {}).items() if re.search(rf"\${name}\b", sql)}
    with told():
        return connection.sql(_plainer(sql), params=named or None).to_arrow_table()


def stream(
    connection: duckdb.DuckDBPyConnection, sql: str, failed: Callable[[], None] = lambda: None
) -> pa.RecordBatchReader:
    """The rows of a query in batches as they are computed; raises UserError, also between batches.

    failed: called where the database fails for good between batches.
    """
    with told():
        found = connection.sql(_plainer(sql))

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            with told():
                yield from reader
        except UserError as error:
            if ends_database(error.__cause__):
                failed()
            raise

    with told():
        reader = found.to_arrow_reader(BATCH)
    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def _plainer(sql: str) -> str:
    """``sql``, but SHOW TABLES as a query of names, which are known."""
    if not shows_tables(sql):
        return sql
    return f"SELECT unnest([{', '.join(map(quoted, sorted(catalog().order)))}]) AS name"


def refusal(connection: duckdb.DuckDBPyConnection, address: str) -> str | None:
    """Why DuckDB cannot read a result file, as it is after some changes of a footer that other readers overlook."""
    try:
        connection.sql("SELECT * FROM read_parquet($file)", params={"file": address}).to_arrow_table()
    except duckdb.Error as error:
        return str(error).splitlines()[0]
    return None


def unreadable_records(files: StoreFiles, names: Sequence[str]) -> dict[str, str]:
    """Name -> why DuckDB cannot read a run's record, for those that it cannot."""
    found, connection = {}, database(files)
    for name in names:
        listed = {"runs": [name]}
        try:
            add_views(connection, files, own_views(listed, ["run_records"]), listed)  # which reads them
        except UserError as error:
            found[name] = str(error.__cause__ or error).splitlines()[0]
    return found


def json_rows(table: pa.Table, *, finite: bool = True) -> list[dict[str, Any]]:
    """Rows as plain JSON: NaN and infinities become null, times ISO 8601, exact numbers stay exact where JSON can.

    finite: else NaN and infinities stay, for those who show them. Raises UserError for a time that Python cannot hold.
    """
    renamed = table.rename_columns(unique_names(table.column_names))
    try:
        rows = renamed.to_pylist()
    except (OverflowError, ValueError) as error:  # an infinite time, or one outside the years that Python knows
        raise UserError(f"SQL: {error}; cast times outside the years 1 to 9999 to text (column::VARCHAR)") from error
    return [{name: _json_value(value, finite) for name, value in row.items()} for row in rows]


def unique_names(names: Sequence[str]) -> list[str]:
    """Names of columns, a repeated one with its number, which no other column has: a, a_1, a_2."""
    found: list[str] = []
    for i, name in enumerate(names):
        numbered = (f"{name}_{number}" for number in count(names[:i].count(name)))
        taken = {*found, *names}
        found.append(name if name not in names[:i] else next(each for each in numbered if each not in taken))
    return found


def _json_value(value: Any, finite: bool) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return None if finite and not math.isfinite(value) else value
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): _json_value(item, finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item, finite) for item in value]
    return str(value)


def _rows_source(table: str, good: Sequence[str], where: str) -> str:
    """Rows of the files that ``where`` lists, with the run (or prompts) that the last folder of a name says."""
    if not good:
        return _empty(sql_columns(catalog().tables[table]))
    partition = catalog().tables[table].partition
    # For each file of the list DuckDB computes this anew to see whether the query needs it: what is cheap matters.
    value = (
        f"parse_dirpath(filename)[-{RUN_ID_LENGTH}:]" if partition == "run_id"
        else f"regexp_extract(filename, '/{partition}=([^/]+)/[^/]+$', 1)"
    )  # fmt: skip
    rows = f"read_parquet({where}, hive_partitioning = false, filename = true)"
    return f"(SELECT {value} AS {partition}, * EXCLUDE (filename) FROM {rows})"


def _records_source(good: Sequence[str], where: str) -> str:
    """Fields of the records that ``where`` lists; read_json takes four times as long for many files."""
    if not good:
        return _empty(RUN_COLUMNS)
    fields = ", ".join(_field(name, kind) for name, kind in RUN_COLUMNS.items())
    return f"(SELECT {fields} FROM (SELECT content::JSON AS record FROM read_text({where})))"


def _field(name: str, kind: str) -> str:
    """SQL of a field of a record; null where the record lacks it, an error where it is of another kind."""
    if kind == "JSON":
        return f"record -> '{name}' AS {name}"
    if kind.endswith("[]"):
        return f"from_json(record -> '{name}', '[\"{kind[:-2]}\"]') AS {name}"
    return f"(record ->> '{name}')::{kind} AS {name}"


def _shard_files_source(there: str, bad: Sequence[str]) -> str:
    pattern = r"([^/]+)/run_id=([^/]+)/shard-(\d+)\.parquet$"
    parts = ", ".join(
        f"regexp_extract(file, '{pattern}', {group}) AS {name}" for group, name in ((1, "t"), (2, "run_id"), (3, "i"))
    )
    left_out = "".join(f" AND NOT ends_with(file, {quoted('/' + name)})" for name in bad if "/run_id=" in name)
    return f"(SELECT run_id, t || '/' || i AS shard FROM (SELECT file, {parts} FROM ({there})) WHERE true{left_out})"


def _all_shard_files(files: StoreFiles, good: Mapping[str, Sequence[str]], bad: Sequence[str]) -> str:
    tables = [table for table in good if _has_shards(table)]
    if files.takes_patterns:
        return f"SELECT file FROM glob({quoted(files.address('*/run_id=*/shard-*.parquet'))})"
    names = [name for table in tables for name in good[table]]
    return f"SELECT unnest([{', '.join(quoted(files.address(name)) for name in names)}]::VARCHAR[]) AS file"


def _file_list(files: StoreFiles, folder: str, good: Mapping[str, Sequence[str]], bad: Sequence[str]) -> str:
    if not files.takes_patterns or any(name.split("/")[0] == folder for name in bad):
        return "[" + ", ".join(quoted(files.address(name)) for name in good[folder]) + "]"
    pattern = "*.json" if folder == "runs" else f"{catalog().tables[folder].partition}=*/*.parquet"
    return quoted(files.address(f"{folder}/{pattern}"))


def _empty(columns: Mapping[str, str]) -> str:
    return "(SELECT " + ", ".join(f"NULL::{kind} AS {name}" for name, kind in columns.items()) + " WHERE false)"
