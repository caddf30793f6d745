"""``millrace system``: start, watch and stop the whole system on one machine (`make up`, `make down`)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millrace.base.deadline import Deadline
from millrace.base.errors import MillraceError
from millrace.commands.parts.command_line import (
    OPERATE_PANEL,
    CommandContext,
    JsonContext,
    command_group,
    console,
    print_json,
)

if TYPE_CHECKING:
    from millrace.installation.status import InstallationStatus
    from millrace.installation.system import Installation, RunningInstallation

app = command_group("system", OPERATE_PANEL, "Run the whole system: Airflow, the log, the streaming jobs.")

REFRESH_SECONDS: Final = 5.0
"""Pause between two looks of the live status on a terminal."""
PROCESS_SCAN_SECONDS: Final = 60.0
"""Pause between two looks at all processes and their memory, which cost a hundred times what the rest does."""
OUTPUT_LINE_SECONDS: Final = 30.0
"""The same where the output goes to a file."""


@app.command()
def up(
    context: CommandContext,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once the system runs, and leave it running.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port of the web interface, over [api] port in airflow.cfg; 0: a free one."
        ),
    ] = None,
) -> None:
    """Start the system and show a short status until Ctrl-C, which stops the system.

    If the system already runs, the command shows its address. After a crash it continues with what still runs.

    Example: `millrace system up`

    Example: `millrace system up --detach --port 0`
    """
    from millrace.installation.system import Installation
    from millrace.runtime.child_processes import JobFailed
    from millrace.runtime.java import find_java
    from millrace.runtime.spark.jars import session_jars

    settings = context.settings
    installation = Installation(settings)
    with _asked_to_stop() as stop:
        find_java()
        session_jars(settings)
        running = installation.start(port=port)
        if not running.started_now:
            typer.echo("The system runs already.")
        else:
            typer.echo(f"Starting Airflow, then the streaming job (log: {installation.log_file}).")
        try:
            _wait(installation, running, stop)
        except _Stopping:
            _down(installation)
            return
        except JobFailed:  # Airflow itself has ended; one that is slow goes on starting
            if running.started_now:
                _down(installation)
            raise
        _say_where(installation, running)
        if detach or not running.started_now:
            return
        if _watch(installation, stop):
            _down(installation)
        else:
            typer.echo("The system was stopped by another command.")


@app.command()
def down(context: CommandContext) -> None:
    """Stop the system: Airflow, the streaming jobs (each finishes its micro-batch) and the log server.

    Example: `millrace system down`
    """
    from millrace.installation.system import Installation

    _down(Installation(context.settings))


@app.command()
def status(context: JsonContext) -> None:
    """Show Airflow's components, the streaming job, lag and memory. The exit code is 3 if the system is not healthy.

    Example: `millrace system status --json`
    """
    from millrace.commands.parts.command_line import EXIT_VERIFICATION_FAILED
    from millrace.installation.status import read_status
    from millrace.installation.system import Installation
    from millrace.observe.observer import Observer

    settings = context.settings
    installation = Installation(settings)
    observer = Observer(settings)
    try:
        found = read_status(installation, observer)
    finally:
        observer.close()
    if context.as_json:
        print_json(found.to_json())
    else:
        for line in _lines(found):
            typer.echo(line)
        if found.running:
            _say_where(installation, None)
    if not found.healthy:
        raise typer.Exit(EXIT_VERIFICATION_FAILED)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def airflow(
    context: CommandContext,
    arguments: Annotated[list[str], typer.Argument(metavar="ARGUMENTS", help="What Airflow's own command line takes.")],
) -> None:
    """Run Airflow's own command line with this installation's configuration and secrets.

    Example: `millrace system airflow dags list`
    """
    from millrace.installation.system import Installation

    environment = Installation(context.settings).environment()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "airflow", *arguments], environment)


# --- starting and stopping --------------------------------------------------------------------------------------------


class _Stopping(Exception):
    """A stop was requested while the system was starting."""


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets, instead of ending the command.

    A clean stop takes time. A second signal ends this command; `down` can stop what it had started.
    """
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    wakeup = signal.set_wakeup_fd(-1)
    previous = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)


