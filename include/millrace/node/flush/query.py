"""The flusher's Structured Streaming query: ``wal`` into collection tables, ``segments`` and ``checkpoints``.

:func:`start_query` starts it on a session, alone or beside the streaming node's query. Spark's checkpoint is a hint that may
be deleted while the query is down: where to go on stands in the ``checkpoints`` table.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millrace.base.errors import CommitFenced
from millrace.base.files import replace_json
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.flush.commit import FlushCommitter
from millrace.node.flush.flushed import FlushedSegments
from millrace.node.flush.flusher import FlushReport
from millrace.node.flush.source import FORMAT, WalDataSource, source_options
from millrace.node.ingest.streaming import POLL_MILLISECONDS
from millrace.node.range.history import History, history_path, tick_lag

QUERY_NAME: Final = "flusher"

_logger = logging.getLogger(__name__)


class FlushBatches:
    """foreachBatch of the flusher: commit what the tasks wrote, and say how it went in the progress file."""

    def __init__(self, settings: Settings, *, metrics: Metrics) -> None:
        self._committer = FlushCommitter(settings, metrics=metrics)
        self._flushed = FlushedSegments(settings)
        self._progress = progress_path(settings)
        self._history = History(history_path(settings, QUERY_NAME))
        self._failures: dict[str, str] = {}
        """Of PChannels that have not been flushed since."""
        self._batches = 0
        self._rows = 0

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        rows = frame.collect()
        reports = [FlushReport.from_json(json.loads(row["report"])) for row in rows if row["report"] is not None]
        errors = {row["pchannel"]: row["error"] for row in rows if row["error"] is not None}
        result = self._committer.commit(reports)
        errors |= {pchannel: f"{error.code}: {error}" for pchannel, error in result.parked.items()}
        self._failures |= errors
        for report in result.committed:
            self._failures.pop(report.pchannel, None)
        for report in result.fenced:
            _logger.warning("%s: %s was flushed by another flusher", CommitFenced.code, report.pchannel)
        for pchannel, error in errors.items():
            _logger.error("%s is not flushed and will be tried again: %s", pchannel, error)
        self._flushed.note(result.committed)
        self._batches += 1
        self._rows += sum(sum(report.rows_by_vchannel.values()) for report in result.committed)
        replace_json(
            self._progress,
            {
                "pid": os.getpid(),
                "at": time.time(),
                "batches": self._batches,
                "rows": self._rows,
                "commit_seconds": round(result.seconds, 4),
                "pchannels": {
                    report.pchannel: {
                        "tick": report.new_checkpoint.time_tick,
                        "rows": sum(report.rows_by_vchannel.values()),
                        "seconds": {"write": round(report.seconds, 4)},
                        "failure": None,
                    }
                    for report in result.committed
                }
                | {pchannel: {"failure": error} for pchannel, error in self._failures.items()},
            },
        )
        now = time.time()
        self._history.add(
            {
                "batches": self._batches,
                "rows": self._rows,
                "commit": round(result.seconds, 3),
                "lag": {
                    report.pchannel: tick_lag(report.new_checkpoint.time_tick, now=now) for report in result.committed
                },
            }
        )


def start_query(
    spark: SparkSession, *, settings: Settings, metrics: Metrics, available_now: bool = False
) -> StreamingQuery:
    """Start the flusher's query on `spark` and return it; `available_now` ends it at where the WAL stands now."""
    spark.dataSource.register(WalDataSource)
    # Without it the source would be polled every 10 ms, by a round trip to Python each time.
    spark.conf.set("spark.sql.streaming.pollingDelay", f"{POLL_MILLISECONDS}ms")
    writer = (
        spark.readStream.format(FORMAT)
        .options(**source_options(settings))
        .load()
        .writeStream.queryName(QUERY_NAME)
        .option("checkpointLocation", str(settings.spark_checkpoint_path(QUERY_NAME)))
        .foreachBatch(FlushBatches(settings, metrics=metrics))
    )
    if available_now:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{int(settings.flush_interval * 1000)} milliseconds").start()


def progress_path(settings: Settings) -> Path:
    """The file that says how the flusher is doing: rewritten behind each micro-batch, for `status`."""
    return settings.progress_path(QUERY_NAME)
