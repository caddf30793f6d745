"""Supervise the processes of one flow on either host.

    python -m millrace.flows.supervisor workers FILE [--config FILE]    # a pipeline in worker processes
    python -m millrace.flows.supervisor tasks FILE [--config FILE]      # a pipeline in Spark's tasks
    python -m millrace.flows.supervisor streams NAME                    # a stream, or a group of streams

millrace.flows.control starts it as one run of the launcher; ``millrace flows run`` supervises in the foreground. A flow
has one supervisor at a time: it holds the lock of its folder (millrace.flows.status).

A process that dies, falls silent or hangs is restarted after growing pauses; millrace.flows.hosts defines each host's
processes and health checks. If a supervisor is killed, its processes end by themselves (SupervisorWatch), and the next
supervisor first ends those that did not, by process id and start time. It continues the sequence of pauses.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from millrace.base.data_folder import restrict_umask
from millrace.base.deadline import Deadline
from millrace.base.errors import MillraceError
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import make_folder, replace_json
from millrace.base.process import ProcessInfo, all_processes, find_process
from millrace.base.settings import Settings
from millrace.flows.status import ProcessRecord, records_of, supervised_folder
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.launch.folder import read_json
from millrace.runtime.process_setup import stop_on_signals
from millrace.runtime.processes import KILL_SECONDS, kill_all, process_tree, read_environment, terminate
from millrace.runtime.supervisor import Fault, RestartBackoff, Supervisor

FOLDER_VARIABLE: Final = "MILLRACE_FLOW_FOLDER"
"""Environment variable that every process of a flow inherits: the folder of its supervisor."""
_LOCK_SECONDS: Final = 1.0
_PAUSED_SECONDS: Final = 0.5
_STOP_PART: Final = 0.8
"""The processes' share of `stop_deadline`. The rest is for the supervisor, whose stopper waits for all of it."""
_MESSAGE_LENGTH: Final = 2000


@dataclass(frozen=True, slots=True)
class Restarts:
    """Pauses before restarts: `first` seconds, doubled with each failure in a row, at most `longest`."""

    first: float
    longest: float
    steady: float = 60.0
    """Seconds after which a process counts as steady, and the pauses start again from `first`."""
    attempts: int | None = None
    """Failures in a row after which the process is not restarted; None: unlimited."""


