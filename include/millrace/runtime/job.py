"""The frame of every streaming job: settings, metrics, Spark session, signals, heartbeat and a clean end.

jobs/ holds one thin file for each entry point; this module is what they share.
"""

from __future__ import annotations

import argparse
import logging
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millrace.base import errors
from millrace.base.data_folder import prepare_data_folder, restrict_umask
from millrace.base.errors import MillraceError, TablesMoved
from millrace.base.files import replace_json
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.runtime.child_processes import SupervisorWatch
from millrace.runtime.heartbeat import Heartbeat
from millrace.runtime.process_setup import stop_on_signals
from millrace.runtime.queries import await_queries, start_with_retries, write_started
from millrace.runtime.spark.session import session

_OURS: Final = re.compile(r"millrace(?:\.\w+)+\.(\w+): (.*)")
_CALLED: Final = re.compile(r"An error occurred while calling [a-z]:?[\w.]*\.\n?:? ?")
_STACK: Final = re.compile(r"\s+at \S+\(.*\)|\s*\.\.\. \d+ more|\s*JVM stacktrace:|\s*Driver stacktrace:")
_JVM_CLASS: Final = re.compile(r"^(?:Caused by: )?(?:[a-z]\w*\.){2,}[A-Z]\w*(?:Exception|Error): ")
_MESSAGE_LENGTH: Final = 2000


class StartQuery(Protocol):
    """Starts one streaming query; with `available_now` one that ends after the data available at its start."""

    def __call__(
        self, spark: SparkSession, *, settings: Settings, metrics: Metrics, available_now: bool = False
    ) -> StreamingQuery: ...


Beside: TypeAlias = Callable[[Settings, Metrics], AbstractContextManager[None]]
"""Encloses the queries of a job."""


def _nothing_beside(settings: Settings, metrics: Metrics) -> AbstractContextManager[None]:
    return nullcontext()


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the options of every job."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--available-now", action="store_true", help="process the available data, then end")
    made.add_argument("--result", type=Path, metavar="FILE", help="write the result there, for the launcher")
    made.add_argument("--progress", type=Path, metavar="FILE", help="write the progress there, for the launcher")
    made.add_argument("--supervisor", type=int, metavar="PID", help="end when this parent is gone")
    return made


def run(
    app_name: str,
    queries: Sequence[StartQuery],
    *,
    available_now: bool,
    result: Path | None = None,
    progress: Path | None = None,
    supervisor: int | None = None,
    on_started: Callable[[], None] = lambda: None,
    on_stopped: Callable[[], None] = lambda: None,
    beside: Beside | None = None,
) -> None:
    """Run `queries` in one driver until SIGTERM, SIGINT or the first failure.

    Calls `on_started` once all queries run, and `on_stopped` once none runs any more.
    `beside` encloses the queries: work of this process that follows them.
    With `available_now` each query ends before the next starts: a later one reads what an earlier one wrote.
    `result` gets ``{"ok": true, "stopped": ..., "report": {}}`` or the typed error; `progress` the heartbeat as text.
    `supervisor` is the process that started this one: this one ends with it.
    """
    restrict_umask()
    stop = stop_on_signals()
    if supervisor is not None:
        SupervisorWatch(supervisor, stop, patience=Settings.load().stop_deadline).start()
    asked = threading.Event()
    try:
        _run(
            app_name,
            queries,
            available_now=available_now,
            progress=progress,
            stop=stop,
            asked=asked,
            around=(on_started, on_stopped),
            beside=beside or _nothing_beside,
        )
    except BaseException as error:
        if result is not None:
            replace_json(result, {"ok": False, "error": error_json(error)})
        raise
    if result is not None:
        replace_json(result, {"ok": True, "stopped": asked.is_set(), "report": {}})


def _run(
    app_name: str,
    queries: Sequence[StartQuery],
    *,
    available_now: bool,
    progress: Path | None,
    stop: threading.Event,
    asked: threading.Event,
    around: tuple[Callable[[], None], Callable[[], None]],
    beside: Beside,
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    settings = Settings.load_for_writing()
    prepare_data_folder(settings.data_dir)
    metrics = Metrics()
    server = metrics.serve(settings.metrics_port) if settings.metrics_port else None
    spark = session(app_name, settings=settings, light_jvm=True)
    beat = Heartbeat(settings, app_name, progress=progress, spark_ui=spark.sparkContext.uiWebUrl, metrics=metrics)

    def record_start() -> None:
        write_started(settings, app_name)
        around[0]()

    def start(turn: Sequence[StartQuery], place: int) -> StreamingQuery:
        return start_with_retries(
            partial(turn[place], spark, settings=settings, metrics=metrics, available_now=available_now)
        )

    moved: list[TablesMoved] = []

    def beat_in_place(running: Sequence[StreamingQuery]) -> None:
        beat(running)
        try:
            settings.check_place()
        except TablesMoved as error:
            moved.append(error)
            stop.set()  # between two micro-batches

    try:
        with beside(settings, metrics):
            for turn in [[query] for query in queries] if available_now else [queries]:
                running = [start(turn, place) for place in range(len(turn))]
                begun = None if available_now else record_start
                await_queries(
                    running, stop=stop, heartbeat=beat_in_place, restart=partial(start, turn), on_started=begun
                )
        if moved:
            raise moved[0]
        if stop.is_set():  # a failed query raises above, so this was a signal
            asked.set()
    finally:
        around[1]()
        spark.stop()
        if server is not None:
            server.close()


def error_json(error: BaseException) -> dict[str, Any]:
    """Return an error as the result file holds it: code, message and whether a retry may help.

    An error in a query arrives as text from the JVM; a MillraceError is recognised in it by name.
    Any other error may be due to storage or another writer and counts as retriable.
    """
    if isinstance(error, MillraceError):
        return {"code": error.code, "message": str(error)[:_MESSAGE_LENGTH], "retriable": error.retriable}
    text = str(error)
    for name, message in reversed(_OURS.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, MillraceError):
            return {"code": kind.code, "message": message[:_MESSAGE_LENGTH], "retriable": kind.retriable}
    return {"code": type(error).__name__, "message": _plain_text(text)[:_MESSAGE_LENGTH], "retriable": True}


def _plain_text(text: str) -> str:
    """Strip what the JVM and py4j add to an error's text: names of objects and classes, and the stack."""
    lines = [line for line in _CALLED.sub("", text).splitlines() if line.strip() and not _STACK.match(line)]
    return "\n".join(_JVM_CLASS.sub("", line) for line in lines)
