"""The rows of a query as CSV, Parquet or JSON, batch by batch."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from mathinterp.errors import UserError
from mathinterp.gates import check_place
from mathinterp.local_files import whole_file
from mathinterp.store.files import StoreFailed
from mathinterp.store.query import json_rows, unique_names


def write_csv(rows: pa.RecordBatchReader, file: BinaryIO) -> int:
    """A header and a line per row; returns their number. Text is quoted, a missing value is empty, lists are JSON."""
    schema = pa.schema([(field.name, field.type if _plain(field.type) else pa.string()) for field in rows.schema])
    with pyarrow.csv.CSVWriter(file, schema) as writer:
        return _each(rows, lambda batch: writer.write_table(_as(batch, schema)))


def write_json(rows: pa.RecordBatchReader, file: BinaryIO) -> int:
    """One array with an object per row; returns their number."""
    file.write(b"[")
    written = 0
    for batch in rows:
        texts = [json.dumps(row, ensure_ascii=False) for row in json_rows(pa.Table.from_batches([batch]))]
        file.write((", " if written and texts else "").encode() + ", ".join(texts).encode())
        written += len(texts)
    file.write(b"]\n")
    return written


def write_parquet(rows: pa.RecordBatchReader, file: BinaryIO) -> int:
    """A Parquet file with the query's types; returns the number of rows. Columns of one name are numbered."""
    schema = pa.schema([
        field.with_name(name) for field, name in zip(rows.schema, unique_names(rows.schema.names), strict=True)
    ], metadata=rows.schema.metadata)  # fmt: skip
    try:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            return _each(rows, lambda batch: writer.write_batch(pa.record_batch(batch.columns, schema)))
    except pa.ArrowNotImplementedError as error:
        raise UserError(f"Parquet cannot hold a column of this query ({error}); cast it to another type") from error


WRITERS: Mapping[str, Callable[[pa.RecordBatchReader, BinaryIO], int]] = {
    ".csv": write_csv,
    ".parquet": write_parquet,
    ".json": write_json,
}


def check_export(path: Path, endings: Sequence[str] = tuple(WRITERS)) -> None:
    """Raise UserError for a file whose ending is none of these or that cannot be written."""
    check_place(path, "`output`")
    if path.suffix not in endings:
        raise UserError(f"`output` '{path}' must end in {', '.join(endings)}")
    if not path.parent.is_dir() or path.is_dir():
        what = "is a folder" if path.is_dir() else f"cannot be written: '{path.parent}' is no folder"
        raise UserError(f"`output` '{path}' {what}; name another file")


def export(rows: pa.RecordBatchReader, path: Path) -> int:
    """Write all rows to ``path``, in the form that its ending says; the file is there whole or not at all.

    Returns the number of rows; raises UserError as ``check_export`` does, and if writing fails.
    """
    check_export(path)
    with writing(path), whole_file(path) as temporary, temporary.open("xb") as file:
        return WRITERS[path.suffix](rows, file)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError within the block as a UserError about the file."""
    try:
        yield
    except StoreFailed:
        raise
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"`output` '{path}' cannot be written ({why}); name another file") from error


def _each(rows: pa.RecordBatchReader, write: Callable[[pa.RecordBatch], object]) -> int:
    written = 0
    for batch in rows:
        write(batch)
        written += batch.num_rows
    return written


def _plain(kind: pa.DataType) -> bool:
    """Whether CSV has a form of its own for values of this type."""
    others = (pa.types.is_nested, pa.types.is_interval, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_null)
    return not isinstance(kind, pa.BaseExtensionType) and not any(is_other(kind) for is_other in others)


def _as(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """The batch with the columns that are not plain as text."""
    columns = [column if _plain(column.type) else _texts(column) for column in batch.columns]
    return pa.Table.from_arrays(columns, schema=schema)


def _texts(column: pa.Array) -> pa.Array:
    """Lists and the like as JSON, what JSON does not know as Python writes it."""
    values = [row["value"] for row in json_rows(pa.table({"value": column}))]
    texts = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    return pa.array(texts, pa.string())
