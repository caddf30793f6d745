"""The run: databases under load, a flow for each captured table, faults, and the comparison."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, InvalidArgument, MillraceError
from millrace.base.files import replace_file
from millrace.base.settings import Settings
from millrace.brokers.mariadb import MariaDbServer
from millrace.brokers.postgres import PostgresServer
from millrace.brokers.programs import install
from millrace.client.database import Database
from millrace.demo.capture.databases import ALTERED, CapturedTable, MariaDb, Postgres, Row, SourceDatabase
from millrace.demo.load_phases import demo_client
from millrace.demo.summary import DemoInterrupted, LoadMonitor
from millrace.flows.sources.capture.ticks import tick_of
from millrace.rpc.discovery import read_record
from millrace.runtime.child_processes import ChildProcess, JobFailed

FOLDER: Final = "demo-capture"
"""Subfolder of the data folder: a deployment that each run creates anew."""
SEED: Final = 2013
CATCH_UP_SECONDS: Final = 300.0
"""Within which the collections must have followed, after the last transaction."""
POLL_SECONDS: Final = 0.5
MOMENTS: Final = 3
"""At which the collections are compared with what the tables had."""
VICTIMS: Final = ("reader", "engine", "database", "log server")
_FIELDS: Final = {
    "varchar": "string",
    "date": "date",
    "smallint": "int16",
    "integer": "int32",
    "bigint": "int64",
    "double": "float64",
}
"""The type of a collection's field, by the first word of a column's type."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Contents of a flow's tables at a recorded tick."""

    flow: CaptureFlow
    tick: int
    rows: dict[str, tuple[list[str], list[Row]]]


@dataclass(slots=True)
class CaptureFlow:
    """Tables of a database, the collections that follow them, and the worker between them."""

    database: SourceDatabase
    way: str
    """Way of capturing the database: log, triggers or query."""
    source: dict[str, Any]
    tables: tuple[CapturedTable, ...]
    settings: Settings
    job: ChildProcess | None = None

    @property
    def name(self) -> str:
        return f"{self.database.kind}-{self.way}"

    @property
    def file(self) -> Path:
        return self.settings.data_dir / f"{self.name}.yaml"

    def collection(self, table: CapturedTable) -> str:
        """Return the name of the collection that follows a table."""
        return f"{self.database.kind}_{table.name}"

    def declare(self, db: Database) -> None:
        """Write its declaration, and make its collections, unless the flow makes them and follows the tables."""
        made = {"create": True, "on_schema_change": "alter"} if self.way == "log" else {}
        for table in () if made else self.tables:
            fields = {
                name: _FIELDS[kind.partition("(")[0].split()[0]] + ("" if name == table.key else "?")
                for name, kind in table.columns.items()
            }
            db.create_collection(self.collection(table), fields, key=table.key, vchannels=2)
        declared = {
            "id": self.name,
            "source": self.source,
            "sink": {"kind": "collection", "collection": f"{self.database.kind}_{{table}}", **made},
            "errors": {"collection": f"{self.database.kind}_{self.way}_errors"},
        }
        replace_file(self.file, yaml.safe_dump(declared, sort_keys=False))

    def start(self) -> None:
        """Start its worker, which continues where it was."""
        self.job = ChildProcess(
            [sys.executable, "-m", "millrace", "flows", "run", str(self.file)],
            log_file=self.settings.run_path / f"{self.name}.log",
            env=self.settings.environment(),
        )

    def check_running(self) -> None:
        """Raise JobFailed if its supervisor has ended."""
        if self.job is not None and not self.job.running():
            raise JobFailed(f"the flow {self.name} ended:\n{self.job.tail()}\n(log: {self.job.log_file})")

    def processes(self, part: str) -> list[int]:
        """Return the process ids of a part: "engine", or else the worker that reads the captured changes."""
        below = [] if self.job is None else psutil.Process(self.job.pid).children(recursive=True)
        return [each.pid for each in below if (each.name() == "java") == (part == "engine")]


