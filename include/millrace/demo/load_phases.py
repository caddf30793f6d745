"""The demo's phases against a running streaming job, with progress, until every row is in its table."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.demo.load import LoadGenerator
from millrace.demo.summary import LoadMonitor, StreamingJobHandle


def run_load_phases(
    client: Database,
    collection: CollectionInfo,
    flights: pa.Table,
    watch: LoadMonitor,
    job: StreamingJobHandle,
    console: Console,
    options: argparse.Namespace,
    *,
    over: Callable[[], bool] | None = None,
) -> LoadGenerator:
    """Send `flights`, and more of them until `over`, and wait until they are in the collection's table.

    Return the load with the producers' results.
    """
    load = LoadGenerator(client, collection, flights, prefix=f"{time.time_ns() // 1_000_000:x}/")
    phases: list[tuple[str, Callable[[], None]]] = [
        (f"the year in {options.seconds:.0f} s", partial(load.paced, options.seconds)),
        ("transactions, a repeat, a flush", load.special_cases),
        (f"full speed, {options.times} times", partial(load.full_speed, options.times)),
    ]
    if over is not None:
        phases.append(("at an easy pace, until all faults are over", partial(load.until, over)))
    with _progress(console) as progress:
        task = progress.add_task("starting", total=len(flights) * (1 + options.times), rate="", lag="")
        update = partial(progress.update, task)
        for name, work in phases:
            watch.run_phase(name, work, load, job, update)
        waited = watch.wait_flushed(client.catalog.flush(collection.name), load, job, update)
    console.print(f"All rows are in the collection's table, {waited:.1f} s after the last append.")
    return load


@contextmanager
def demo_client(settings: Settings) -> Iterator[Database]:
    """Yield a client, and stop the log server at the end in any case: acknowledged entries are on disk."""
    with connect(settings=settings) as db:
        try:
            yield db
        finally:
            db.connection.service.shutdown()


@contextmanager
def stopping_on_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set, so that the demo stops in an orderly way."""
    stop = threading.Event()

    def tell(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    previous = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def add_load_options(parser: argparse.ArgumentParser, *, times: int = 20) -> None:
    """Add the options for the amount of load and its speed."""
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the paced year takes (default: 60)")
    parser.add_argument(
        "--times", type=int, default=times, help=f"how many times the year is sent at full speed (default: {times})"
    )
    parser.add_argument("--rows", type=int, default=None, help="only the first ROWS flights (default: all 336,776)")


def check_load_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message if an option is invalid."""
    if options.seconds <= 0 or options.times < 0 or (options.rows is not None and options.rows < 1):
        parser.error("--seconds and --rows must be positive, --times must not be negative")


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<32}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:>9,.0f} rows"),
        TextColumn("{task.fields[rate]:>22}"),
        TextColumn("{task.fields[lag]}"),
        TimeElapsedColumn(),
        console=console,
    )
