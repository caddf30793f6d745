"""The run: a log, a streaming node and a Spark driver with three streams over the feed, then the check."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded
from millrace.base.settings import Settings
from millrace.demo.load_phases import demo_client
from millrace.demo.streaming.duckdb_check import CheckpointBatches, CheckResult, check
from millrace.demo.streaming.feed import FlightFeed
from millrace.demo.streaming.queries import QUERIES, DemoQuery
from millrace.demo.summary import DemoInterrupted, LoadMonitor
from millrace.flows.sinks.sink import Verdicts
from millrace.runtime.child_processes import ChildProcess, JobFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

FOLDER: Final = "demo-streams"
"""Subfolder of the data folder: a deployment that each run creates anew, so that all of its rows are counted."""
SHARDS: Final = 2
STARTS: Final = 4
"""Restarts of a stream after which its failure ends the demo."""
POLL_SECONDS: Final = 0.25
CATCH_UP_SECONDS: Final = 600.0


@dataclass(slots=True)
class RunningQuery:
    """A query and its running stream."""

    question: DemoQuery
    folder: Path
    expected: int
    start: Callable[[], StreamingQuery] = field(init=False)
    query: StreamingQuery | None = None
    starts: int = 0
    rows: int = 0
    seconds: float = 0.0
    batches: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def table(self) -> str:
        return str(self.folder / "answers")

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def on_batch(self, _batch: int, taken: Verdicts) -> None:
        """Record the result of a micro-batch."""
        operated = getattr(taken, "operated", None)
        aside = 0 if operated is None else operated.late + operated.rejected
        with self._guard:
            self.rows += taken.acknowledged + aside
            self.batches += 1

    def ensure_running(self) -> bool:
        """Return whether its sources exist yet, and restart the stream if it ended; it continues where it was.

        Spark gives a Python process 10 s to start, which may not suffice on a busy machine. Raises JobFailed if
        restarts do not help.
        """
        if self.query is None or not self.query.isActive:
            if self.query is not None and self.starts == STARTS:
                raise JobFailed(f"the stream {self.question.name!r} ended: {self.query.exception()}")
            self._add_up()
            self.query = self.start()
            self.starts += 1
        return not self.query.status["message"].startswith("Initializing")

    def stop(self) -> None:
        """Stop it, and sum up the durations of its micro-batches that had rows."""
        if self.query is not None:
            self._add_up()
            self.query.stop()

    def _add_up(self) -> None:
        heard = [] if self.query is None else self.query.recentProgress
        self.seconds += sum(each.durationMs["triggerExecution"] for each in heard if each.numInputRows) / 1e3


def run_streams(
    settings: Settings, root: Path, *, rows: int | None, seconds: float, console: Console, stop: threading.Event
) -> int:
    """Run the demo; return 0 if each answer is DuckDB's and each row is accounted for, otherwise 2."""
    folder = settings.data_dir / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    settings = replace(settings, data_dir=folder)
    console.print(f"Data folder: [bold]{folder}[/]")
    with demo_client(settings) as db:
        db.catalog.ensure_pchannels(settings.pchannels)
        feed = FlightFeed(db, rows)
        console.print(
            f"Log is up; starting a streaming node and a driver for three streams (logs: {settings.run_path}) …"
        )
        watch = LoadMonitor(settings, db, stop)
        job = ChildProcess(
            [sys.executable, str(root / "jobs" / "streaming_node.py")],
            log_file=settings.run_path / "streaming-node.log",
            env=settings.environment(),
        )
        try:
            with _session(settings) as spark:
                watch.wait_started(job)
                asked = _ask(spark, settings, feed, watch, job)
                _drive(asked, feed, job, seconds, console, stop)
        finally:
            job.stop(deadline=settings.stop_deadline)
        console.print("Running the same queries in DuckDB over all rows at once …")
        found = [
            check(
                each.question,
                table=each.table,
                batches=CheckpointBatches(each.checkpoint, each.table),
                flights=db.collection("flights"),
                weather=db.collection("weather"),
            )
            for each in asked
        ]
    return _print_results(list(zip(asked, found, strict=True)), console)


@contextmanager
def _session(settings: Settings) -> Iterator[SparkSession]:
    from millrace.runtime.spark.session import logged_session

    options = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}
    with logged_session("millrace-demo-streams", settings, settings.run_path / "streams.log", extra=options) as spark:
        yield spark


