"""Writers of rows in the formats that millrace.client.produce.files.reader reads: what they write reads back."""

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
from millrace.message.datetime_range import check_datetime_columns

CHUNK_ROWS: Final = 10_000
GROUP_BYTES: Final = 32 << 20


def write_rows(chosen: str, rows: pa.RecordBatchReader, file: BinaryIO) -> int:
    """Stream `rows` and return their number. Raises InvalidArgument if the format cannot represent them."""
    return {"jsonl": write_json_lines, "csv": write_csv, "parquet": write_parquet, "arrow": write_arrow}[chosen](
        rows, file
    )


def write_json_lines(rows: pa.RecordBatchReader, file: BinaryIO) -> int:
    """Write one JSON object per line; nulls as null."""
    written = 0
    for chunk in _chunks(rows):
        found = chunk.to_pylist(maps_as_pydicts="lossy")
        lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in found]
        file.write(("\n".join(lines) + "\n").encode())
        written += chunk.num_rows
    return written


def write_csv(rows: pa.RecordBatchReader, file: BinaryIO) -> int:
    """Write a header and one line per row; null is an empty cell. Raises InvalidArgument for nested columns."""
    lists = [field.name for field in rows.schema if pa.types.is_nested(field.type)]
    if lists:
        raise InvalidArgument(
            f"CSV holds no lists, maps or structs (column {lists[0]!r}): choose jsonl or parquet, or --columns"
        )
    file.write(_csv_text([rows.schema.names]))
    written = 0
    for chunk in _chunks(rows):
        columns = [_csv_cells(column) for column in chunk.columns]
        file.write(_csv_text(list(zip(*columns, strict=True)) if columns else []))
        written += chunk.num_rows
    return written


def write_parquet(rows: pa.RecordBatchReader, file: BinaryIO) -> int:
    """Write one Parquet file with the columns' types. Memory: one row group of about GROUP_BYTES."""
    from pyarrow import parquet

    written, held = 0, list[pa.RecordBatch]()
    with parquet.ParquetWriter(file, rows.schema, compression="zstd") as writer:
        for batch in rows:
            held.append(batch)
            if sum(each.nbytes for each in held) >= GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(held))
                held = []
            written += batch.num_rows
        if held:
            writer.write_table(pa.Table.from_batches(held))
    return written


def write_arrow(rows: pa.RecordBatchReader, file: BinaryIO) -> int:
    """Write one Arrow IPC file."""
    written = 0
    with pa.ipc.new_file(file, rows.schema) as writer:
        for batch in rows:
            writer.write_batch(batch)
            written += batch.num_rows
    return written


def _csv_text(rows: Any) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _csv_cells(column: pa.ChunkedArray) -> list[Any]:
    values = column.to_pylist()
    if pa.types.is_boolean(column.type):
        return [None if value is None else str(value).lower() for value in values]
    return values


def _chunks(rows: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """Yield CHUNK_ROWS rows at a time, converted to types that JSON and CSV have."""
    for batch in rows:
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            part = batch.slice(start, CHUNK_ROWS)
            check_datetime_columns(part, "text")
            columns = [_as_text(column) for column in part.columns]
            yield pa.table(dict(zip(rows.schema.names, columns, strict=True)))


def _as_text(values: pa.Array) -> pa.Array:
    """Convert timestamps to ISO 8601 and binary to base64, also in nested values. Leave the rest."""
    kind = values.type
    if pa.types.is_timestamp(kind):
        return pc.strftime(values, "%Y-%m-%dT%H:%M:%S" + ("" if kind.tz is None else "Z"))
    if pa.types.is_date(kind) or pa.types.is_decimal(kind):
        return values.cast(pa.utf8())
    if pa.types.is_binary(kind):
        encoded = [None if value is None else base64.b64encode(value).decode() for value in values.to_pylist()]
        return pa.array(encoded, pa.utf8())
    if pa.types.is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        return pa.ListArray.from_arrays(offsets, _as_text(values.flatten()), mask=values.is_null())
    if pa.types.is_struct(kind):
        names = [kind.field(place).name for place in range(kind.num_fields)]
        return pa.StructArray.from_arrays([_as_text(each) for each in values.flatten()], names, mask=values.is_null())
    if pa.types.is_map(kind):
        values = pa.concat_arrays([values])  # with offsets from 0 on, where it is part of another
        keys, items = _as_text(values.keys).cast(pa.utf8()), _as_text(values.items)
        return pa.MapArray.from_arrays(values.offsets, keys, items, mask=values.is_null())
    return values