class Host(Protocol):
    """The processes that a flow's supervisor starts, and their health checks."""

    name: str
    run_id: str
    count: int
    """The number of processes, numbered from 0."""
    bounded: bool
    """Whether a process ends by itself, at the present end of the source."""
    restarts: Restarts

    def wanted(self) -> tuple[str, ...] | None:
        """Return the flows that a process must run now, or None. A process that runs others is restarted."""
        ...

    def command(self, number: int, result: Path) -> list[str]:
        """Return the command of process `number`, which may write its result or typed error to `result`."""
        ...

    def log_file(self, number: int) -> Path: ...

    def watch(self, number: int, job: ChildProcess) -> Callable[[], Fault | None]:
        """Return the health check of a process that has just started. The check may kill it."""
        ...

    def busy(self, words: str) -> MillraceError:
        """Return the error for a flow that another process supervises."""
        ...

    def ended(self) -> None:
        """Release resources that processes retain across restarts. Called when all have ended for good."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessFault(Fault):
    """The end of a process with its reported error."""

    error: Mapping[str, Any] | None = None


class _Child:
    """One process and its health check."""

    def __init__(self, host: Host, number: int, folder: Path, settings: Settings, runs: tuple[str, ...]) -> None:
        self.runs, self._host = runs, host
        self._result = folder / f"{number}.result.json"
        self._result.unlink(missing_ok=True)
        environment = {**settings.environment(), FOLDER_VARIABLE: str(folder)}
        command = host.command(number, self._result)
        self._job = ChildProcess(command, log_file=host.log_file(number), env=environment)
        self._check = host.watch(number, self._job)
        self.code = 0
        """Its exit code, after it was stopped."""

    @property
    def pid(self) -> int:
        return self._job.pid

    def fault(self) -> Fault | None:
        if not self._job.running():
            return self._end(self._job.stop(deadline=0.0))
        return Fault("") if self._host.wanted() != self.runs else self._check()

    def stop(self, *, deadline: float) -> None:
        self.code = self._job.stop(deadline=deadline)

    def _end(self, code: int) -> Fault:
        if code == 0 and self._host.bounded:
            return Fault("", restart=False)
        reported = (read_json(self._result) or {}).get("error")
        if isinstance(reported, dict) and "code" in reported:
            words = f"{reported['code']}: {reported.get('message', '')}"
            return ProcessFault(words, restart=bool(reported.get("retriable", True)), error=reported)
        last = self._job.tail(1).strip() or f"its log is {self._job.log_file}"
        return ProcessFault(f"it ended with {code}: {last}" if code else "it ended without a request to stop")


@dataclass(frozen=True, slots=True)
class Ended:
    """How supervision ended."""

    code: int = 0
    """0 after a stop, or when the work is done."""
    error: Mapping[str, Any] | None = None


def supervise(settings: Settings, host: Host, stop: threading.Event) -> Ended:
    """Keep the processes of `host` running until `stop`, until all have finished, or until one failed too often.

    Raises `host.busy` if another process supervises the flow.
    """
    folder = supervised_folder(settings, host.run_id)
    make_folder(folder)
    busy = host.busy(f"another process supervises {host.name!r}: stop it first (`millrace flows stop {host.name}`)")
    with exclusive_lock(folder / "lock", deadline=Deadline.after(_LOCK_SECONDS), busy=busy):
        end_orphans(folder, deadline=_STOP_PART * settings.stop_deadline)
        for number in records_of(folder):
            (folder / f"{number}.json").unlink(missing_ok=True)
        ends = [Ended()] * host.count
        broken: list[BaseException] = []

        def one(number: int) -> None:
            try:
                ends[number] = _supervised(settings, host, number, folder, stop)
            except BaseException as error:  # such as a failed start; whatever runs this supervisor restarts it
                broken.append(error)
                stop.set()

        threads = [
            threading.Thread(target=one, args=(number,), name=f"process-{number}") for number in range(1, host.count)
        ]
        for each in threads:
            each.start()
        one(0)
        for each in threads:
            each.join()
        host.ended()
        if broken:
            raise broken[0]
        for number in range(host.count):  # a requested start ignores earlier failures
            _pauses_path(folder, number).unlink(missing_ok=True)
    return next((each for each in ends if each.code), Ended())


def _supervised(settings: Settings, host: Host, number: int, folder: Path, stop: threading.Event) -> Ended:
    """Keep process `number` running."""
    path, record = folder / f"{number}.json", ProcessRecord()
    children: list[_Child] = []

    def note(**changes: Any) -> None:
        nonlocal record
        record = replace(record, **changes)
        record.write(path)

    def start() -> _Child | None:
        while (runs := host.wanted()) is None:
            if record.pid or record.retry_at is not None:
                note(pid=0, start="", runs=(), retry_at=None)
            if stop.wait(_PAUSED_SECONDS):
                return None
        children[:] = [_Child(host, number, folder, settings, runs)]
        found = find_process(children[0].pid)  # None: it has ended already
        note(pid=children[0].pid, start="" if found is None else found.start, runs=runs, retry_at=None)
        return children[0]

    def on_fault(fault: Fault) -> None:
        gone = {"pid": 0, "start": "", "runs": ()}
        if not fault.cause:  # it has finished, or is restarted for another set of flows
            note(**gone)
            return
        sys.stderr.write(f"a process of {host.name}: {fault}\n")
        again = fault.restart and (policy.attempts is None or backoff.failures <= policy.attempts)
        at = time.time() + backoff.remaining_pause() if again else None
        note(**gone, ends=record.ends + 1, ended_at=time.time(), cause=fault.cause, retry_at=at)

    policy = host.restarts
    backoff = RestartBackoff(
        policy.first, policy.longest, steady=policy.steady, path=_pauses_path(folder, number), jitter=True
    )
    fault = Supervisor(
        start,
        backoff=backoff,
        stop_deadline=_STOP_PART * settings.stop_deadline,
        attempts=policy.attempts,
        on_fault=on_fault,
    ).run(stop.wait)
    note(pid=0, start="", runs=(), retry_at=None)
    if fault is None or not fault.cause or stop.is_set():
        return Ended()
    words = f"its process ended too often; the last cause: {fault.cause}"
    error_document = {"code": "WORKER_ENDED", "message": words[:_MESSAGE_LENGTH], "retriable": True}
    known = fault.error if isinstance(fault, ProcessFault) and not fault.restart else None
    return Ended(children[0].code or 1, known or error_document)


def _pauses_path(folder: Path, number: int) -> Path:
    """Return the file with the pauses of process `number`, which outlives a killed supervisor."""
    return folder / f"{number}.restarts.json"


def end_orphans(folder: Path, *, deadline: float) -> list[int]:
    """End the processes of a killed supervisor with this folder; return the ids of those that it had recorded.

    The process itself gets SIGTERM and has `deadline` seconds to finish. Then everything that it started is killed.
    """
    known = [each for each in records_of(folder).values() if _left_by(each, folder)]
    leaders = [each for record in known for each in _left_by(record, folder) if each.pid == record.pid]
    terminate(leaders, deadline=deadline)
    kill_all(lambda: [each for record in known for each in _left_by(record, folder)], deadline=KILL_SECONDS)
    return [each.pid for each in known]


def _left_by(record: ProcessRecord, folder: Path) -> list[ProcessInfo]:
    """Return the recorded process and its descendants that still run."""
    if not record.pid:
        return []
    leader = all_processes().get(record.pid)
    if leader is not None:
        return process_tree(record.pid) if leader.start == record.start else []  # else the id was reused
    members = process_tree(record.pid)
    return [each for each in members if (read_environment(each.pid) or {}).get(FOLDER_VARIABLE) == str(folder)]


def main() -> int:
    """Supervise a flow as a run of the launcher; write the result to ``--result``."""
    from millrace.flows.hosts import host_of

    parser = argparse.ArgumentParser(prog="python -m millrace.flows.supervisor")
    parser.add_argument("host", choices=("workers", "tasks", "streams"))
    parser.add_argument("flow", metavar="FILE|NAME")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a pipeline-config.yaml")
    parser.add_argument("--result", type=Path, metavar="FILE", required=True)
    parser.add_argument("--progress", type=Path, metavar="FILE")
    options = parser.parse_args()
    restrict_umask()
    stop = stop_on_signals()
    try:
        settings = Settings.load()
        host = host_of(settings, options.host, options.flow, config=options.config, progress=options.progress)
        ended = supervise(settings, host, stop)
    except MillraceError as error:
        error_document = {"code": error.code, "message": str(error)[:_MESSAGE_LENGTH], "retriable": error.retriable}
        ended = Ended(1, error_document)
    if ended.code:
        replace_json(options.result, {"ok": False, "error": ended.error})
    else:
        done = host.bounded and not stop.is_set()
        replace_json(options.result, {"ok": True, "stopped": not done, "report": {}})
    return ended.code


if __name__ == "__main__":
    sys.exit(main())