def _ask(
    spark: SparkSession, settings: Settings, feed: FlightFeed, watch: LoadMonitor, job: ChildProcess
) -> list[RunningQuery]:
    """Start the streams, one after the other.

    Spark waits 10 s for the planner process of each, and two cores start only one at a time within that.
    """
    flights = feed.flights
    known = pc.and_(flights["dep_delay"].is_valid(), flights["tailnum"].is_valid())
    counts = {"hours": len(flights), "weather": len(flights) + len(feed.weather), "rising": pc.sum(known).as_py()}
    found = []
    for question in QUERIES:
        each = RunningQuery(question, settings.data_dir / "streams" / question.name, counts[question.name])
        each.start = partial(_start, spark, settings, each)
        watch.wait_until(each.ensure_running, job, settings.start_deadline)
        found.append(each)
    return found


def _start(spark: SparkSession, settings: Settings, asked: RunningQuery) -> StreamingQuery:
    from millrace.flows.spark_host.incarnations import sink_folder
    from millrace.flows.spark_host.keyed import KeyedFrames
    from millrace.flows.spark_host.micro_batches import columns_of, start

    question = asked.question
    frame = question.frame(spark, settings)
    memory = sink_folder(asked.checkpoint)
    keyed = KeyedFrames(memory, asked.table, question.operator, columns_of(frame), delay=question.delay, shards=SHARDS)
    return start(frame, keyed, asked.checkpoint, name=question.name, on_result=asked.on_batch)


def _drive(
    asked: list[RunningQuery],
    feed: FlightFeed,
    job: ChildProcess,
    seconds: float,
    console: Console,
    stop: threading.Event,
) -> None:
    """Feed the collections, and wait until each stream has processed all rows.

    Raises JobFailed, DemoInterrupted, DeadlineExceeded, and the errors of the feed.
    """
    ended, failed = threading.Event(), []
    with _progress(console) as progress:
        bars = [progress.add_task(each.question.title, total=each.expected) for each in asked]
        fed = progress.add_task("sent: flights and weather", total=len(feed.flights) + len(feed.weather))

        def work() -> None:
            try:
                feed.run(seconds, ended, lambda rows: progress.advance(fed, rows))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, name="demo-feed")
        thread.start()
        end = Deadline.after(seconds + CATCH_UP_SECONDS)
        try:
            while thread.is_alive() or any(each.rows < each.expected for each in asked):
                for each, bar in zip(asked, bars, strict=True):
                    progress.update(bar, completed=each.rows)
                _check_running(asked, job)
                if failed:
                    raise failed[0]
                if stop.wait(POLL_SECONDS):
                    raise DemoInterrupted
                if end.expired():
                    raise DeadlineExceeded(f"the streams have not processed all rows; the node's log: {job.log_file}")
            for each, bar in zip(asked, bars, strict=True):
                progress.update(bar, completed=each.rows)
        finally:
            ended.set()
            thread.join()
            for each in asked:
                each.stop()


def _check_running(asked: list[RunningQuery], job: ChildProcess) -> None:
    if not job.running():
        raise JobFailed(f"the streaming node ended:\n{job.tail()}\n(log: {job.log_file})")
    for each in asked:
        each.ensure_running()


def _print_results(found: list[tuple[RunningQuery, CheckResult]], console: Console) -> int:
    table = Table(
        "Stream", "Rows in", "= out", "+ waiting", "+ late", "+ rejected", "Answers", "Rows/s", "DuckDB",
        title="Three streams over the flights of 2013", title_justify="left", box=None, padding=(0, 1),
    )  # fmt: skip
    for column in table.columns[1:-1]:
        column.justify = "right"
    for asked, checked in found:
        counts = (checked.rows, checked.counted, checked.waiting, checked.late, checked.rejected, checked.answers)
        same = "[green]✓[/]" if checked.passed else f"[bold red]✗ {checked.mismatches} + {checked.late_mismatches}[/]"
        rate = f"{asked.rows / asked.seconds:,.0f}" if asked.seconds else ""
        table.add_row(asked.question.name, *(f"{each:,}" for each in counts), rate, same)
    console.print(table)
    for asked, _ in found:
        console.print(
            f"  {asked.question.name}: {asked.question.title}, in {asked.batches} micro-batches; {asked.table}",
            soft_wrap=True,
        )
    console.print(
        "Out: rows that answers used. Waiting: rows at or after the watermark. Late: rows written to the side table,"
        " with their lateness, and compared as well. Rows/s: per stream, while the others run beside it."
    )
    right = all(checked.passed and asked.rows == checked.rows for asked, checked in found)
    console.print(
        "[bold green]Each answer equals DuckDB's, row for row, and every row is accounted for.[/]"
        if right
        else "[bold red]The streams and DuckDB disagree.[/]"
    )
    return 0 if right else 2


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<50}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:>9,.0f} rows"),
        TimeElapsedColumn(),
        console=console,
    )
