"""What each stored table holds: the one place to register a new one.

Knows columns and partitions; knows nothing about how rows are computed. A new scan adds its columns to
scans/tables.py, an entry to TABLES and a file ``views/<table>.sql``; writing, checking, resuming and the views follow.
"""

from dataclasses import dataclass

import pyarrow as pa

from mathinterp.scans import tables


@dataclass(frozen=True)
class StoredTable:
    """Columns of the Parquet files of one table, and the folder name that partitions them."""

    schema: pa.Schema  # without the partition column
    partition: str = "run_id"  # <store>/<table>/<partition>=<value>/*.parquet
    dictionary: tuple[str, ...] = ()  # columns of few values in long runs: layer and head ids


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

TABLES: dict[str, StoredTable] = {
    "prompts": StoredTable(pa.schema(_PROMPT), partition="prompts_fingerprint"),
    "answer_tokens": StoredTable(pa.schema(_ANSWER_TOKEN), partition="prompts_fingerprint"),
    "baseline": StoredTable(tables.BASELINE),
    "head_scan": StoredTable(tables.HEAD_SCAN, dictionary=("layer", "head")),
    "mlp_scan": StoredTable(tables.MLP_SCAN, dictionary=("layer",)),
    "knockout_scan": StoredTable(tables.KNOCKOUT_SCAN, dictionary=("ranking",)),
    "knockout_heads": StoredTable(tables.KNOCKOUT_HEADS),
    "knockout_examples": StoredTable(tables.KNOCKOUT_EXAMPLES),
    "iterative_scan": StoredTable(tables.ITERATIVE_SCAN),
    "path_scan": StoredTable(tables.PATH_SCAN, dictionary=("node", "layer", "head")),
    "path_pairs": StoredTable(tables.PATH_PAIRS),
    "attribution_scan": StoredTable(tables.ATTRIBUTION_SCAN, dictionary=("node", "layer", "head")),
    "tuning_runs": StoredTable(tables.TUNING_RUNS),
    "neuron_scan": StoredTable(tables.NEURON_SCAN, dictionary=("node", "layer", "operation", "prompt_id")),
    "neuron_targets": StoredTable(tables.NEURON_TARGETS, dictionary=("condition",)),
    "maskkeep_scan": StoredTable(tables.MASKKEEP_SCAN, dictionary=("mode", "ranking", "prompt_id")),
    "maskkeep_neurons": StoredTable(tables.MASKKEEP_NEURONS, dictionary=("ranking", "prompt_id", "layer")),
    "edit_scan": StoredTable(tables.EDIT_SCAN, dictionary=("edit",)),
    "edit_text": StoredTable(tables.EDIT_TEXT, dictionary=("edit",)),
    "edit_neurons": StoredTable(tables.EDIT_NEURONS, dictionary=("edit",)),
    "gender_neurons": StoredTable(tables.GENDER_NEURONS, dictionary=("layer", "stereotype")),
    "sweep_scan": StoredTable(tables.SWEEP_SCAN, dictionary=("layer",)),
    "sweep_neurons": StoredTable(tables.SWEEP_NEURONS, dictionary=("tuned_layer", "prompt_id", "layer")),
    "prune_scan": StoredTable(tables.PRUNE_SCAN, dictionary=("condition",)),
    "prune_neurons": StoredTable(tables.PRUNE_NEURONS, dictionary=("condition", "layer")),
    "neuron_graph_nodes": StoredTable(tables.NEURON_GRAPH_NODES, dictionary=("graph", "operation", "layer")),
    "neuron_graph_edges": StoredTable(tables.NEURON_GRAPH_EDGES, dictionary=("graph", "layer", "to_layer")),
    "neuron_graph_check": StoredTable(
        tables.NEURON_GRAPH_CHECK, dictionary=("graph", "operation", "prompt_id", "k", "zeroed", "layer")
    ),
    "chain_scan": StoredTable(
        tables.CHAIN_SCAN, dictionary=("prompt_id", "stage", "layer", "via_layer", "via_head", "token_type")
    ),
    "attention_scan": StoredTable(tables.ATTENTION_SCAN, dictionary=("layer", "head", "token_type")),
    "mlp_probe": StoredTable(tables.MLP_PROBE, dictionary=("layer", "target")),
    "evaluations": StoredTable(tables.EVALUATIONS, dictionary=("task", "subset")),
    "concept_scan": StoredTable(tables.CONCEPT_SCAN, dictionary=("layer", "attention_layer", "sign", "hits")),
    "concept_zeroing": StoredTable(tables.CONCEPT_ZEROING, dictionary=("neurons", "level", "seed", "zeroed")),
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

_SQL_TYPES = {
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
}


def sql_columns(table: str) -> dict[str, str]:
    """Column -> DuckDB type of a stored table, its partition column first."""
    stored = TABLES[table]
    return {stored.partition: "VARCHAR"} | {field.name: _SQL_TYPES[field.type] for field in stored.schema}


def conform(rows: pa.Table, table: str) -> pa.Table:
    """``rows`` in the stored column order and integer widths; any other difference is a fault of the program.

    Raises pyarrow.ArrowInvalid if an integer does not fit the stored width.
    """
    assert table in TABLES, f"table '{table}' is not registered in store/schema.py"
    schema = TABLES[table].schema
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