def _wait(installation: Installation, running: RunningInstallation, stop: threading.Event) -> None:
    """Wait until the whole system runs. Raises _Stopping if a stop is requested meanwhile."""

    def check() -> None:
        if stop.is_set():
            raise _Stopping

    began = time.monotonic()

    def say(words: str) -> None:
        typer.echo(f"{time.monotonic() - began:4.0f} s  {words[0].upper()}{words[1:]}")

    installation.wait_airflow(running, check=check, on_progress=say)
    say("Airflow is well")
    installation.wait_streaming(running, check=check, on_progress=say)
    say("the streaming job runs")


def _down(installation: Installation) -> None:
    stopped = installation.stop(on_progress=lambda words: typer.echo(f"{words[0].upper()}{words[1:]} …"))
    if not stopped.ended:
        typer.echo(f"Nothing of {installation.settings.data_dir} runs.")
        return
    killed = f" ({stopped.killed} of them had to be killed)" if stopped.killed else ""
    typer.echo(f"Stopped: {stopped.ended} processes{killed}, none is left. `make up` goes on from there.")


def _watch(installation: Installation, stop: threading.Event) -> bool:
    """Show the status until a stop is requested (return True) or another process stops the system (return False)."""
    from rich.live import Live
    from rich.text import Text

    from millrace.installation.status import ProcessUsage, read_status
    from millrace.observe.observer import Observer

    out = console()
    processes, again = ProcessUsage.measure(installation), Deadline.after(PROCESS_SCAN_SECONDS)
    observer = Observer(installation.settings)
    next_line = Deadline.after(OUTPUT_LINE_SECONDS)
    try:
        with Live(console=out, auto_refresh=False, transient=True) if out.is_terminal else nullcontext() as live:
            while not stop.wait(REFRESH_SECONDS):
                if installation.running() is None:
                    return False
                if live is None and not next_line.expired():
                    continue
                if again.expired():
                    processes, again = ProcessUsage.measure(installation), Deadline.after(PROCESS_SCAN_SECONDS)
                try:
                    lines = _lines(read_status(installation, observer, processes))
                except MillraceError as error:
                    lines = [f"{error.code}: {error}"]  # often temporary: try again at the next refresh
                if live is not None:
                    live.update(Text("\n".join([*lines, "", "Ctrl-C stops all of it."])), refresh=True)
                else:
                    typer.echo(" · ".join(lines))
                    next_line = Deadline.after(OUTPUT_LINE_SECONDS)
        return True
    finally:
        observer.close()


# --- in words ---------------------------------------------------------------------------------------------------------


def _say_where(installation: Installation, running: RunningInstallation | None) -> None:
    from millrace.installation.secrets import PASSWORDS_FILE, USER

    running = running or installation.running()
    if running is None:
        return
    typer.echo(f"Address     {running.address}")
    typer.echo(
        f"User        {USER}, password {installation.secrets().password} ({installation.state / PASSWORDS_FILE})"
    )
    typer.echo(f"Logs        {installation.log_file} · {installation.settings.run_path / 'operations'}")
    typer.echo("Stop        `make down`, or `millrace system down`")


def _lines(found: InstallationStatus) -> list[str]:
    """Return the status as lines: Airflow, streaming job, log, memory, then the problems."""
    if not found.running and not sum(found.processes.values()):
        return [f"Nothing of {found.data} runs: start it with `make up`"]
    sick = {name: state for name, state in found.components.items() if state != "healthy"}
    airflow = (
        "stopped"
        if not found.running
        else "does not answer"
        if not found.components
        else ", ".join(f"{name} {state}" for name, state in sick.items()) or "healthy"
    )
    if found.restarts:
        airflow += f" (started anew {found.restarts} times; {found.reason})"
    lag = "unknown" if found.lag_seconds is None else f"{found.lag_seconds:.1f} s"
    sizes = ", ".join(f"{name} {size / (1 << 30):.2f}" for name, size in found.pss_bytes.items() if size)
    total = sum(found.pss_bytes.values()) / (1 << 30)
    return [
        f"Airflow     {airflow}",
        f"Streaming   {'running' if found.streaming else 'not running'},"
        f" {found.rows_per_second:,.0f} rows/s, lag {lag}",
        f"Data        {found.words}",
        f"Log         {'running' if found.log_server else 'not running; it starts when it is needed'}",
        f"Memory      {total:.2f} GiB in {sum(found.processes.values())} processes ({sizes})",
        *(f"{each.severity.capitalize():<11} {each.subject}: {each.words} ({each.where})" for each in found.findings),
    ]
