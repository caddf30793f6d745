"""``make run``: the whole system on one machine, fed with a year of flights, and a summary that was checked.

Starts the embedded log and a Spark driver with the streaming node and the flusher, replays the flights of 2013 in about a
minute from several producers at once, then at full speed many times over, waits until every row lies in its collection,
and holds what the producers were told against the log, the WAL and the tables. A second run continues in the same folder.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from millrace.client.client import Client
from millrace.demo.flights import flights
from millrace.demo.load import Load, ensure_collection
from millrace.demo.summary import Interrupted, Watch, summarise
from millrace.errors import LogUnavailable, MillraceError
from millrace.log.remote import RemoteLogService
from millrace.node.processes import Job
from millrace.settings import Settings

ROOT = Path(__file__).parents[3]


def main() -> int:
    """Run the demo; the exit code is 0 where everything that was appended is accounted for."""
    options = _options()
    console = Console(highlight=False)
    settings = Settings.load()
    if options.fresh:
        _start_afresh(settings, console)
    stop = threading.Event()
    previous = [signal.signal(number, _setting(stop)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        return _run(settings, options, console, stop)
    except Interrupted:
        console.print(
            "\nStopped. Everything that was acknowledged is in the log; [bold]make run[/] goes on from there."
        )
        return 130
    except MillraceError as error:
        console.print(f"[bold red]{error.code}[/]: {error}")
        return 1
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), previous, strict=True):
            signal.signal(number, handler)


def _run(settings: Settings, options: argparse.Namespace, console: Console, stop: threading.Event) -> int:
    console.print(f"Data folder: [bold]{settings.data_dir}[/]")
    log_file = settings.run_path / "streaming-node.log"
    with Client.connect(settings) as client, _serving(client):
        client.coordinator.ensure_pchannels(settings.pchannels)
        collection = ensure_collection(client)
        table = flights().slice(0, options.rows)
        console.print(f"Log and append host are up; starting Spark with streaming node and flusher (log: {log_file}) …")
        watch = Watch(settings, client, stop)
        job = Job(
            [sys.executable, str(ROOT / "jobs" / "streaming_node.py"), "--with-flusher"],
            log_file=log_file,
            env=settings.environment(),
        )
        try:
            watch.wait_started(job)
            load = Load(client, collection, table, prefix=f"{time.time_ns() // 1_000_000:x}/")
            phases: list[tuple[str, Callable[[], None]]] = [
                (f"the year in {options.seconds:.0f} s", partial(load.paced, options.seconds)),
                ("transactions, a repeat, a flush", load.special_cases),
                (f"full speed, {options.times} times", partial(load.full_speed, options.times)),
            ]
            with _progress(console) as progress:
                task = progress.add_task("starting", total=len(table) * (1 + options.times), rate="", lag="")
                update = partial(progress.update, task)
                for name, work in phases:
                    watch.drive(name, work, load, job, update)
                waited = watch.wait_flushed(client.coordinator.flush(collection.name), load, job, update)
            console.print(f"Everything lies in the collection's table, {waited:.1f} s after the last append.")
        finally:
            job.stop(deadline=settings.stop_deadline)
        return summarise(settings, client, collection, load.counts, watch, console)


@contextmanager
def _serving(client: Client) -> Iterator[None]:
    """The log's server ends with the demo, however that ends: what was acknowledged is on the disk."""
    try:
        yield
    finally:
        client.append.service.shutdown()


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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fresh", action="store_true", help="remove the data folder first (default: continue in it)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the paced year takes (default: 60)")
    parser.add_argument("--times", type=int, default=20, help="how often the year is sent at full speed (default: 20)")
    parser.add_argument("--rows", type=int, default=None, help="only the first ROWS flights (default: all 336,776)")
    options = parser.parse_args()
    if options.seconds <= 0 or options.times < 0 or (options.rows is not None and options.rows < 1):
        parser.error("--seconds and --rows must be positive, --times not negative")
    return options


def _start_afresh(settings: Settings, console: Console) -> None:
    """Remove what an earlier run left, but nothing that is not Millrace's."""
    folder = settings.data_dir
    if not folder.exists():
        return
    known = {"log", "wal", "collections", "deletes", "segments", "checkpoints", "coord", "run", "spark", "parked"}
    strange = sorted({path.name for path in folder.iterdir()} - known)
    if strange:
        raise SystemExit(
            f"{folder} holds {', '.join(strange[:5])}, which is not Millrace's: remove it yourself, or choose another MILLRACE_DATA"
        )
    _stop_server(settings)
    shutil.rmtree(folder)
    console.print(f"Removed {folder}.")


def _stop_server(settings: Settings) -> None:
    """Stop the log's server of this data folder, if one runs."""
    try:
        service = RemoteLogService.connect(settings.log_path, start=False, deadline=settings.stop_deadline)
    except LogUnavailable:
        return
    service.shutdown()
    service.close()


def _setting(stop: threading.Event) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, frame: FrameType | None) -> None:
        stop.set()

    return handler


if __name__ == "__main__":
    sys.exit(main())
