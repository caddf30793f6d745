"""Watches the demo while it runs and prints a summary at its end, which only claims what was checked."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from rich.console import Console
from rich.table import Table

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.demo.engines import ENGINES, ask_engines, print_answers
from millrace.demo.load import LoadGenerator, ProducerCounts
from millrace.message.ids import pchannel_of, tick_physical_ms
from millrace.node.ingest.definition import IngestLoop
from millrace.operations.verification import (
    ChannelVerification,
    CollectionVerification,
    verify_channel,
    verify_collections,
)
from millrace.runtime.child_processes import ChildProcess, JobFailed
from millrace.runtime.queries import started_path
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import published_uri
from millrace.tables.collections.flush_tables import read_checkpoints, read_segments
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable

JOB: Final = "millrace-streaming-node"
POLL_SECONDS: Final = 0.25
FLUSH_DEADLINE: Final = 600.0

ProgressUpdate = Callable[..., None]


class StreamingJobHandle(Protocol):
    """A running streaming job: the demo's own, or that of the running system."""

    log_file: Path

    def running(self) -> bool: ...

    def tail(self) -> str: ...


class DemoInterrupted(Exception):
    """Ctrl-C or SIGTERM: the demo stops in an orderly way."""


class LoadMonitor:
    """Watches the load and the streaming job."""

    def __init__(self, settings: Settings, client: Database, stop: threading.Event) -> None:
        self._settings = settings
        self._client = client
        self._stop = stop
        self.phases: list[tuple[str, int, int, float]] = []
        """(name, rows, bytes, seconds) of each phase."""

    def wait_started(self, job: ChildProcess) -> None:
        """Wait until the streaming job that was just started reports that it runs."""
        path = started_path(self._settings, JOB)
        job.wait_ready(lambda: self._unless_stopped(path.exists()), deadline=self._settings.start_deadline)

    def wait_until(self, what: Callable[[], bool], job: StreamingJobHandle, seconds: float) -> None:
        """Wait up to `seconds` until `what` is true. Raises JobFailed, DemoInterrupted, DeadlineExceeded."""
        deadline = Deadline.after(seconds)
        while not what():
            self._check(job)
            if not deadline.pause(POLL_SECONDS):
                raise DeadlineExceeded(f"not everything was up after {seconds:.0f} s:\n{job.tail()}")

    def run_phase(
        self, name: str, work: Callable[[], None], load: LoadGenerator, job: StreamingJobHandle, update: ProgressUpdate
    ) -> None:
        """Run `work` in a thread and show its progress. Raises its errors, JobFailed, DemoInterrupted."""
        failure: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, name="demo-load")
        start, rows, size = time.monotonic(), load.counts.appended, load.counts.bytes
        thread.start()
        try:
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                self._show(name, load, start, rows, size, update)
                self._check(job)
        except BaseException:
            load.stop()
            thread.join(self._settings.append_deadline)
            raise
        if failure:
            raise failure[0]
        seconds = time.monotonic() - start
        self.phases.append((name, load.counts.appended - rows, load.counts.bytes - size, seconds))

    def wait_flushed(
        self, ticks: dict[str, int], load: LoadGenerator, job: StreamingJobHandle, update: ProgressUpdate
    ) -> float:
        """Wait until the collection's tables contain everything up to `ticks` (by VChannel); return the seconds."""
        wanted: Counter[str] = Counter()
        for vchannel, tick in ticks.items():
            wanted[pchannel_of(vchannel)] = max(wanted[pchannel_of(vchannel)], tick)
        start, deadline = time.monotonic(), Deadline.after(FLUSH_DEADLINE)
        path = self._settings.checkpoints_uri
        while True:
            found = read_checkpoints(open_table(path))
            lagging = [p for p, tick in wanted.items() if p not in found or found[p].time_tick < tick]
            if not lagging:
                return time.monotonic() - start
            if deadline.expired():
                raise DeadlineExceeded(
                    f"the flusher has not caught up on {', '.join(lagging)}; its log: {job.log_file}"
                )
            self._show("flushing", load, start, load.counts.appended, load.counts.bytes, update)
            self._check(job)
            self._stop.wait(POLL_SECONDS)

    def _show(self, name: str, load: LoadGenerator, start: float, rows: int, size: int, update: ProgressUpdate) -> None:
        counts, seconds = load.counts, max(time.monotonic() - start, 1e-3)
        rate = f"{(counts.appended - rows) / seconds:,.0f} rows/s {(counts.bytes - size) / seconds / 1e6:,.1f} MB/s"
        update(description=name, completed=counts.appended, rate=rate, lag=self._lag())

    def _lag(self) -> str:
        """Return how far the WAL lags behind the clock, as the streaming node reports it."""
        try:
            progress: dict[str, Any] = json.loads(self._settings.progress_path(IngestLoop.name).read_text())
            ticks = [each["tick"] for each in progress["pchannels"].values()]
        except (FileNotFoundError, ValueError, KeyError):
            return ""
        return f"lag {max(0.0, time.time() - tick_physical_ms(min(ticks)) / 1e3):.1f} s" if ticks else ""

    def _check(self, job: StreamingJobHandle) -> None:
        self._unless_stopped(True)
        if not job.running():
            raise JobFailed(f"the streaming job ended:\n{job.tail()}\n(log: {job.log_file})")

    def _unless_stopped(self, value: bool) -> bool:
        if self._stop.is_set():
            raise DemoInterrupted
        return value


