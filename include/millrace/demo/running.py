"""``make demo``: send a year of flights through the running system, and show where to look at it in the browser.

Starts the system if it does not run, and leaves it running. Several producers replay the flights in about a minute,
then at full speed. The demo then compares the producers' results with the log, the WAL and the tables.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.demo.flights import flights
from millrace.demo.load import COLLECTION, ensure_collection
from millrace.demo.load_phases import add_load_options, check_load_options, run_load_phases, stopping_on_signals
from millrace.demo.summary import DemoInterrupted, LoadMonitor, summarise
from millrace.installation.secrets import USER
from millrace.installation.system import STREAMING_DAG, Installation
from millrace.runtime.child_processes import JobFailed

TIMES = 5
"""Default of how many times the year is sent at full speed: enough for a picture in the charts."""


class SystemJob:
    """The streaming job of the running system.

    Its DAG restarts it when it dies, so it counts as running while the system runs.
    """

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self.log_file: Path = installation.log_file

    def running(self) -> bool:
        return self._installation.running() is not None

    def tail(self) -> str:
        return "The system was stopped."


def main() -> int:
    """Run the demo. The exit code is 0 if everything that was appended is accounted for."""
    options = _options()
    console = Console(highlight=False)
    with stopping_on_signals() as stop:
        try:
            settings = Settings.load()
            return _run(Installation(settings), settings, options, console, stop)
        except DemoInterrupted:
            console.print(
                "\nStopped; the system keeps running ([bold]make down[/] stops it). No acknowledged row is lost."
            )
            return 130
        except MillraceError as error:
            console.print(f"[bold red]{error.code}[/]: {escape(str(error))}")
            return 1


def _run(
    installation: Installation,
    settings: Settings,
    options: argparse.Namespace,
    console: Console,
    stop: threading.Event,
) -> int:
    if installation.running() is None or not installation.streaming_job_running():
        # A separate process: it prints its own progress, and Ctrl-C reaches it too.
        done = subprocess.run([sys.executable, "-m", "millrace", "system", "up", "--detach"], check=False)
        if done.returncode:
            raise JobFailed("the system could not be started; its output is above")
    with connect(settings=settings) as db:
        db.catalog.ensure_pchannels(settings.pchannels)
        collection = ensure_collection(db)
        watch = LoadMonitor(settings, db, stop)
        table = flights().slice(0, options.rows)
        _print_pages(installation, console)
        load = run_load_phases(db, collection, table, watch, SystemJob(installation), console, options)
        code = summarise(settings, db, collection, load.counts, watch, console)
    _print_pages(installation, console)
    return code


def _print_pages(installation: Installation, console: Console) -> None:
    running = installation.running()
    if running is None:
        raise JobFailed("the system was stopped in the meantime; `make up` starts it")
    address = running.address
    console.print(f"\nLook at it: {address}  (user {USER}, password {installation.secrets().password})")
    for words, path in (
        ("throughput, lag, PChannels", "/plugin/millrace"),
        ("the collection and its rows", f"/millrace/collections/{COLLECTION}"),
        ("the rolled-back transaction and the rejections", "/millrace/transactions"),
        ("the streaming job under supervision", f"/dags/{STREAMING_DAG}"),
        ("everything that can be run with a form", "/millrace/actions"),
    ):
        console.print(f"  {words:<48} {address}{path}", soft_wrap=True)
    console.print("")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_load_options(parser, times=TIMES)
    options = parser.parse_args()
    check_load_options(parser, options)
    return options


if __name__ == "__main__":
    sys.exit(main())
