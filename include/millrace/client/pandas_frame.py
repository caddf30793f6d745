"""Conversion of Arrow tables to pandas DataFrames that keeps values unchanged.

Arrow's own conversion turns integers into floats if one is null, which changes those beyond 2**53, and does not
distinguish null from NaN. Here a nullable column gets a pandas type with nulls (``Int64``, ``Float64``, ``boolean``).
Nested columns become Python objects, except lists of numbers without nulls, which become numpy arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from millrace.base.extras import import_optional
from millrace.message.datetime_range import check_datetime_columns

if TYPE_CHECKING:
    import pandas as pd

_WITH_NULLS: Final = {getattr(pa, f"int{bits}")(): f"Int{bits}" for bits in (8, 16, 32, 64)} | {
    pa.float32(): "Float32",
    pa.float64(): "Float64",
    pa.bool_(): "boolean",
}


def pandas_frame(rows: pa.Table) -> pd.DataFrame:
    """Convert `rows` to a DataFrame.

    Raises InvalidArgument for dates and timestamps beyond the years 1 to 9999.
    Raises InvalidSettings if pandas is not installed.
    """
    pd = import_optional("pandas")
    check_datetime_columns(rows, "pandas")
    columns = {}
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if field.nullable and field.type in _WITH_NULLS:
            kind: Any = pd.api.types.pandas_dtype(_WITH_NULLS[field.type])
            columns[field.name] = pd.Series(kind.__from_arrow__(column))
        elif pa.types.is_nested(field.type) and not _is_plain_list(column):
            columns[field.name] = pd.Series(column.to_pylist(), dtype=object)
        else:
            columns[field.name] = column.to_pandas()
    return pd.DataFrame(columns, columns=rows.schema.names, index=pd.RangeIndex(len(rows)))


def _is_plain_list(column: pa.ChunkedArray) -> bool:
    """Return whether each list holds only numbers, which numpy stores without conversion."""
    kind = column.type
    return (
        pa.types.is_list(kind)
        and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))
        and not any(chunk.flatten().null_count for chunk in column.chunks)
    )
