"""Run the Structured Streaming queries of one driver and stop them between two micro-batches."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

from millrace.base.deadline import Deadline
from millrace.base.files import replace_json
from millrace.base.settings import Settings

_RESTARTS: Final = 5
_WORKER_LATE: Final = "Python worker failed to connect back"

_logger = logging.getLogger(__name__)


def start_with_retries(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Return the query that `start` starts; retry a few times if a Python worker timed out during planning.

    Planning asks Python workers for a source's name, columns and reader, and each must start within 10 s. Raises the
    error of the last call.
    """
    left = _RESTARTS
    while True:
        try:
            return start()
        except Exception as error:
            if not left or _WORKER_LATE not in str(error):
                raise
            left -= 1
            _logger.warning("a Python worker started too late for a query: starting the query again")


def await_queries(
    queries: Sequence[StreamingQuery],
    *,
    stop: threading.Event,
    poll: float = 0.2,
    heartbeat: Callable[[Sequence[StreamingQuery]], None] | None = None,
    restart: Callable[[int], StreamingQuery] | None = None,
    on_started: Callable[[], None] | None = None,
) -> None:
    """Wait until every query has ended, one has failed, or `stop` is set; then stop the others between two batches.

    `heartbeat` is called with the queries at each poll, and `on_started` once, when all are past their initialisation.
    `restart` starts the query at an index again if Spark gave it up before its first batch: a Python worker must start
    within 10 s, which no setting changes, and on a busy machine it may not. Each query is tried a few times, one after
    another. Raises the failed query's StreamingQueryException.
    """
    running, left = list(queries), [_RESTARTS] * len(queries)
    while not stop.is_set():
        for place, query in enumerate(running):
            error = None if query.isActive else query.exception()
            if error is None:
                continue
            if restart is not None and left[place] and query.lastProgress is None and _WORKER_LATE in str(error):
                if any(each.isActive and not _runs(each) for each in running):
                    continue  # one at a time: workers of several queries delay each other past Spark's 10 s
                left[place] -= 1
                _logger.warning("Spark failed a query whose Python worker started too late: starting the query again")
                running[place] = restart(place)
            else:
                stop.set()
        if not any(query.isActive for query in running):
            break
        if on_started is not None and all(map(_runs, running)):
            on_started()
            on_started = None
        if heartbeat is not None:
            heartbeat(running)
        stop.wait(poll)
    for query in running:
        stop_between_batches(query)
    for query in running:
        query.awaitTermination()


def _runs(query: StreamingQuery) -> bool:
    """Return whether Spark has initialised the query, including the workers of its sources."""
    return query.isActive and not query.status["message"].startswith("Initializing")


def stop_between_batches(query: StreamingQuery, *, deadline: float = 30.0) -> None:
    """Stop a query between two micro-batches, or in the middle of one after `deadline` seconds. Neither loses rows."""
    end = Deadline.after(deadline)
    while query.isActive and query.status["isTriggerActive"] and query.status["isDataAvailable"]:
        if not end.pause(0.005):
            break
    if query.isActive:
        query.stop()


def started_path(settings: Settings, app_name: str) -> Path:
    """Return the path of the file that marks a job's queries as running."""
    return settings.node_run_path / f"{app_name}.started.json"


def write_started(settings: Settings, app_name: str) -> None:
    """Mark the queries of `app_name` as running."""
    replace_json(started_path(settings, app_name), {"pid": os.getpid(), "at": time.time()})
