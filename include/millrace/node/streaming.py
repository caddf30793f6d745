"""The streaming node's Spark host: a Structured Streaming query that keeps the ``wal`` table up with the logs.

:func:`start_query` starts it on a session, beside any other query of the same driver (the flusher). Each micro-batch plans
ranges, runs them in tasks and commits them here, in foreachBatch, through the one committer. What a batch could not do
shows in the node's progress file and metrics: a PChannel that is parked, a range that was fenced, an error that is tried
again. Spark's checkpoint may be deleted whenever the query is down: positions come from the table.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millrace.errors import CommitFenced
from millrace.log.remote import RemoteLogService
from millrace.metrics import Metrics
from millrace.node.append_host_server import launch_of
from millrace.node.committer import CommitResult, Committer
from millrace.node.history import History, history_path, tick_lag
from millrace.node.parking import Parked, park, parked_names
from millrace.node.ranges import RangeReport
from millrace.node.source import FORMAT, MillraceDataSource, connect, source_options
from millrace.settings import Settings
from millrace.tables.wal_table import WalTable

QUERY_NAME: Final = "streaming-node"
POLL_MILLISECONDS: Final = 100
"""Pause between two looks at logs without news."""

_RESTARTS: Final = 5
_WORKER_LATE: Final = "Python worker failed to connect back"
_FILE_MANAGER: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

_logger = logging.getLogger(__name__)


class BatchCommitter:
    """foreachBatch of the streaming node: commit what the tasks wrote, park what cannot be processed, say how it went."""

    def __init__(self, settings: Settings, *, metrics: Metrics) -> None:
        self._committer = Committer(WalTable.create(settings.wal_path), metrics=metrics)
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
        write_progress(
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
    WalTable.create(settings.wal_path)
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


def await_queries(
    queries: Sequence[StreamingQuery],
    *,
    stop: threading.Event,
    poll: float = 0.2,
    beat: Callable[[Sequence[StreamingQuery]], None] | None = None,
    restart: Callable[[int], StreamingQuery] | None = None,
    begun: Callable[[], None] | None = None,
) -> None:
    """Wait until every query has ended, one has failed, or `stop` is set; then stop what still runs, between two batches.

    `beat` is called with them at each look, `begun` once, when all of them have come to their first look for data. `restart` starts the query at a place anew, where Spark gave it up before it
    began: a Python worker must come up within 10 s, which no setting changes, and on a busy machine one may not. That is done a
    few times. Raises the failed query's StreamingQueryException.
    """
    running, left = list(queries), _RESTARTS
    while not stop.is_set():
        for place, query in enumerate(running):
            error = None if query.isActive else query.exception()
            if error is None:
                continue
            if restart is not None and left and query.lastProgress is None and _WORKER_LATE in str(error):
                left -= 1
                _logger.warning("Spark gave a query up whose Python worker came up too late: it is started again")
                running[place] = restart(place)
            else:
                stop.set()
        if not any(query.isActive for query in running):
            break
        if begun is not None and all(map(_runs, running)):
            begun()
            begun = None
        if beat is not None:
            beat(running)
        stop.wait(poll)
    for query in running:
        stop_between_batches(query)
    for query in running:
        query.awaitTermination()


def _runs(query: StreamingQuery) -> bool:
    """Whether Spark has what the query needs (the workers of its sources among it)."""
    return query.isActive and not query.status["message"].startswith("Initializing")


def stop_between_batches(query: StreamingQuery, *, deadline: float = 30.0) -> None:
    """Stop a query once no micro-batch of it runs, or after `deadline` seconds in the midst of one (which loses nothing)."""
    until = time.monotonic() + deadline
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < until:
        if not query.status["isDataAvailable"]:
            break
        time.sleep(0.005)
    if query.isActive:
        query.stop()


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set, instead of ending the process in the midst of a batch."""
    stop = threading.Event()

    def set_it(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, set_it)
    return stop


def progress_path(settings: Settings) -> Path:
    """The file that says how the streaming node is doing: rewritten behind each micro-batch, for `status`."""
    return settings.progress_path(QUERY_NAME)


def started_path(settings: Settings, app_name: str) -> Path:
    """The file that says that a job's queries run, and since when."""
    return settings.run_path / f"{app_name}.started.json"


def write_started(settings: Settings, app_name: str) -> None:
    """Say that the queries of `app_name` run."""
    write_progress(started_path(settings, app_name), {"pid": os.getpid(), "at": time.time()})


def write_progress(path: Path, progress: dict[str, Any]) -> None:
    """Replace the progress file; readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(progress) + "\n", encoding="utf-8")
    draft.replace(path)
