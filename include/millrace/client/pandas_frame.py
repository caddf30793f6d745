"""An Arrow table as a DataFrame of pandas that says the same: what a collection's rows are as they are read, and back.

By itself Arrow makes floats of integers where one is null, which changes those beyond 2**53, and of a null and a NaN one thing. Here a column
that may be null has the type of pandas that knows nulls (``Int64``, ``Float64``, ``boolean``); what is nested is Python's objects, but for a list
of numbers without nulls, which is an array of numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from millrace.message.datetime_range import check_datetime_columns

if TYPE_CHECKING:
    import pandas as pd

_WITH_NULLS: Final = {getattr(pa, f"int{bits}")(): f"Int{bits}" for bits in (8, 16, 32, 64)} | {
    pa.float32(): "Float32",
    pa.float64(): "Float64",
    pa.bool_(): "boolean",
}


def pandas_frame(rows: pa.Table) -> pd.DataFrame:
    """`rows` as a DataFrame. Raises InvalidArgument for days and moments beyond the years 1 to 9999."""
    import pandas as pd

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
    """Whether each list holds numbers alone, which numpy has as they are."""
    kind = column.type
    return (
        pa.types.is_list(kind)
        and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))
        and not any(chunk.flatten().null_count for chunk in column.chunks)
    )
