"""Parquet files of the store: how they are encoded, what their footer says, and whether one can be trusted.

Knows encodings and footers; knows nothing about where files live. The footer's "mathinterp" entry is the
JSON configuration that the rows were computed under, so a file explains itself when it is copied elsewhere.
"""

import json
from io import BytesIO
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from mathinterp.store.catalog import catalog
from mathinterp.store.schema import conform

FOOTER_KEY = b"mathinterp"


def encode(rows: pa.Table, table: str, config: dict[str, Any]) -> bytes:
    """``rows`` as a Parquet file with ``config`` in its footer: zstd, byte-stream-split floats.

    Raises AssertionError if the columns are not those of the table.
    """
    assert table in catalog().tables, f"table '{table}' belongs to no known experiment"
    stored = catalog().tables[table]
    footer = {FOOTER_KEY: json.dumps(config, sort_keys=True, allow_nan=False).encode()}
    buffer = BytesIO()
    pq.write_table(
        conform(rows, table, stored.schema).replace_schema_metadata(footer),
        buffer,
        compression="zstd",
        use_dictionary=list(stored.dictionary) or False,
        use_byte_stream_split=[field.name for field in stored.schema if pa.types.is_floating(field.type)] or False,
    )
    return buffer.getvalue()


def fault(file: BinaryIO, table: str, identity: dict[str, str]) -> str | None:
    """Why a file must not be read as part of ``table``, or None if it may.

    Args:
        identity: what the file's place in the store says about it (run_id and shard, or prompts_fingerprint).
    Reads the footer only: it is written last, so a truncated file has none.
    """
    try:
        parquet = pq.ParquetFile(file)
        schema, metadata = parquet.schema_arrow, parquet.metadata.metadata or {}
    except (pa.ArrowException, OSError, EOFError) as error:
        return f"truncated or not Parquet ({_first_line(error)})"
    try:
        config = json.loads(metadata[FOOTER_KEY])
    except (KeyError, ValueError):
        return "not written by mathinterp (its footer has no configuration)"
    for key, expected in identity.items():
        if config.get(key) != expected:
            return f"foreign: its footer says {key} '{config.get(key)}', its place says '{expected}'"
    if not schema.equals(catalog().tables[table].schema):
        return f"its columns are not those of {table}"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
