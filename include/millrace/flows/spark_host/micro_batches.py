"""The Spark host of a flow: a streaming query whose micro-batches go to a sink.

A query is one lane, and a micro-batch's number its position. When a sink reads a batch's rows, the tasks write them as
Arrow files beside the sink's memory, under names that no other attempt has. The driver passes them to the sink in the
order of the tasks, and removes them. So the JVM never collects rows, and the driver maps them instead of loading them;
in an object store, which workers of other machines reach, it reads them one after another.
A sink that takes the DataFrame (a function, an operator) stages nothing.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import LongType, StringType, StructField, StructType

from millrace.base.errors import BatchRefused, SinkRefused
from millrace.flows.batch import Batch
from millrace.flows.sinks.memory import Folder, below, create_folder
from millrace.flows.sinks.sink import Sink, Verdicts
from millrace.flows.spark_host.incarnations import remove_folder, sink_folder
from millrace.runtime.spark.worker_gc import freeze_modules
from millrace.storage.store import store_at

_REPORT: Final = StructType(
    [StructField("task", LongType()), StructField("path", StringType()), StructField("rows", LongType())]
)

_FILE_MANAGER: Final = "spark.sql.streaming.checkpointFileManagerClass"
_S3A_FILE_MANAGER: Final = "org.apache.spark.internal.io.cloud.AbortableStreamBasedCheckpointFileManager"
"""A file manager that writes each file of the checkpoint once. Spark's default writes and renames, a copy on S3."""

OnResult = Callable[[int, Verdicts], None]


def columns_of(frame: DataFrame) -> pa.Schema:
    """Return the Arrow columns of a DataFrame's rows."""
    return to_arrow_schema(frame.schema, timezone="UTC")


def start(
    frame: DataFrame,
    sink: Sink,
    checkpoint: Folder,
    *,
    staging: Folder | None = None,
    name: str | None = None,
    seconds: float | None = None,
    available_now: bool = False,
    output_mode: str | None = None,
    on_result: OnResult = lambda batch_id, verdicts: None,
    begins: Callable[[], None] = lambda: None,
) -> StreamingQuery:
    """Start a query that passes each micro-batch of `frame` to `sink`, which is closed when the query has ended.

    A micro-batch begins every `seconds` (default: as soon as there is data); with `available_now` the query ends when
    the present data is done. Tasks stage rows in `staging` (default: next to the sink's memory), which they must reach.
    A thread of Spark calls `begins` before each one is passed on, and `on_result` with the result.
    """
    staged = staging or below(sink_folder(checkpoint), "staged")
    try:
        sink.check(columns_of(frame))
    except BaseException:
        sink.close()
        raise

    def write(batch: DataFrame, batch_id: int) -> None:
        begins()
        micro_batch = _MicroBatch(batch, staged)
        rows = micro_batch.rows()
        try:
            verdicts = sink.write(Batch(name or "query", batch_id, batch_id + 1, rows=rows, frame=micro_batch.frame))
        except BatchRefused as error:  # nothing searches for the row at fault, since there is no place for it
            raise SinkRefused(str(error)) from None
        rows.close()
        micro_batch.complete()
        if verdicts.failures:
            first = verdicts.failures[0]
            raise SinkRefused(f"{len(verdicts.failures)} rows, the first {first.record.position}: {first.reason}")
        on_result(batch_id, verdicts)

    place = store_at(checkpoint).spark_uri
    if place.startswith("s3a:"):  # the query uses the session's configuration
        frame.sparkSession.conf.set(_FILE_MANAGER, _S3A_FILE_MANAGER)
    else:
        frame.sparkSession.conf.unset(_FILE_MANAGER)
    writer = frame.writeStream.option("checkpointLocation", place).foreachBatch(write)
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


def _closed_behind(query: StreamingQuery, sink: Sink) -> None:
    """Wait for the query's end. Its failure is raised where the query is awaited."""
    with suppress(Exception):
        query.awaitTermination()
    sink.close()


class _MicroBatch:
    """The rows of a micro-batch, for a sink that reads them, uses the DataFrame, or has the batch already."""

    def __init__(self, batch: DataFrame, folder: Folder) -> None:
        self._batch, self._folder = batch, folder
        self._ran = False

    def rows(self) -> Generator[pa.RecordBatch]:
        """Stage the rows on access, and yield them in the order of the tasks."""
        folder = self._folder
        remove_folder(folder)  # from an attempt that was killed
        create_folder(folder)
        schema = columns_of(self._batch)
        yield pa.RecordBatch.from_pylist([], schema)
        reports = []
        try:
            reports = self._batch.mapInArrow(_Staging(folder), _REPORT).collect()
            self._ran = True
            for report in sorted(reports, key=lambda each: (each["task"], each["path"])):
                with _opened(folder, report["path"]) as file, pa.ipc.open_file(file) as reader:
                    for number in range(reader.num_record_batches):
                        yield reader.get_batch(number).cast(schema)
        finally:
            if isinstance(folder, Path):
                remove_folder(folder)
            else:  # the next batch removes files of failed attempts: searching for them costs a request
                store_at(folder).delete([report["path"] for report in reports])

    def frame(self) -> DataFrame:
        self._ran = True
        return self._batch

    def complete(self) -> None:
        """Run the tasks of a batch that the sink did not read, because an earlier attempt wrote it.

        Its tasks commit the state of Spark's own windows, joins and deduplication. If they did not run, the state of
        the batch would be missing, and Spark would refuse to continue.
        """
        if not self._ran:
            self._batch.write.format("noop").mode("overwrite").save()


def _opened(folder: Folder, name: str) -> pa.NativeFile:
    if isinstance(folder, Path):
        return pa.memory_map(str(folder / name))
    return store_at(folder).filesystem.open_input_file(name)


class _Staging:
    """The work of a task that stages its rows."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        number = 0 if task is None else task.partitionId()
        name = f"{number}-{uuid.uuid4().hex}.arrow"
        rows = 0
        first = next(batches, None)
        if first is not None:
            with self._created(name) as file, pa.ipc.new_file(file, first.schema) as writer:
                while first is not None:
                    writer.write_batch(first)
                    rows += first.num_rows
                    first = next(batches, None)
            yield pa.RecordBatch.from_pylist([{"task": number, "path": name, "rows": rows}])
        freeze_modules("millrace_sink")

    @contextmanager
    def _created(self, name: str) -> Iterator[Any]:
        """Yield a new file, which is complete at the end of the block, and need not survive the machine."""
        if isinstance(self._folder, Path):
            with pa.OSFile(str(self._folder / name), "wb") as file:
                yield file
            return
        sink = store_at(self._folder).put(name)
        try:
            yield sink
            sink.sync()
        finally:
            sink.close()
