"""Parquet files of the store: how they are encoded, what their footer says, and whether one can be trusted.

Knows encodings, footers and checksums; knows nothing about where files live. The footer's "mathinterp" entry is the
JSON configuration that the rows were computed under, so a file explains itself when it is copied elsewhere. Its number
of rows stands there since pages have checksums: a file without it has none.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from mathinterp.errors import first_line_of
from mathinterp.store.catalog import catalog
from mathinterp.store.schema import conform

FOOTER_KEY = b"mathinterp"


class Footer(NamedTuple):
    """What the end of a file says: its rows, or why it must not be read."""

    fault: str | None
    rows: int = -1


def encode(rows: pa.Table, table: str, config: dict[str, Any]) -> bytes:
    """``rows`` as a Parquet file with ``config`` in its footer: zstd, byte-stream-split floats, pages with checksums.

    Raises AssertionError if the columns are not those of the table.
    """
    return encode_parts([rows], rows.num_rows, table, config)


def encode_parts(parts: Iterable[pa.Table], count: int, table: str, config: dict[str, Any]) -> bytes:
    """As ``encode`` of all parts together, which are ``count`` rows; one part is in memory, and is a row group."""
    assert table in catalog().tables, f"table '{table}' belongs to no known experiment"
    stored = catalog().tables[table]
    footer = {FOOTER_KEY: json.dumps({**config, "rows": count}, sort_keys=True, allow_nan=False).encode()}
    buffer, written = BytesIO(), 0
    with pq.ParquetWriter(
        buffer,
        stored.schema.with_metadata(footer),
        compression="zstd",
        use_dictionary=list(stored.dictionary) or False,
        use_byte_stream_split=[path for field in stored.schema for path in _float_paths(field)] or False,
        write_page_checksum=True,
    ) as writer:
        for rows in parts:
            writer.write_table(conform(rows, table, stored.schema).replace_schema_metadata(footer))
            written += rows.num_rows
    assert written == count, f"{written} rows of {table}, not {count}"
    return buffer.getvalue()


def _float_paths(field: pa.Field) -> list[str]:
    """The Parquet columns of floats in a column: itself, or a list's values."""
    if pa.types.is_list(field.type):
        return [f"{field.name}.list.element"] if pa.types.is_floating(field.type.value_type) else []
    return [field.name] if pa.types.is_floating(field.type) else []


def read_footer(file: BinaryIO, table: str, identity: Mapping[str, str]) -> Footer:
    """Whether a file may be read as part of ``table``, by its footer, which is written last.

    Args:
        identity: what the file's place in the store says about it (run_id and shard, or prompts_fingerprint).
    """
    try:
        parquet = pq.ParquetFile(file)
        schema, metadata = parquet.schema_arrow, parquet.metadata.metadata or {}
        rows = parquet.metadata.num_rows
    except Exception as error:  # whatever a damaged footer makes of itself
        return Footer(f"truncated or not Parquet ({first_line_of(error)})")
    try:
        config = json.loads(metadata[FOOTER_KEY])
    except (KeyError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        return Footer("not written by mathinterp (its footer has no configuration)")
    for key, expected in identity.items():
        if config.get(key) != expected:
            return Footer(f"foreign: its footer says {key} '{str(config.get(key))[:80]}', its place says '{expected}'")
    if not schema.equals(catalog().tables[table].schema):
        return Footer(f"its columns are not those of {table}")
    if rows != config.get("rows", rows):
        return Footer(f"it has {rows} rows, and was written with {config['rows']}")
    return Footer(None, rows)


def footer_config(file: BinaryIO) -> dict[str, Any]:
    """The configuration in a file's footer; raises errors of many classes for what is no file of ours."""
    found: dict[str, Any] = json.loads(pq.read_metadata(file).metadata[FOOTER_KEY])
    return found


def has_checksums(file: BinaryIO) -> bool:
    """Whether the pages of a file with a good footer have checksums."""
    return "rows" in footer_config(file)


def damage(file: BinaryIO) -> str | None:
    """Why a file's pages cannot be trusted: every one is read and its checksum, where it has one, compared."""
    try:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        read = sum(batch.num_rows for batch in parquet.iter_batches())
        if read != parquet.metadata.num_rows:  # a page's header, which has no checksum, may say that it is empty
            return f"damaged ({read} of {parquet.metadata.num_rows} rows can be read)"
    except Exception as error:  # codecs raise errors of their own
        return f"damaged ({first_line_of(error)})"
    return None


def whole_rows(content: bytes, known: str | None) -> pa.Table:
    """The rows of a file; raises OSError unless its bytes are those of a known SHA-256, and all its rows are read."""
    if known is not None and hashlib.sha256(content).hexdigest() != known:
        raise OSError("damaged: its checksum is not the one that the record of its run has")
    rows = pq.read_table(BytesIO(content), page_checksum_verification=True)
    written = pq.read_metadata(BytesIO(content)).num_rows
    if len(rows) != written:  # see ``damage``
        raise OSError(f"damaged: {len(rows)} of {written} rows can be read")
    return rows


def config_of(rows: pa.Table) -> dict[str, Any]:
    """The configuration in the footer of a file that was read as a whole."""
    found: dict[str, Any] = json.loads((rows.schema.metadata or {})[FOOTER_KEY])
    return found


def of_one_shard(rows: pa.Table, shard: str, start: int, count: int) -> pa.Table:
    """Of a merged file the rows of one shard, with the configuration that its own file had.

    Raises OSError if the file does not say that it holds this shard there.
    """
    own: list[dict[str, Any]] = config_of(rows).get("merged", [])
    places = [sum(each["rows"] for each in own[:i]) for i in range(len(own))]
    found = [each for each, place in zip(own, places, strict=True) if (each["shard"], place) == (shard, start)]
    if len(found) != 1 or found[0]["rows"] != count:
        raise OSError(f"its footer does not have shard {shard} where the record of its run says")
    config = {name: value for name, value in (config_of(rows) | found[0]).items() if name not in ("merged", "sha256")}
    return rows.slice(start, count).replace_schema_metadata({FOOTER_KEY: json.dumps(config, sort_keys=True).encode()})


def checksum(file: BinaryIO) -> str:
    """SHA-256 of all bytes, in hexadecimal."""
    return hashlib.file_digest(cast(BytesIO, file), "sha256").hexdigest()