def summarise(
    settings: Settings,
    client: Database,
    collection: CollectionInfo,
    counts: ProducerCounts,
    watch: LoadMonitor,
    console: Console,
    *,
    engines: Sequence[str] = ENGINES,
    checks: Sequence[tuple[str, bool]] = (),
) -> int:
    """Check everything, ask `engines` for the published table, and print the results, after those of other `checks`.

    Return 0 if every check holds, otherwise 2.
    """
    console.print("Comparing log, WAL and collection …")
    snapshot = WalSnapshot.open(settings.wal_uri)
    wal = WalTable.open(settings.wal_uri)
    assert snapshot is not None
    channels = [verify_channel(snapshot, wal, client.log, pchannel) for pchannel in snapshot.pchannels()]
    report = verify_collections(settings)[collection.id]
    _print_phases(watch, console)
    found = [
        *checks,
        (
            "time ticks strictly increase on each PChannel",
            all(channel.last_tick > 0 for channel in channels),
        ),
        ("the WAL's rows are the committed ones (digest)", all(each.committed == each.stored for each in channels)),
        (
            "replaying the log gives the WAL (digest)",
            all(each.replayed in (None, each.committed) for each in channels),
        ),
        ("the table contains what became visible (digest)", report.ok),
        ("appended = visible + deleted + rolled back + rejected + duplicates", _accounted(report, counts)),
    ]
    _print_rows(report, counts, console)
    _print_channels(channels, console)
    _print_segments(settings, collection, console)
    console.print(f"Publishing the collection, and asking {', '.join(engines)} …")
    equal = print_answers(*ask_engines(settings, client, collection, engines), console)
    found.append(("any engine reads from the published table what read() gives", equal))
    for words, holds in found:
        console.print(f"  {'[green]✓[/]' if holds else '[bold red]✗[/]'} {words}")
    _print_places(settings, collection, console)
    return 0 if all(holds for _, holds in found) else 2


def _accounted(report: CollectionVerification, counts: ProducerCounts) -> bool:
    """Return whether the WAL contains everything that was acknowledged to this run's producers.

    The WAL may contain earlier runs too.
    """
    total = report.visible + report.deleted + report.rolled_back
    return total == report.inserted and report.inserted >= counts.inserted + counts.rolled_back


def _print_phases(watch: LoadMonitor, console: Console) -> None:
    table = Table("Phase", "Rows", "MB", "Seconds", "Rows/s", "MB/s", title="Load", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, rows, size, seconds in watch.phases:
        table.add_row(
            name,
            f"{rows:,}",
            f"{size / 1e6:,.1f}",
            f"{seconds:.1f}",
            f"{rows / seconds:,.0f}",
            f"{size / 1e6 / seconds:,.1f}",
        )
    console.print(table)


def _print_rows(report: CollectionVerification, counts: ProducerCounts, console: Console) -> None:
    table = Table("Rows", "In the WAL", "Of this run", title="Accounting", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    duplicates = report.rejected["DUPLICATE"] + report.rejected["ALREADY_APPLIED"]
    rejected = {
        reason: rows
        for reason, rows in sorted(report.rejected.items())
        if reason not in ("DUPLICATE", "ALREADY_APPLIED")
    }
    appended = report.inserted + sum(report.rejected.values())
    table.add_row("appended", f"{appended:,}", f"{counts.appended:,}")
    table.add_row("= visible", f"{report.visible:,}", "")
    table.add_row("+ deleted", f"{report.deleted:,}", f"{counts.deleted_keys:,} keys")
    table.add_row("+ rolled back", f"{report.rolled_back:,}", f"{counts.rolled_back:,}")
    for reason, rows in rejected.items():
        table.add_row(f"+ rejected: {reason}", f"{rows:,}", f"{counts.rejected[reason]:,}")
    table.add_row("+ duplicates", f"{duplicates:,}", f"{counts.duplicates:,}")
    console.print(table)


def _print_channels(channels: list[ChannelVerification], console: Console) -> None:
    table = Table("PChannel", "Messages", "Rejections", "Digest", title="WAL", title_justify="left")
    for channel in channels:
        table.add_row(channel.pchannel, f"{channel.messages:,}", f"{channel.rejections:,}", str(channel.committed))
    console.print(table)


def _print_segments(settings: Settings, collection: CollectionInfo, console: Console) -> None:
    path = settings.segments_uri
    segments = read_segments(open_table(path), vchannels=collection.vchannels)
    states = (
        segments.group_by("state").aggregate([("segment_id", "count"), ("rows", "sum")]).sort_by("state").to_pylist()
    )
    found = ", ".join(f"{each['segment_id_count']} {each['state']} ({each['rows_sum']:,} rows)" for each in states)
    console.print(f"Segments: {found or 'none yet'}")


def _print_places(settings: Settings, collection: CollectionInfo, console: Console) -> None:
    published = published_uri(settings, collection.id)
    console.print(f"\nTables: {settings.wal_uri} · {published} · {settings.segments_uri} · {settings.checkpoints_uri}")
    console.print("Query them with any engine that reads Delta:")
    console.print(
        f"  DuckDB   import duckdb, millrace; con = duckdb.connect();"
        f" millrace.connect('{settings.data_dir}').attach(con);"
        f" con.sql('select origin, count(*) from {collection.name} group by 1').show()",
        soft_wrap=True,
    )
    console.print(
        f"  Spark    spark.read.format('delta').load('{published}').groupBy('origin').count().show()", soft_wrap=True
    )
    console.print("  Millrace millrace read flights --limit 5   (deletes applied, at any time tick)", soft_wrap=True)
