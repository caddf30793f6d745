"""The run: databases under load, a flow for each captured table, faults, and the comparison."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, MillraceError
from millrace.base.files import replace_file
from millrace.base.settings import Settings
from millrace.brokers.mariadb import MariaDbServer
from millrace.brokers.programs import install
from millrace.client.database import Database
from millrace.demo.capture.databases import FLIGHTS, PLANES, CapturedTable, MariaDb, Row, SourceDatabase
from millrace.demo.load_phases import demo_client
from millrace.demo.summary import DemoInterrupted, LoadMonitor
from millrace.rpc.discovery import read_record
from millrace.runtime.child_processes import ChildProcess, JobFailed

FOLDER: Final = "demo-capture"
"""Subfolder of the data folder: a deployment that each run creates anew."""
SEED: Final = 2013
CATCH_UP_SECONDS: Final = 300.0
"""Within which the collections must have followed, after the last transaction."""
POLL_SECONDS: Final = 0.5
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


@dataclass(slots=True)
class CaptureFlow:
    """A table of a database, the collection that follows it, and the worker between them."""

    database: SourceDatabase
    table: CapturedTable
    file: Path
    settings: Settings
    job: ChildProcess | None = None

    @property
    def name(self) -> str:
        return f"{self.database.kind}-{self.table.name}"

    @property
    def collection(self) -> str:
        return f"{self.database.kind}_{self.table.name}"

    def start(self) -> None:
        """Start its worker, which continues where it was."""
        self.job = ChildProcess(
            [sys.executable, "-m", "millrace", "flows", "run", str(self.file)],
            log_file=self.settings.run_path / f"{self.collection}.log",
            env=self.settings.environment(),
        )

    def check_running(self) -> None:
        """Raise JobFailed if its supervisor has ended."""
        if self.job is not None and not self.job.running():
            raise JobFailed(f"the flow {self.name} ended:\n{self.job.tail()}\n(log: {self.job.log_file})")

    def processes(self, part: str) -> list[int]:
        """The running processes of its `part`: the engine, or the worker that reads what it captured."""
        below = [] if self.job is None else psutil.Process(self.job.pid).children(recursive=True)
        return [each.pid for each in below if (each.name() == "java") == (part == "engine")]


def run_capture(
    settings: Settings, root: Path, *, rows: int | None, seconds: float, console: Console, stop: threading.Event
) -> int:
    """Run the demo; return 0 if each collection equals its table, otherwise 2."""
    folder = settings.data_dir / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    settings = replace(settings, data_dir=folder)
    install(["mariadb"])
    console.print(f"Data folder: [bold]{folder}[/]\nStarting MariaDB on this host …")
    with ExitStack() as stack:
        server = stack.enter_context(MariaDbServer(folder / "mariadb", settings=settings))
        databases = [MariaDb(server, rows, SEED)]
        for database in databases:
            os.environ[database.password_name] = database.password  # for the workers
            database.fill()
        db = stack.enter_context(demo_client(settings))
        db.catalog.ensure_pchannels(settings.pchannels)
        console.print(f"Log and databases are up; starting a streaming node (logs: {settings.run_path}) …")
        stack.enter_context(_streaming_node(settings, root, db, stop))
        flows = [_declare(db, settings, database, table) for database in databases for table in (FLIGHTS, PLANES)]
        with _following(flows):
            _wait_equal(db, flows, stop, console, "the snapshots are in the collections")
            _write_through_faults(databases, flows, settings, seconds, console, stop)
            _wait_equal(db, flows, stop, console, "the collections have followed")
        return _print_results(db, flows, console)


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


def _declare(db: Database, settings: Settings, database: SourceDatabase, table: CapturedTable) -> CaptureFlow:
    found = CaptureFlow(database, table, settings.data_dir / f"{database.kind}_{table.name}.yaml", settings)
    fields = {
        name: _FIELDS[kind.partition("(")[0].split()[0]] + ("" if name == table.key else "?")
        for name, kind in table.columns.items()
    }
    db.create_collection(found.collection, fields, key=table.key, vchannels=2)
    declared = {
        "id": found.name,
        "source": database.source(table),
        "sink": {"kind": "collection", "collection": found.collection},
        "errors": {"collection": f"{found.collection}_errors"},
    }
    replace_file(found.file, yaml.safe_dump(declared, sort_keys=False))
    return found


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
) -> None:
    """Write for `seconds`, and kill each kind of process meanwhile. Raises DemoInterrupted, and what ended a writer."""
    chosen = random.Random(SEED)
    victims = chosen.sample(VICTIMS, len(VICTIMS))
    try:
        for each in databases:
            each.start()
        for victim in victims:
            if stop.wait(seconds / (len(victims) + 1) * chosen.uniform(0.6, 1.4)):
                raise DemoInterrupted
            flow = chosen.choice(flows)
            _kill(victim, flow, settings)
            console.print(f"  killed: the {victim} ({flow.name})")
        if stop.wait(seconds / (len(victims) + 1)):
            raise DemoInterrupted
    finally:
        for each in databases:
            each.stop()


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
    """Wait until each collection equals its table. Raises DeadlineExceeded, DemoInterrupted."""
    end, waiting = Deadline.after(CATCH_UP_SECONDS), list(flows)
    while waiting := [each for each in waiting if _difference(db, each) is not None]:
        for each in waiting:
            each.check_running()
        if stop.wait(POLL_SECONDS):
            raise DemoInterrupted
        if end.expired():
            names = ", ".join(each.name for each in waiting)
            raise DeadlineExceeded(f"{names}: not equal to the table after {CATCH_UP_SECONDS:.0f} s: see the logs")
    console.print(f"  {words}")


def _difference(db: Database, flow: CaptureFlow) -> str | None:
    """Say how the collection differs from its table; None: not at all."""
    columns, wanted = flow.database.rows(flow.table)
    try:
        found = _collected(db, flow.collection, columns)
    except MillraceError as error:
        return str(error)
    if found == wanted:
        return None
    ours, theirs = set(found), set(wanted)
    return f"{len(theirs - ours)} rows are missing, {len(ours - theirs)} are not in the table"


def _collected(db: Database, name: str, columns: Sequence[str], at: int | None = None) -> list[Row]:
    table = db[name].read(at=at, columns=list(columns))
    return sorted(zip(*(table[column].to_pylist() for column in columns), strict=True))


def _print_results(db: Database, flows: Sequence[CaptureFlow], console: Console) -> int:
    table = Table(
        "Collection", "Way", "Transactions", "Rows", "= table",
        title="Databases and the collections that follow them", title_justify="left", box=None, padding=(0, 1),
    )  # fmt: skip
    right = True
    for each in flows:
        difference = _difference(db, each)
        right &= difference is None
        table.add_row(
            each.collection, "binary log", f"{each.database.transactions:,}", f"{db[each.collection].count():,}",
            "[green]✓[/]" if difference is None else f"[bold red]✗ {difference}[/]",
        )  # fmt: skip
    console.print(table)
    console.print(
        "[bold green]Each collection equals its table.[/]"
        if right
        else "[bold red]A collection differs from its table.[/]"
    )
    return 0 if right else 2
