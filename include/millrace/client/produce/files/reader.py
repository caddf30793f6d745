"""Rows from a file or stdin, in batches, with the line of each row.

Every value is checked against the collection's schema before anything is sent. A row that does not fit becomes a
:class:`BadRow` with its line number (for formats without lines: row number) and affects no other row. Conventions are
the same as for output: timestamps and dates are ISO 8601 text (a timestamp without a zone is UTC), binary is base64; an
empty CSV cell of a nullable field is null.

Memory: a batch as read and as columns, and what the format reads at a time (a row group of Parquet, a batch of Arrow, a
block of Avro, one MiB of JSON). The file need not fit into memory.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.base.extras import missing_extra_error
from millrace.client.produce.column_conversion import from_arrow, from_python
from millrace.client.produce.files.csv_format import csv_rows, from_cells
from millrace.client.produce.files.formats import CsvOptions, InputFormat, decompressed
from millrace.client.produce.files.json_parser import begins_array
from millrace.client.produce.files.row_conversion import (
    Converter,
    RawRows,
    RowBatch,
    RowRules,
    convert_rows,
    from_json,
    join_batches,
    json_value,
)
from millrace.client.produce.files.text_formats import (
    READ_ERRORS,
    check_header,
    json_array,
    json_lines,
    read_error,
)
from millrace.client.produce.rows import with_generated_keys
from millrace.message.schema import CollectionSchema


def read_batches(
    source: BinaryIO,
    kind: InputFormat,
    schema: CollectionSchema,
    *,
    batch_rows: int,
    keys_only: bool = False,
    allowed: tuple[str, list[str]] | None = None,
    quote: bool = True,
    form: CsvOptions | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of `source`, compressed or not, as `schema`'s columns, `batch_rows` at a time.

    `keys_only` reads the primary key's columns and ignores the others. `allowed` is a column and its permitted values.
    Without `show_values`, errors contain nothing of the file, for users who may not read it.

    Raises InvalidArgument for errors that do not concern one row: missing columns, a file that is not Parquet or is cut
    off.
    """
    generated = schema.generated_key and not keys_only
    fields = schema.key_fields if keys_only else schema.fields
    ruled = not keys_only and (schema.has_fill_values or schema.has_row_rules)
    absent: dict[str, Any] = {}
    if ruled:
        from millrace.client.produce.defaults_and_checks import default_value

        absent = {field.name: default_value(field) for field in fields if field.default is not None}
        fields = tuple(
            replace(field, nullable=field.nullable or field.default is not None or field.computed is not None)
            for field in fields
        )
    if generated:  # rows without a key get one below
        fields = tuple(replace(field, nullable=field.nullable or field in schema.key_fields) for field in fields)
    wanted = pa.schema([field.arrow() for field in fields])
    chosen = form or CsvOptions()
    convert: Converter = from_arrow
    raws: Iterable[RawRows | list[RawRows]]
    try:
        with decompressed(source) as plain:
            match kind:
                case InputFormat.CSV:
                    raws = csv_rows(plain, wanted, batch_rows, keys_only, quote, chosen)
                    convert = partial(from_cells, form=chosen)
                case InputFormat.JSONL | InputFormat.JSON:
                    array = kind is InputFormat.JSON and begins_array(plain)
                    texts = {name: json_value(value) for name, value in absent.items()}
                    raws = (json_array if array else json_lines)(plain, wanted, batch_rows, keys_only, quote, texts)
                    convert = from_json
                case InputFormat.PARQUET:
                    raws = _parquet(plain, wanted, batch_rows, keys_only, quote)
                case InputFormat.ARROW:
                    raws = _arrow(plain, wanted, batch_rows, keys_only, quote)
                case InputFormat.AVRO:
                    raws, convert = _avro(plain, wanted, batch_rows, keys_only, quote, absent), from_python
            for raw in raws:
                found = join_batches(
                    [
                        convert_rows(part, fields, convert, allowed, quote, _rules(part, schema) if ruled else None)
                        for part in (raw if isinstance(raw, list) else [raw])
                    ]
                )
                if generated and not ruled:
                    found = replace(found, rows=with_generated_keys(found.rows, schema))
                yield found if not (generated or ruled) else replace(found, rows=found.rows.cast(schema.arrow()))
    except (*READ_ERRORS, pa.ArrowException) as error:
        if kind in (InputFormat.CSV, InputFormat.JSONL, InputFormat.JSON):
            raise read_error(1, error) from None  # errors after the first line have their line number already
        raise InvalidArgument(f"the file does not read{f': {error}' if quote else ''}") from None


