"""What a stored table is: the columns of its Parquet files, and how they are partitioned and encoded."""

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Table:
    """Columns of the Parquet files of one table, and the folder name that partitions them.

    schema: without the partition column.
    dictionary: columns of few values in long runs, such as layer and head ids.
    doc: what a row is, and what the columns mean; the view of the table's own name opens with it.
    """

    schema: pa.Schema
    dictionary: tuple[str, ...] = ()
    doc: str = ""
    partition: str = "run_id"  # <store>/<table>/<partition>=<value>/*.parquet
