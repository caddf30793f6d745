"""DataFrames of any library as a stream of Arrow batches, without importing the library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.client.produce.column_conversion import CONVERSION_ERRORS, from_python, needs_declared_type
from millrace.message.field_types import FieldType
from millrace.message.schema import CollectionSchema, FieldSpec

BATCH_ROWS = 65_536
"""Maximum number of rows taken from a frame at a time."""

BATCH_BYTES = 16 << 20


class ArrowStream(Protocol):
    """Data with the Arrow PyCapsule interface: Polars, DuckDB, pyarrow, pandas 2.2 and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Frame: TypeAlias = ArrowStream | Iterable[pa.RecordBatch] | Any
"""Also pandas before 2.2, and Spark."""


def batches_of(frame: Frame, schema: CollectionSchema | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `frame` in order, in batches of at most about BATCH_BYTES.

    `schema` gives the types of pandas columns that hold Python objects. Raises InvalidArgument if `frame` is not a
    DataFrame.
    """
    for batch in _batches(frame, schema):
        step = max(1, min(BATCH_ROWS, BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1)))
        for first in range(0, batch.num_rows, step):
            yield batch.slice(first, step)


def _batches(frame: Any, schema: CollectionSchema | None) -> Iterator[pa.RecordBatch]:
    if isinstance(frame, pa.RecordBatch):
        yield frame
    elif isinstance(frame, pa.Table):
        yield from frame.to_batches()
    elif isinstance(frame, pa.RecordBatchReader):
        yield from frame
    elif hasattr(frame, "mapInArrow"):
        yield from _of_spark(frame)
    elif is_from_library(frame, "pandas") and hasattr(frame, "columns"):
        yield from _of_pandas(frame, schema).to_batches()
    elif hasattr(frame, "__arrow_c_stream__"):
        yield from reader_of(frame)
    elif isinstance(frame, Iterable) and not isinstance(frame, str | bytes | dict):
        for each in frame:
            if not isinstance(each, pa.RecordBatch | pa.Table):
                raise InvalidArgument(
                    f"a stream of rows holds record batches, not {type(each).__name__}: give Arrow batches, or a list"
                    " of dicts"
                )
            yield from _batches(each, schema)
    else:
        raise InvalidArgument(
            f"{type(frame).__name__} is not a DataFrame: pass a DataFrame of pandas, Polars (collected) or Spark,"
            " pyarrow, or what has"
            " __arrow_c_stream__ (`millrace produce` takes files)"
        )


def row_count(frame: Frame) -> int:
    """Return the number of rows of a DataFrame that has them in memory; 0 for a stream, and for what would run a query
    to tell.
    """
    ours = is_from_library(frame, "pandas") or is_from_library(frame, "polars")
    return len(frame) if ours and isinstance(frame, Sized) else 0


def is_from_library(frame: object, library: str) -> bool:
    """Return whether an object is of that library's types, without importing the library."""
    return type(frame).__module__.partition(".")[0] == library


def reader_of(frame: ArrowStream | Any) -> pa.RecordBatchReader:
    """Return the Arrow stream of a DataFrame. Raises InvalidArgument for columns without an Arrow type."""
    if is_from_library(frame, "polars"):
        objects = [name for name, kind in getattr(frame, "schema", {}).items() if str(kind) == "Object"]
        if objects:  # in Arrow they would be the addresses of Python objects
            raise InvalidArgument(f"the column {objects[0]!r} holds Python objects: cast it to a Polars type")
    try:
        return pa.RecordBatchReader.from_stream(frame)
    except pa.ArrowException as error:
        raise InvalidArgument(f"a column has a type that Arrow does not know, cast it ({error})") from None


def _of_spark(frame: Any) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Spark DataFrame.

    Memory: one batch here (10,000 rows by Spark's default) and one partition, as Arrow, in the driver, which requests
    partitions one by one. Spark 4.2's own Arrow stream does this as well, but fails on timestamps.
    """

    def packed(
        batches: Iterator[pa.RecordBatch],
    ) -> Iterator[pa.RecordBatch]:  # runs in Spark's tasks, which may lack this package
        import pyarrow

        for batch in batches:
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            yield pyarrow.RecordBatch.from_pydict({"batch": [sink.getvalue().to_pybytes()]})

    for row in frame.mapInArrow(packed, "batch binary").toLocalIterator():
        yield from pa.ipc.open_stream(bytes(row[0]))


def with_named_index(frame: Any) -> Any:
    """Turn the named index of a pandas frame into a column, unless a column has its name.

    The index may hold values.
    """
    names = [name for name in frame.index.names if name is not None and name not in frame.columns]
    return frame.reset_index(level=names) if names else frame


def _of_pandas(frame: Any, schema: CollectionSchema | None) -> pa.Table:
    frame = with_named_index(frame)
    wanted = {field.name: field for field in schema.fields} if schema else {}
    objects = [name for name in frame.columns if name in wanted and _is_own(str(frame.dtypes[name]), wanted[name])]
    try:
        if not objects or not frame.columns.is_unique:
            return pa.Table.from_pandas(frame, preserve_index=False)
        return pa.table(
            {
                name: _column(frame, name, wanted[name].parsed_type if name in objects else None)
                for name in frame.columns
            }
        )
    except CONVERSION_ERRORS as error:
        raise InvalidArgument(f"the DataFrame is not a table with one type per column: {error}") from None


def _is_own(dtype: str, field: FieldSpec) -> bool:
    """Return whether a pandas column is converted by its field.

    These are columns of objects, and numpy floats in which NaN is not null.
    """
    if dtype == "object":
        return needs_declared_type(field.parsed_type)
    return dtype in ("float32", "float64") and field.parsed_type.kind in ("float32", "float64") and not field.nullable


def _column(frame: Any, name: str, kind: FieldType | None) -> Any:
    if kind is None:
        return pa.Table.from_pandas(frame[[name]], preserve_index=False).column(0)
    if not needs_declared_type(kind):
        return pa.array(frame[name].to_numpy())
    values = [None if isinstance(each, float) and each != each else each for each in frame[name]]
    try:
        return from_python(values, kind)
    except CONVERSION_ERRORS as error:
        raise InvalidArgument(f"the column {name!r} is not {kind.text}: {error}") from None
