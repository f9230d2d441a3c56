"""What differs between two runs: what they were asked, what computed them, and their rows, joined by key in DuckDB."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from mathinterp.errors import UserError
from mathinterp.experiments.columns import TOKEN_SCORE
from mathinterp.store.catalog import catalog
from mathinterp.store.faults import require_undamaged
from mathinterp.store.manifest import file_of
from mathinterp.store.partial import warn
from mathinterp.store.reading import closed_connection
from mathinterp.store.recut import Record, original_shards, originals_in, table_of
from mathinterp.store.schema import SQL_TYPES
from mathinterp.store.sql_errors import is_of_a_gone_file, told
from mathinterp.text import counted

if TYPE_CHECKING:
    from mathinterp.store.store import Store

FACTS = ("scan", "model", "model_fingerprint", "prompts", "prompts_fingerprint", "dtype", "code_version", "versions",
         "result_format")  # fmt: skip
OTHER_PROMPTS = """
SELECT count(*) AS n FROM prompts AS a JOIN prompts AS b USING (prompt_id)
WHERE a.prompts_fingerprint = $a AND b.prompts_fingerprint = $b
      AND (a.text IS DISTINCT FROM b.text OR a.answer IS DISTINCT FROM b.answer)
"""
SCORES = {column.name for column in TOKEN_SCORE} - {"prompt_id", "position"}


@dataclass(frozen=True)
class ColumnDifference:
    """A column that is no key, over the rows that both runs have. NaN equals NaN, and null null."""

    column: str
    type: str
    cells: int
    equal: int  # exactly
    largest: float | None  # absolute difference of two finite numbers; None: no number, or no such pair
    flips: int | None  # of true and false; None: no boolean
    not_finite: int | None  # unequal cells of floats with NaN, infinity or null on a side, which ``largest`` leaves out


@dataclass(frozen=True)
class TableDifference:
    """A table of either run, its rows joined by ``key``."""

    table: str
    key: Sequence[str]
    rows: tuple[int, int]
    in_both: int
    only_in: tuple[int, int]
    columns: Sequence[ColumnDifference]
    repeated: bool = False  # keys are not unique: rows of one key are paired in the order of all their columns

    def differs(self, whole: tuple[bool, bool]) -> bool:
        """Whether rows differ for sure: one that a run has alone may be of a shard that the other lacks.

        Args:
            whole: whether every shard of the first run is there, and of the second.
        """
        alone = (self.only_in[0] > 0 and whole[1]) or (self.only_in[1] > 0 and whole[0])
        paired_by_chance = self.repeated and not all(whole)
        return alone or (not paired_by_chance and any(column.equal < column.cells for column in self.columns))


@dataclass(frozen=True)
class Comparison:
    """Of two runs; pairs are (the first's, the second's)."""

    runs: tuple[str, str]
    shards: tuple[str, str]  # "64 of 64": rows of an unfinished run are those that are there
    incomplete: tuple[str | None, str | None]  # "lacks 1 of 2 shards", "is not finished"; None: nothing is missing
    facts: Mapping[str, tuple[Any, Any]]  # what of FACTS differs
    parameters: Mapping[str, tuple[Any, Any]]  # that differ; None: it has none of that name
    noise_floors: tuple[Any, Any]  # how far a change of nothing moves rows; None: not measured
    tables: Sequence[TableDifference]
    skipped: Sequence[str]  # tables of experiments that are not installed
    other_prompts: int = 0  # ids that stand for another text or answer in the other run: rows are paired by id alone

    @property
    def differing(self) -> list[str]:
        """Tables whose rows differ, whatever the rows are that are missing."""
        whole = self.incomplete[0] is None, self.incomplete[1] is None
        return [table.table for table in self.tables if table.differs(whole)]

    @property
    def same_rows(self) -> bool | None:
        """Whether all rows are in both, equal in every cell; None: as far as can be told, some were not compared."""
        if self.differing or self.other_prompts:
            return False
        return None if self.skipped or any(self.incomplete) else True


def compare(store: "Store", run: str, other: str) -> Comparison:
    """See ``Runs.compare``."""
    while True:
        try:
            return _compared(store, run, other)
        except UserError as error:  # again, where files were merged while they were read
            if not is_of_a_gone_file(error.__cause__):
                raise


def _compared(store: "Store", run: str, other: str) -> Comparison:
    (a, there_a), (b, there_b) = store.runs.present(run), store.runs.present(other)
    there = there_a, there_b
    counts = [_count(record, shards) for record, shards in zip((a, b), there, strict=True)]
    lacks = [_lacks(record, *count) for record, count in zip((a, b), counts, strict=True)]
    partial = [(record, *count) for record, count, lack in zip((a, b), counts, lacks, strict=True) if lack]
    tables = list(dict.fromkeys(table_of(shard) for record in (a, b) for shard in record["shards"]))
    known = [table for table in tables if table in catalog().tables]
    prompts = () if a["prompts_fingerprint"] == b["prompts_fingerprint"] else ("prompts",)
    require_undamaged(store, {a["run_id"]: a, b["run_id"]: b}, [*known, *prompts])
    if partial:
        warn(partial, "only the rows that are there are compared. The same command finishes a run")
    connection = closed_connection(store.files)
    names = sorted({*a["parameters"], *b["parameters"]})
    return Comparison(
        runs=(run, other),
        shards=("{} of {}".format(*counts[0]), "{} of {}".format(*counts[1])),
        incomplete=(lacks[0], lacks[1]),
        facts={name: (a.get(name), b.get(name)) for name in FACTS if a.get(name) != b.get(name)},
        parameters={
            name: (a["parameters"].get(name), b["parameters"].get(name))
            for name in names
            if a["parameters"].get(name) != b["parameters"].get(name)
        },
        noise_floors=(a["notes"].get("noise_floor"), b["notes"].get("noise_floor")),
        tables=[
            _difference(connection, table, _source(store, table, a, there[0]), _source(store, table, b, there[1]))
            for table in known
        ],
        skipped=[table for table in tables if table not in known],
        other_prompts=_other_prompts(store, a, b, known),
    )


def _other_prompts(store: "Store", a: Record, b: Record, tables: Sequence[str]) -> int:
    """Sets of prompts that were drawn with other seeds have the same ids, for example."""
    prompts = {"a": a["prompts_fingerprint"], "b": b["prompts_fingerprint"]}
    of_prompts = any("prompt_id" in catalog().tables[table].schema.names for table in tables)
    if not of_prompts or prompts["a"] == prompts["b"]:
        return 0
    count: int = store.rows(OTHER_PROMPTS, prompts)[0]["n"]
    return count


def _count(record: Record, there: set[str]) -> tuple[int, int]:
    """Shards that are there, and all, of tables that can be compared."""
    shards = {shard for shard in original_shards(record) if table_of(shard) in catalog().tables}
    return len(originals_in(record, there) & shards), len(shards)


def _lacks(record: Record, done: int, shards: int) -> str | None:
    if done < shards:
        return f"lacks {shards - done} of {counted(shards, 'shard')}"
    return None if record["finished_at"] is not None else "is not finished"


def _source(store: "Store", table: str, record: Record, there: set[str]) -> list[str]:
    """Addresses of the files of a run in a table."""
    shards = sorted(shard for shard in there if table_of(shard) == table)
    return [store.files.address(file_of(record["run_id"], shard)) for shard in shards]


def _difference(connection: duckdb.DuckDBPyConnection, table: str, a: list[str], b: list[str]) -> TableDifference:
    schema = catalog().tables[table].schema
    with told():
        connection.execute("SET VARIABLE a = $a::VARCHAR[]", {"a": a})
        connection.execute("SET VARIABLE b = $b::VARCHAR[]", {"b": b})
        relations = [_rows(name, files, schema) for name, files in (("a", a), ("b", b))]
        key, unique = _key(connection, schema, relations)
        if not unique:
            key_order = ", ".join(map(_name, schema.names))
            count = f"row_number() OVER (PARTITION BY {', '.join(map(_name, key))} ORDER BY {key_order})"
            relations = [f"(SELECT *, {count} AS _nth FROM {relation})" for relation in relations]
        joined = [*key, *(() if unique else ("_nth",))]
        values = [field for field in schema if field.name not in key]
        sql = _joined(relations, joined, values)
        row = dict(zip(*_first(connection, sql), strict=True))
    return TableDifference(
        table=table,
        key=key,
        rows=(row["both"] + row["only_a"], row["both"] + row["only_b"]),
        in_both=row["both"],
        only_in=(row["only_a"], row["only_b"]),
        columns=[
            ColumnDifference(
                each.name, str(each.type), row["both"], row[f"equal_{i}"],
                row.get(f"largest_{i}"), row.get(f"flips_{i}"), row.get(f"not_finite_{i}"),
            )
            for i, each in enumerate(values)
        ],
        repeated=not unique,
    )  # fmt: skip


def _first(connection: duckdb.DuckDBPyConnection, sql: str) -> tuple[list[str], tuple[Any, ...]]:
    found = connection.execute(sql)
    names = [column[0] for column in found.description or ()]
    [values] = found.fetchall()
    return names, values


def _rows(variable: str, files: Sequence[str], schema: pa.Schema) -> str:
    columns = ", ".join(map(_name, schema.names))
    if not files:
        typed = ", ".join(f"NULL::{SQL_TYPES[field.type]} AS {_name(field.name)}" for field in schema)
        return f"(SELECT {typed} WHERE false)"
    return f"(SELECT {columns} FROM read_parquet(getvariable('{variable}'), hive_partitioning = false))"


def _key(connection: duckdb.DuckDBPyConnection, schema: pa.Schema, relations: Sequence[str]) -> tuple[list[str], bool]:
    """The columns that tell rows apart, and whether they do.

    Those before the first measured one; where rows still repeat, more that can be ids, in the schema's order; where the
    last are counts that tell nothing apart (int32), fewer.
    """
    fields = list(schema)
    measured = [i for i, each in enumerate(fields) if pa.types.is_floating(each.type) or pa.types.is_boolean(each.type)]
    first = measured[0] if measured else len(fields)
    key, rest = [each.name for each in fields[:first]], fields[first:]

    def unique(names: Sequence[str]) -> bool:
        if not names:
            return False
        columns = ", ".join(map(_name, names))
        return not any(
            connection.execute(f"SELECT 1 FROM {each} GROUP BY {columns} HAVING count(*) > 1 LIMIT 1").fetchall()
            for each in relations
        )

    further = [each.name for each in rest if not pa.types.is_float32(each.type) and each.name not in SCORES]
    further = [name for name in further if not pa.types.is_list(schema.field(name).type)]
    while not (told_apart := unique(key)) and further:
        key.append(further.pop(0))
    while len(key) > 1 and pa.types.is_int32(schema.field(key[-1]).type) and told_apart and unique(key[:-1]):
        key.pop()
    return key or [fields[0].name], told_apart


def _joined(relations: Sequence[str], key: Sequence[str], values: Sequence[pa.Field]) -> str:
    same = " AND ".join(f"a.{_name(name)} IS NOT DISTINCT FROM b.{_name(name)}" for name in key)
    both = "a._there AND b._there"
    asked = [
        f"count(*) FILTER ({both}) AS both",
        "count(*) FILTER (b._there IS NULL) AS only_a",
        "count(*) FILTER (a._there IS NULL) AS only_b",
    ]
    for i, each in enumerate(values):
        left, right = f"a.{_name(each.name)}", f"b.{_name(each.name)}"
        asked.append(f"count(*) FILTER ({both} AND {left} IS NOT DISTINCT FROM {right}) AS equal_{i}")
        if pa.types.is_floating(each.type):
            finite = f"coalesce(isfinite({left}) AND isfinite({right}), false)"
            difference = f"abs({left}::DOUBLE - {right}::DOUBLE)"
            asked.append(f"max({difference}) FILTER ({both} AND {finite}) AS largest_{i}")
            asked.append(
                f"count(*) FILTER ({both} AND {left} IS DISTINCT FROM {right} AND NOT {finite}) AS not_finite_{i}"
            )
        elif pa.types.is_boolean(each.type):
            asked.append(f"count(*) FILTER ({both} AND {left} <> {right}) AS flips_{i}")
    a, b = (f"(SELECT *, true AS _there FROM {relation})" for relation in relations)
    return f"SELECT {', '.join(asked)} FROM {a} AS a FULL OUTER JOIN {b} AS b ON {same}"


def _name(column: str) -> str:
    return f'"{column}"'
