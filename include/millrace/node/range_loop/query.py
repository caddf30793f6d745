"""A loop as a Structured Streaming query, alone in its driver or beside others.

Each micro-batch plans ranges, runs them in tasks, and commits them in the driver (foreachBatch) through one committer.
Spark's checkpoint may be deleted while the query is stopped: positions come from the tables.
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
"""Pause between two polls of an idle source."""

_FILE_MANAGER: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def start_query(
    spark: SparkSession,
    definition: LoopDefinition[Any, Any],
    *,
    metrics: Metrics,
    available_now: bool = False,
    ownership: ChannelOwnership | None = None,
) -> StreamingQuery:
    """Start the query of `definition` on `spark`.

    `available_now` ends it at the current end of the source. `ownership`: the channels of this node.
    Raises immediately if the source cannot be reached, instead of failing in a task.
    """
    definition.prepare()
    source = source_of(definition, tasks=spark.sparkContext.defaultParallelism)
    spark.dataSource.register(source)
    # By default Spark polls the source every 10 ms, each time with a round trip to Python and to the log.
    spark.conf.set("spark.sql.streaming.pollingDelay", f"{POLL_MILLISECONDS}ms")
    # Spark's checkpoint is only a hint, so it should be cheap. The default file manager starts processes to inspect
    # local files and writes a checksum file for each. Without both, a small micro-batch takes 0.2 s instead of 0.32
    # s.
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
    """Return a function that starts the query of the loop that `definition` makes of a job's settings."""

    def start(
        spark: SparkSession, *, settings: Settings, metrics: Metrics, available_now: bool = False
    ) -> StreamingQuery:
        return start_query(
            spark, definition(settings), metrics=metrics, available_now=available_now, ownership=ownership
        )

    return start
