"""A streaming DataFrame into a sink: Spark's foreachBatch on one side, Arrow batches on the other.

The tasks write a micro-batch's rows as Arrow files beside the sink's memory, under names that no other attempt has. The
driver passes them to the sink in the order of the tasks, and removes them. So the JVM never collects rows, and the
driver maps them instead of loading them.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import LongType, StringType, StructField, StructType

from millrace.base.files import make_folder
from millrace.runtime.spark.worker_gc import freeze_modules
from millrace.streams.sinks.sink import Sink, Taken

_REPORT: Final = StructType(
    [StructField("task", LongType()), StructField("path", StringType()), StructField("rows", LongType())]
)
FOLDER: Final = "millrace-sink"
"""Beside Spark's own folders in a query's checkpoint: what a sink remembers goes with it."""

Told = Callable[[int, Taken], None]


class FrameSink(Protocol):
    """A sink that takes a micro-batch as a DataFrame, by Spark's own means."""

    def write_frame(self, frame: DataFrame, batch_id: int) -> Taken:
        """As :meth:`Sink.write`."""
        ...

    def close(self) -> None:
        """As :meth:`Sink.close`."""
        ...


def columns_of(frame: DataFrame) -> pa.Schema:
    """The columns of a DataFrame, as its rows come over in Arrow."""
    return to_arrow_schema(frame.schema, timezone="UTC")


def sink_folder(checkpoint: Path) -> Path:
    """Where the sink of the query with this checkpoint remembers what it took."""
    return checkpoint / FOLDER


def start(
    frame: DataFrame,
    sink: Sink | FrameSink,
    checkpoint: Path,
    *,
    name: str | None = None,
    seconds: float | None = None,
    available_now: bool = False,
    output_mode: str | None = None,
    told: Told = lambda batch_id, taken: None,
    begins: Callable[[], None] = lambda: None,
) -> StreamingQuery:
    """Start a query that hands each micro-batch of `frame` to `sink`, which is closed when the query has ended.

    A micro-batch begins every `seconds` (default: as soon as there is data); with `available_now` the query ends when
    the present data is done. In a thread of Spark's, `begins` is called before each one is passed on, and `told` with
    the result.
    """
    staged = sink_folder(checkpoint) / "staged"
    try:
        if hasattr(sink, "check"):
            sink.check(columns_of(frame))
    except BaseException:
        sink.close()
        raise

    def write(batch: DataFrame, batch_id: int) -> None:
        begins()
        if hasattr(sink, "write_frame"):
            taken = sink.write_frame(batch, batch_id)
        else:
            taken = sink.write(batch_id, _arrow(batch, staged))
            shutil.rmtree(staged, ignore_errors=True)
        told(batch_id, taken)

    writer = frame.writeStream.option("checkpointLocation", str(checkpoint)).foreachBatch(write)
    if name is not None:
        writer = writer.queryName(name)
    if output_mode is not None:
        writer = writer.outputMode(output_mode)
    if available_now:
        writer = writer.trigger(availableNow=True)
    elif seconds is not None:
        writer = writer.trigger(processingTime=f"{int(seconds * 1000)} milliseconds")
    try:
        query = writer.start()
    except BaseException:
        sink.close()
        raise
    threading.Thread(target=_closed_behind, args=(query, sink), name=f"sink-{name}", daemon=True).start()
    return query


def _closed_behind(query: StreamingQuery, sink: Sink | FrameSink) -> None:
    """Whoever waits for the query hears of its failure; here it is enough that it ended."""
    with suppress(Exception):
        query.awaitTermination()
    sink.close()


def _arrow(batch: DataFrame, folder: Path) -> Iterator[pa.RecordBatch]:
    """The rows of a micro-batch, in the order of its tasks."""
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed
    make_folder(folder)
    schema = columns_of(batch)
    yield pa.RecordBatch.from_pylist([], schema)
    reports = batch.mapInArrow(_Staging(str(folder)), _REPORT).collect()
    for report in sorted(reports, key=lambda each: (each["task"], each["path"])):
        with pa.memory_map(report["path"]) as file, pa.ipc.open_file(file) as reader:
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number).cast(schema)


class _Staging:
    """What a task does with its rows."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        number = 0 if task is None else task.partitionId()
        path = f"{self._folder}/{number}-{uuid.uuid4().hex}.arrow"
        rows = 0
        first = next(batches, None)
        if first is not None:
            with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
                while first is not None:
                    writer.write_batch(first)
                    rows += first.num_rows
                    first = next(batches, None)
            yield pa.RecordBatch.from_pylist([{"task": number, "path": path, "rows": rows}])
        freeze_modules("millrace_sink")