def run_capture(
    settings: Settings, root: Path, *, rows: int | None, seconds: float, console: Console, stop: threading.Event
) -> int:
    """Run the demo; return 0 if each collection equals its table, otherwise 2."""
    folder = settings.data_dir / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    settings = replace(settings, data_dir=folder)
    install(["mariadb", "postgres"])
    console.print(f"Data folder: [bold]{folder}[/]\nStarting MariaDB and PostgreSQL on this host …")
    with ExitStack() as stack:
        databases: list[SourceDatabase] = [
            MariaDb(stack.enter_context(MariaDbServer(folder / "mariadb", settings=settings)), rows, SEED),
            Postgres(stack.enter_context(PostgresServer(folder / "postgres", settings=settings)), rows, SEED + 1),
        ]
        for database in databases:
            os.environ[database.password_name] = database.password  # for the workers
            database.fill()
            database.install_triggers()
        db = stack.enter_context(demo_client(settings))
        db.catalog.ensure_pchannels(settings.pchannels)
        console.print(f"Log and databases are up; starting a streaming node (logs: {settings.run_path}) …")
        stack.enter_context(_streaming_node(settings, root, db, stop))
        flows = [
            CaptureFlow(database, way, source, tables, settings)
            for database in databases
            for way, (source, tables) in database.sources().items()
        ]
        for flow in flows:
            flow.declare(db)
        with _following(flows):
            _wait_equal(db, flows, stop, console, "the snapshots are in the collections")
            moments = _write_through_faults(databases, flows, settings, seconds, console, stop)
            _wait_equal(db, flows, stop, console, "the collections have followed")
        return _print_results(db, flows, moments, console)


@contextmanager
def _streaming_node(settings: Settings, root: Path, db: Database, stop: threading.Event) -> Iterator[None]:
    watch = LoadMonitor(settings, db, stop)
    job = ChildProcess(
        [sys.executable, str(root / "jobs" / "streaming_node.py"), "--with-flusher"],
        log_file=settings.run_path / "streaming-node.log",
        env=settings.environment(),
    )
    try:
        watch.wait_started(job)
        yield
    finally:
        job.stop(deadline=settings.stop_deadline)


@contextmanager
def _following(flows: Sequence[CaptureFlow]) -> Iterator[None]:
    try:
        for each in flows:
            each.start()
        yield
    finally:
        for each in flows:
            if each.job is not None:
                each.job.stop(deadline=each.settings.stop_deadline)


def _write_through_faults(
    databases: Sequence[SourceDatabase],
    flows: Sequence[CaptureFlow],
    settings: Settings,
    seconds: float,
    console: Console,
    stop: threading.Event,
) -> list[Moment]:
    """Write for `seconds`, kill each kind of process meanwhile, and note what the databases had at some moments.

    Raises DemoInterrupted, DeadlineExceeded, and what ended a writer.
    """
    chosen = random.Random(SEED)
    logged = [each for each in flows if each.way == "log"]
    victims = [(victim, flow) for victim in VICTIMS[:-1] for flow in logged] + [(VICTIMS[-1], logged[0])]
    victims += [("reader", each) for each in flows if each.way == "triggers"]
    chosen.shuffle(victims)
    moments: list[Moment] = []
    try:
        for each in databases:
            each.start()
        for number, (victim, flow) in enumerate(victims):
            if stop.wait(seconds / (len(victims) + 1) * chosen.uniform(0.6, 1.4)):
                raise DemoInterrupted
            _kill(victim, flow, settings)
            console.print(f"  killed: the {victim}" + (f" of {flow.name}" if victim != VICTIMS[-1] else ""))
            if number == len(victims) // 2:
                for each in databases:
                    each.alter()
                console.print(f"  altered in both databases: {ALTERED}")
            if number % 2 == 0 and len(moments) < MOMENTS * len(logged):  # the last one after the ALTER
                moments += [_moment(each, stop) for each in logged]
        if stop.wait(seconds / (len(victims) + 1)):
            raise DemoInterrupted
    finally:
        for each in databases:
            each.stop()
    return moments


