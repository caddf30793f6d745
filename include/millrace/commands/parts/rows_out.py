"""Rows to a file in the formats that millrace.client.produce.row_files reads, by the same conventions: what is written reads back."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument

CHUNK_ROWS: Final = 10_000


def write_json_lines(table: pa.Table, file: BinaryIO) -> None:
    """An object a line; nulls stand as null."""
    for rows in _chunks(table):
        lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows.to_pylist()]
        file.write(("\n".join(lines) + "\n").encode())


def write_csv(table: pa.Table, file: BinaryIO) -> None:
    """A header, then a row each; null is an empty cell. Raises InvalidArgument for lists."""
    lists = [field.name for field in table.schema if pa.types.is_list(field.type)]
    if lists:
        raise InvalidArgument(f"CSV holds no lists (column {lists[0]!r}): choose jsonl or parquet, or --columns")
    file.write(_csv_text([table.column_names]))
    for rows in _chunks(table):
        columns = [_csv_cells(column) for column in rows.columns]
        file.write(_csv_text(list(zip(*columns, strict=True)) if columns else []))


def write_parquet(table: pa.Table, file: BinaryIO) -> None:
    """One Parquet file with the columns' own types."""
    from pyarrow import parquet

    parquet.write_table(table, file, compression="zstd")


def _csv_text(rows: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _csv_cells(column: pa.ChunkedArray) -> list[Any]:
    values = column.to_pylist()
    if pa.types.is_boolean(column.type):
        return [None if value is None else str(value).lower() for value in values]
    return values


def _chunks(table: pa.Table) -> Iterator[pa.Table]:
    """Some rows at a time, in types that JSON and CSV have."""
    for start in range(0, table.num_rows, CHUNK_ROWS):
        rows = table.slice(start, CHUNK_ROWS)
        columns = [_as_text(column.combine_chunks()) for column in rows.columns]
        yield pa.table(dict(zip(rows.column_names, columns, strict=True)))


def _as_text(values: pa.Array) -> pa.Array:
    """Moments as ISO 8601, binary as base64, in lists too; everything else as it is."""
    kind = values.type
    if pa.types.is_timestamp(kind):
        return pc.strftime(values, "%Y-%m-%dT%H:%M:%SZ")
    if pa.types.is_date(kind):
        return values.cast(pa.utf8())
    if pa.types.is_binary(kind):
        encoded = [None if value is None else base64.b64encode(value).decode() for value in values.to_pylist()]
        return pa.array(encoded, pa.utf8())
    if pa.types.is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        return pa.ListArray.from_arrays(offsets, _as_text(values.flatten()), mask=values.is_null())
    return values
