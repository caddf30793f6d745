"""A definition as a Structured Streaming query: supervised, alone in its driver or beside others.

Each micro-batch plans ranges, runs them in tasks and commits them here, in foreachBatch, through the one committer. Spark's checkpoint
may be deleted whenever the query is down: positions come from the tables.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.range_loop.batch_driver import BatchDriver
from millrace.node.range_loop.definition import LoopDefinition
from millrace.node.range_loop.ownership import ChannelOwnership
from millrace.node.range_loop.source import source_of
from millrace.runtime.job import StartQuery

POLL_MILLISECONDS: Final = 100
"""Pause between two looks at what there is to read, without news."""

_FILE_MANAGER: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def start_query(
    spark: SparkSession,
    definition: LoopDefinition[Any, Any],
    *,
    metrics: Metrics,
    available_now: bool = False,
    ownership: ChannelOwnership | None = None,
) -> StreamingQuery:
    """Start the query of `definition` on `spark`; `available_now` ends it at what there is now. `ownership`: what is this node's.

    What is read is reached for first, so that where it cannot be reached is an error here and not in a task.
    """
    definition.prepare()
    source = source_of(definition)
    spark.dataSource.register(source)
    # Without it the source would be polled every 10 ms, by a round trip to Python and to what is read each time.
    spark.conf.set("spark.sql.streaming.pollingDelay", f"{POLL_MILLISECONDS}ms")
    # Spark's checkpoint is a hint, so it need not be dear: its default file manager starts processes to look at local
    # files, and writes a second file with a checksum for each. Without both a small micro-batch takes 0.2 s and not 0.32.
    spark.conf.set("spark.sql.streaming.checkpoint.fileChecksum.enabled", "false")
    spark.conf.set("spark.sql.streaming.checkpointFileManagerClass", _FILE_MANAGER)
    batches = BatchDriver(definition, metrics=metrics, ownership=ownership)

    def commit(frame: DataFrame, batch_id: int) -> None:
        batches.commit([pickle.loads(row["outcome"]) for row in frame.collect()])

    writer = (
        spark.readStream.format(source.name())
        .load()
        .writeStream.queryName(definition.name)
        .option("checkpointLocation", str(definition.settings.spark_checkpoint_path(definition.name)))
        .foreachBatch(commit)
    )
    if available_now:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{int(definition.interval * 1000)} milliseconds").start()


def query_of(
    definition: Callable[[Settings], LoopDefinition[Any, Any]], *, ownership: ChannelOwnership | None = None
) -> StartQuery:
    """The query of what `definition` makes of a job's settings."""

    def start(
        spark: SparkSession, *, settings: Settings, metrics: Metrics, available_now: bool = False
    ) -> StreamingQuery:
        return start_query(
            spark, definition(settings), metrics=metrics, available_now=available_now, ownership=ownership
        )

    return start