def _moment(flow: CaptureFlow, stop: threading.Event) -> Moment:
    """Note what the database has between two transactions, and wait for the tick of the last one.

    Nothing is written meanwhile: under load, one tick covers several transactions.
    """
    end = Deadline.after(CATCH_UP_SECONDS)
    with flow.database.between:
        last = flow.database.mark()
        rows = {table.name: flow.database.rows(table) for table in flow.tables}
        while True:
            with suppress(InvalidArgument):  # not yet
                return Moment(flow, tick_of(flow.settings, flow.name, last).tick, rows)
            flow.check_running()
            if stop.wait(POLL_SECONDS):
                raise DemoInterrupted
            if end.expired():
                raise DeadlineExceeded(f"{flow.name} has recorded no tick of {last}: see {flow.settings.run_path}")


def _kill(victim: str, flow: CaptureFlow, settings: Settings) -> None:
    if victim == "database":
        flow.database.server.kill()
        flow.database.server.start()
        return
    if victim == "log server":
        record = read_record(settings.log_path)
        found = [] if record is None else [record.pid]
    else:
        found = flow.processes(victim)
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def _wait_equal(
    db: Database, flows: Sequence[CaptureFlow], stop: threading.Event, console: Console, words: str
) -> None:
    """Wait until each collection equals its table. Raises DeadlineExceeded, DemoInterrupted, JobFailed."""
    end, waiting = Deadline.after(CATCH_UP_SECONDS), [(flow, table) for flow in flows for table in flow.tables]
    while waiting := [each for each in waiting if _difference(db, *each) is not None]:
        for flow, _ in waiting:
            flow.check_running()
        if stop.wait(POLL_SECONDS):
            raise DemoInterrupted
        if end.expired():
            names = ", ".join(flow.collection(table) for flow, table in waiting)
            raise DeadlineExceeded(f"{names}: not equal to the table after {CATCH_UP_SECONDS:.0f} s: see the logs")
    console.print(f"  {words}")


def _difference(db: Database, flow: CaptureFlow, table: CapturedTable, moment: Moment | None = None) -> str | None:
    """Say how the collection differs from its table, now or at a moment; None: not at all."""
    columns, wanted = flow.database.rows(table) if moment is None else moment.rows[table.name]
    try:
        found = db[flow.collection(table)].read(at=None if moment is None else moment.tick, columns=columns)
    except MillraceError as error:
        return str(error)
    ours, theirs = set(zip(*(found[name].to_pylist() for name in columns), strict=True)), set(wanted)
    if ours == theirs and found.num_rows == len(wanted):
        return None
    return f"{len(theirs - ours)} rows are missing, {len(ours - theirs)} are not in the table"


def _print_results(db: Database, flows: Sequence[CaptureFlow], moments: Sequence[Moment], console: Console) -> int:
    table = Table(
        "Collection", "Captured by", "Transactions", "Rows", "= table", "= table at ticks",
        title="Databases and the collections that follow them", title_justify="left", box=None, padding=(0, 1),
    )  # fmt: skip
    wrong = 0
    for flow in flows:
        for each in flow.tables:
            now = _difference(db, flow, each)
            then = [_difference(db, flow, each, moment) for moment in moments if moment.flow is flow]
            wrong += (now is not None) + sum(difference is not None for difference in then)
            table.add_row(
                flow.collection(each), flow.way, f"{flow.database.transactions:,}",
                f"{db[flow.collection(each)].count():,}", _marked(now), " ".join(map(_marked, then)),
            )  # fmt: skip
    console.print(table)
    console.print(
        "[bold red]A collection differs from its table.[/]"
        if wrong
        else "[bold green]Each collection equals its table.[/]"
    )
    return 2 if wrong else 0


def _marked(difference: str | None) -> str:
    return "[green]✓[/]" if difference is None else f"[bold red]✗ {difference}[/]"
