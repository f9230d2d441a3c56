"""The store's own tables, the fields of a run's record, and how rows are brought into a table's columns.

Knows columns and SQL types; which tables experiments fill is told by the catalog.
"""

import pyarrow as pa

from mathinterp.experiments.table import Table

_PROMPT = [
    pa.field("prompt_id", pa.string()),
    pa.field("text", pa.string()),
    pa.field("answer", pa.string()),
    pa.field("operation", pa.string()),
    pa.field("template", pa.string()),
    pa.field("operand_a", pa.string()),
    pa.field("operand_b", pa.string()),
    pa.field("counterfactual", pa.string()),
]
_ANSWER_TOKEN = [
    pa.field("prompt_id", pa.string()),
    pa.field("position", pa.int16()),
    pa.field("token_id", pa.int32()),
    pa.field("token", pa.string()),
    pa.field("kind", pa.string()),
    pa.field("carry_class", pa.string()),
]
_PROMPT_COLUMN = [
    pa.field("prompt_id", pa.string()),
    pa.field("name", pa.string()),
    pa.field("value", pa.string()),
]

STORE_TABLES: dict[str, Table] = {
    "prompts": Table(
        pa.schema(_PROMPT),
        partition="prompts_fingerprint",
        doc="one row per prompt of every prompt set used. counterfactual: the same sentence with a neutral operator.",
    ),
    "answer_tokens": Table(
        pa.schema(_ANSWER_TOKEN),
        partition="prompts_fingerprint",
        doc="one row per scored answer token. position: 0 = first scored token of the prompt; kind: digit, sign or"
        " text. carry_class (paper A, Table 3): change-one if the token's column received a carry or borrow, else"
        " memorize; mixed where one token covers columns of both.",
    ),
    "prompt_columns": Table(
        pa.schema(_PROMPT_COLUMN),
        ("name",),
        partition="prompts_fingerprint",
        doc="further columns that prompts were given with, a row per prompt and column, as text. They are no part of"
        " the fingerprint: the last ones given for the same prompts are kept.",
    ),
}

RUN_COLUMNS: dict[str, str] = {
    "run_id": "VARCHAR",
    "scan": "VARCHAR",
    "model": "VARCHAR",
    "model_fingerprint": "VARCHAR",
    "prompts": "VARCHAR",
    "prompts_fingerprint": "VARCHAR",
    "dtype": "VARCHAR",
    "parameters": "JSON",
    "code_version": "VARCHAR",
    "versions": "JSON",
    "started_at": "TIMESTAMP",
    "finished_at": "TIMESTAMP",
    "shards": "VARCHAR[]",
    "errors": "JSON",
    "attempts": "JSON",
    "hosts": "VARCHAR[]",
    "wall_seconds": "DOUBLE",
    "notes": "JSON",
}  # fields of runs/<run_id>.json and their SQL types

SQL_TYPES = {
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.list_(pa.float32()): "FLOAT[]",
}


def sql_columns(stored: Table) -> dict[str, str]:
    """Column -> DuckDB type of a stored table, its partition column first."""
    return {stored.partition: "VARCHAR"} | {field.name: SQL_TYPES[field.type] for field in stored.schema}


def conform(rows: pa.Table, table: str, schema: pa.Schema) -> pa.Table:
    """``rows`` in the stored column order and integer widths; any other difference is a fault of the program.

    Raises pyarrow.ArrowInvalid if an integer does not fit the stored width.
    """
    assert sorted(rows.column_names) == sorted(schema.names), f"{table}: {rows.column_names} are not {schema.names}"
    columns = []
    for field in schema:
        column = rows.column(field.name)
        if column.type != field.type:
            both_integer = pa.types.is_integer(column.type) and pa.types.is_integer(field.type)
            assert both_integer, f"{table}.{field.name} is {column.type}, not {field.type}"
            column = column.cast(field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)
