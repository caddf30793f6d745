"""The streaming node's Spark host: a Structured Streaming query that keeps the ``wal`` table up with the logs.

:func:`start_query` starts it on a session, beside any other query of the same driver (the flusher). Each micro-batch plans
ranges, runs them in tasks and commits them here, in foreachBatch, through the one committer. What a batch could not do
shows in the node's progress file and metrics: a PChannel that is parked, a range that was fenced, an error that is tried
again. Spark's checkpoint may be deleted whenever the query is down: positions come from the table.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millrace.base.errors import CommitFenced
from millrace.base.files import replace_json
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.ingest.committer import CommitResult, Committer
from millrace.node.ingest.ranges import RangeReport
from millrace.node.ingest.source import FORMAT, MillraceDataSource, connect, source_options
from millrace.node.range.history import History, history_path, tick_lag
from millrace.node.range.parking import Parked, park, parked_names
from millrace.rpc.launch import launch_of
from millrace.rpc.remote_log import RemoteLogService
from millrace.tables.wal.table import WalTable

QUERY_NAME: Final = "streaming-node"
POLL_MILLISECONDS: Final = 100
"""Pause between two looks at logs without news."""

_FILE_MANAGER: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

_logger = logging.getLogger(__name__)


class BatchCommitter:
    """foreachBatch of the streaming node: commit what the tasks wrote, park what cannot be processed, say how it went."""

    def __init__(self, settings: Settings, *, metrics: Metrics) -> None:
        self._committer = Committer(WalTable.create(settings.wal_uri), metrics=metrics)
        self._metrics = metrics
        self._parked = settings.parked_path
        self._progress = progress_path(settings)
        self._history = History(history_path(settings, QUERY_NAME))
        self._batches = 0
        self._rows = 0
        self._log_bytes = 0

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        reports = [RangeReport.from_json(row["report"]) for row in frame.collect()]
        result = self._committer.commit(reports)
        for report in reports:
            if report.failure is None:
                continue
            failure = report.failure
            # A fenced range may have failed on a state that is no longer the PChannel's: it is planned anew first.
            if failure.retriable or report in result.fenced:
                _logger.warning(
                    "%s will be tried again at %s: %s: %s",
                    report.pchannel,
                    failure.position,
                    failure.code,
                    failure.message,
                )
            else:
                parked = Parked.of(report.pchannel, failure)
                park(self._parked, parked)
                _logger.error("%s", parked.error())
        for report in result.fenced:
            _logger.warning("%s: %s was moved by another committer", CommitFenced.code, report.pchannel)
        self._note(reports, result)

    def _note(self, reports: Sequence[RangeReport], result: CommitResult) -> None:
        self._batches += 1
        self._rows += sum(item.totals.digest.rows for item in result.committed)
        self._log_bytes += sum(item.log_bytes for item in result.committed)
        parked = parked_names(self._parked)
        for report in reports:
            self._metrics.wal_parked.labels(report.pchannel).set(report.pchannel in parked)
        replace_json(
            self._progress,
            {
                "pid": os.getpid(),
                "at": time.time(),
                "batches": self._batches,
                "rows": self._rows,
                "log_bytes": self._log_bytes,
                "wal_version": result.version,
                "commit_seconds": round(result.seconds, 4),
                "parked": sorted(parked),
                "pchannels": {
                    item.pchannel: {
                        "position": str(item.position),
                        "tick": item.last_tick,
                        "rows": item.totals.digest.rows,
                        "seconds": {part: round(value, 4) for part, value in item.seconds.items()},
                        "failure": item.failure.message if item.failure else None,
                    }
                    for item in reports
                },
            },
        )
        now = time.time()
        self._history.add(
            {
                "batches": self._batches,
                "rows": self._rows,
                "bytes": self._log_bytes,
                "commit": round(result.seconds, 3),
                "lag": {item.pchannel: tick_lag(item.last_tick, now=now) for item in result.committed},
            }
        )


def start_query(
    spark: SparkSession,
    *,
    settings: Settings,
    metrics: Metrics,
    available_now: bool = False,
    log: str | None = None,
) -> StreamingQuery:
    """Start the streaming node's query on `spark` and return it.

    `available_now` ends it at where the logs stand now. `log` goes over the log of the settings. Makes the table where there
    is none, and connects to the log first, so that a log that cannot be reached is an error here and not in a task.
    """
    options = source_options(settings)
    if log is None:
        # Brokers are read directly, but append host and retention live in the log's server on every backend.
        RemoteLogService.connect(
            settings.log_path, deadline=settings.start_deadline, launch=launch_of(settings)
        ).close()
    else:
        options |= {"log": log, "folder": ""}
    WalTable.create(settings.wal_uri)
    connect(options["log"], options["folder"], options["server"]).close()
    spark.dataSource.register(MillraceDataSource)
    # Without it the source would be polled every 10 ms, by a round trip to Python and to the log each time.
    spark.conf.set("spark.sql.streaming.pollingDelay", f"{POLL_MILLISECONDS}ms")
    # Spark's checkpoint is a hint, so it need not be dear: its default file manager starts processes to look at local
    # files, and writes a second file with a checksum for each. Without both a small micro-batch takes 0.2 s and not 0.32.
    spark.conf.set("spark.sql.streaming.checkpoint.fileChecksum.enabled", "false")
    spark.conf.set("spark.sql.streaming.checkpointFileManagerClass", _FILE_MANAGER)
    writer = (
        spark.readStream.format(FORMAT)
        .options(**options)
        .load()
        .writeStream.queryName(QUERY_NAME)
        .option("checkpointLocation", str(settings.spark_checkpoint_path(QUERY_NAME)))
        .foreachBatch(BatchCommitter(settings, metrics=metrics))
    )
    if available_now:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{int(settings.trigger_interval * 1000)} milliseconds").start()


def progress_path(settings: Settings) -> Path:
    """The file that says how the streaming node is doing: rewritten behind each micro-batch, for `status`."""
    return settings.progress_path(QUERY_NAME)