def _rules(raw: RawRows, schema: CollectionSchema) -> RowRules:
    """Return the rules for a file's rows; a column that the file lacks becomes nulls."""
    from millrace.client.produce.defaults_and_checks import apply_rules_to_file

    absent = {
        name for name, values in raw.columns.items() if isinstance(values, pa.Array) and pa.types.is_null(values.type)
    }
    return lambda table: apply_rules_to_file(with_generated_keys(table, schema), schema, absent)


def _seekable(source: BinaryIO) -> BinaryIO:
    return source if isinstance(source, io.BufferedReader) and source.seekable() else io.BytesIO(source.read())


def _parquet(source: BinaryIO, wanted: pa.Schema, batch_rows: int, keys_only: bool, quote: bool) -> Iterator[RawRows]:
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(_seekable(source), coerce_int96_timestamp_unit="us", page_checksum_verification=True)
        names = file.schema_arrow.names
        check_header(names, wanted, keys_only, quote)
        batches = file.iter_batches(batch_rows, columns=[name for name in wanted.names if name in names])
        yield from _columns(batches, wanted)
    except (pa.ArrowException, OSError) as error:
        raise InvalidArgument(f"the Parquet file cannot be read{f': {error}' if quote else ''}") from None


def _arrow(source: BinaryIO, wanted: pa.Schema, batch_rows: int, keys_only: bool, quote: bool) -> Iterator[RawRows]:
    """Read an IPC file or stream, depending on the first bytes."""
    try:
        peek = getattr(source, "peek", None)
        if peek is not None and peek(6)[:6] == b"ARROW1":
            file = pa.ipc.open_file(_seekable(source))
            schema, batches = file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            stream = pa.ipc.open_stream(source)
            schema, batches = stream.schema, iter(stream)
        check_header(schema.names, wanted, keys_only, quote)
        parts = (batch.slice(first, batch_rows) for batch in batches for first in range(0, batch.num_rows, batch_rows))
        yield from _columns(parts, wanted)
    except (pa.ArrowException, OSError) as error:
        raise InvalidArgument(f"the Arrow file cannot be read{f': {error}' if quote else ''}") from None


def _columns(batches: Iterable[pa.RecordBatch], wanted: pa.Schema) -> Iterator[RawRows]:
    first = 1
    for batch in batches:
        columns = {
            name: batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows)
            for name in wanted.names
        }
        yield RawRows(np.arange(first, first + batch.num_rows), columns, [])
        first += batch.num_rows


def _avro(
    source: BinaryIO, wanted: pa.Schema, batch_rows: int, keys_only: bool, quote: bool, absent: dict[str, Any]
) -> Iterator[RawRows]:
    try:
        fastavro: Any = importlib.import_module("fastavro")
    except ModuleNotFoundError as error:
        raise missing_extra_error(error) or error from None
    try:
        reader = fastavro.reader(source)
        fields = (reader.writer_schema or {}).get("fields") if isinstance(reader.writer_schema, dict) else None
        if fields is None:
            raise InvalidArgument("the Avro file has no records")
        check_header([field["name"] for field in fields], wanted, keys_only, quote)
        first, held = 1, []
        for record in reader:
            held.append(record)
            if len(held) == batch_rows:
                yield _records(held, wanted, first, absent)
                first, held = first + len(held), []
        yield _records(held, wanted, first, absent)
    except (ValueError, EOFError, IndexError, KeyError, TypeError) as error:
        raise InvalidArgument(f"the Avro file cannot be read{f': {error}' if quote else ''}") from None


def _records(rows: list[dict[str, Any]], wanted: pa.Schema, first: int, absent: dict[str, Any]) -> RawRows:
    columns: dict[str, Any] = {name: [row.get(name, absent.get(name)) for row in rows] for name in wanted.names}
    return RawRows(np.arange(first, first + len(rows)), columns, [])
