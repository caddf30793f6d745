"""Check dates and timestamps against the years that every reader supports: 1 to 9999, in UTC.

Arrow, Parquet and Delta hold other years, for which Python, pandas, Polars, JSON and CSV have no representation: some
raise an error, some write another year. So a producer does not send them, and an export names the column that holds
one. The chain accepts any.
"""

from __future__ import annotations

from datetime import date
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument

_FIRST_DAY: Final = (date.min - date(1970, 1, 1)).days
_LAST_DAY: Final = (date.max - date(1970, 1, 1)).days
_DAY: Final = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def check_datetime_range(values: Any) -> None:
    """Check each date and timestamp of a column (an Array or ChunkedArray), including nested ones.

    Raises InvalidArgument with a value outside the years 1 to 9999.
    """
    kind = values.type
    if isinstance(values, pa.ChunkedArray) and pa.types.is_nested(kind):
        for each in values.chunks:
            check_datetime_range(each)
    elif pa.types.is_date32(kind):
        _require(values, pa.int32(), 1, "D")
    elif pa.types.is_timestamp(kind) and kind.unit != "ns":  # nanoseconds reach from 1677 to 2262
        _require(values, pa.int64(), _DAY[kind.unit], kind.unit)
    elif pa.types.is_nested(kind) and _holds_moments(kind):
        for each in _parts(values):
            check_datetime_range(each)


def check_datetime_columns(rows: pa.Table | pa.RecordBatch, form: str) -> None:
    """Check rows before they are exported as `form`.

    Raises InvalidArgument with the column and what to do.
    """
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        try:
            check_datetime_range(column)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"the column {name!r}: {error}, which {form} has no form for: read Arrow or Parquet, or leave the"
                " column out"
            ) from None


def _require(values: Any, whole: pa.DataType, day: int, unit: str) -> None:
    bounds = pc.min_max(values)
    first, last = _FIRST_DAY * day, (_LAST_DAY + 1) * day
    for each in (bounds["min"], bounds["max"]):
        if each.is_valid and not first <= (number := each.cast(whole).as_py()) < last:
            raise InvalidArgument(f"{np.int64(number).astype(f'M8[{unit}]')} is beyond the years 1 to 9999 (in UTC)")


def _holds_moments(kind: pa.DataType) -> bool:
    return any(
        pa.types.is_date32(each) or pa.types.is_timestamp(each) or (pa.types.is_nested(each) and _holds_moments(each))
        for each in (kind.field(place).type for place in range(kind.num_fields))
    )


def _parts(values: pa.Array) -> list[pa.Array]:
    """Return the child columns of a nested one, without values hidden under nulls."""
    if pa.types.is_map(values.type):
        values = values.cast(pa.list_(pa.struct([values.type.key_field.with_nullable(True), values.type.item_field])))
    return values.flatten() if pa.types.is_struct(values.type) else [values.flatten()]
