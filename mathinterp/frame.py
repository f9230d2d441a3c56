"""The result of a query: a pandas data frame that also gives Arrow and polars."""

from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from mathinterp.errors import UserError

if TYPE_CHECKING:
    import polars as pl

NULLABLE = {
    pa.int8(): pd.Int8Dtype(), pa.int16(): pd.Int16Dtype(), pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype()
}  # fmt: skip


class Frame(pd.DataFrame):
    """A pandas data frame; integers with gaps among them stay integers (pandas' nullable ones)."""

    @property
    def _constructor(self) -> Any:
        return Frame

    @staticmethod
    def of(table: pa.Table) -> "Frame":
        """From Arrow; an integer column with nulls becomes Int8 to Int64, which hold pd.NA."""
        frame = Frame(table.to_pandas())
        for column, name in zip(table.columns, table.column_names, strict=True):
            if column.null_count and pa.types.is_signed_integer(column.type):
                frame[name] = column.to_pandas(types_mapper=NULLABLE.get)
        return frame

    def arrow(self) -> pa.Table:
        """The rows as an Arrow table, without pandas' index."""
        table = pa.Table.from_pandas(pd.DataFrame(self), preserve_index=False).replace_schema_metadata()
        short = [
            field.with_type(pa.string()) if pa.types.is_large_string(field.type) else field for field in table.schema
        ]  # fmt: skip
        return table.cast(pa.schema(short))

    def polars(self) -> "pl.DataFrame":
        """The rows as a polars frame; raises UserError where polars is not installed."""
        try:
            import polars as pl
        except ImportError as error:
            raise UserError("polars is not installed: pip install polars (or the extra mathinterp[polars])") from error
        found = pl.from_arrow(self.arrow())
        assert isinstance(found, pl.DataFrame)
        return found
