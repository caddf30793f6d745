"""DataFrames of any library as a stream of Arrow batches, without importing the library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from millrace.base.errors import InvalidArgument

BATCH_ROWS = 65_536
"""Rows that are taken of a frame at a time, at most."""

BATCH_BYTES = 16 << 20


class ArrowStream(Protocol):
    """What gives its rows by the Arrow PyCapsule interface: Polars, DuckDB, pyarrow, pandas 2.2 ..."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Frame: TypeAlias = ArrowStream | Iterable[pa.RecordBatch] | Any
"""Also pandas before 2.2, and Spark (``toArrow``)."""


def batches_of(frame: Frame) -> Iterator[pa.RecordBatch]:
    """The rows of `frame` in order, in batches of at most about BATCH_BYTES. Raises InvalidArgument for what is none."""
    for batch in _batches(frame):
        step = max(1, min(BATCH_ROWS, BATCH_BYTES * batch.num_rows // max(batch.nbytes, 1)))
        for first in range(0, batch.num_rows, step):
            yield batch.slice(first, step)


def _batches(frame: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(frame, pa.RecordBatch):
        yield frame
    elif isinstance(frame, pa.Table):
        yield from frame.to_batches()
    elif isinstance(frame, pa.RecordBatchReader):
        yield from frame
    elif hasattr(frame, "toArrow"):  # Spark
        yield from frame.toArrow().to_batches()
    elif type(frame).__module__.partition(".")[0] == "pandas":
        yield from pa.Table.from_pandas(frame, preserve_index=False).to_batches()
    elif hasattr(frame, "__arrow_c_stream__"):
        yield from pa.RecordBatchReader.from_stream(frame)
    elif isinstance(frame, Iterable) and not isinstance(frame, str | bytes | dict):
        for each in frame:
            if not isinstance(each, pa.RecordBatch | pa.Table):
                raise InvalidArgument(f"a stream of Arrow batches holds record batches, not {type(each).__name__}")
            yield from _batches(each)
    else:
        raise InvalidArgument(
            f"{type(frame).__name__} is no DataFrame: give pandas, Polars, Spark, pyarrow, or what has __arrow_c_stream__"
        )
