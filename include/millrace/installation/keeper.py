"""The keeper of one installation supervises `airflow standalone` and stops it completely on request.

    python -m millrace.installation.keeper --state FOLDER --address URL -- COMMAND...

`airflow standalone` starts Airflow's components once and does not restart them. The keeper starts it in a process group
of its own and restarts it, after growing pauses, when it or one of its components has ended. SIGTERM ends the keeper,
and before that its session: SIGINT to `airflow standalone` (SIGTERM would leave orphans), then SIGTERM, then SIGKILL.
The keeper leads that session, so Airflow's processes are known even if the keeper was killed. It holds a lock file
for its lifetime, so that there is one keeper for an installation.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import LogBusy
from millrace.base.file_lock import LockedFile, exclusive_lock, read_locked_file
from millrace.base.files import rotate_log
from millrace.base.process import ProcessInfo, all_processes, current_process, find_process
from millrace.runtime.processes import kill_all, send_signal, terminate, wait_for_exit
from millrace.runtime.supervisor import Fault, RestartBackoff, Supervisor

RECORD_FILE: Final = "installation.json"
LOCK_FILE: Final = "keeper.lock"
LOG_FILE: Final = "airflow.log"

LOG_BYTES: Final = 32 << 20
"""Size at which the log is rotated to `airflow.log.1`."""

FIRST_PAUSE, LONGEST_PAUSE, STEADY_SECONDS = 1.0, 60.0, 300.0
FIRST_POLL: Final = 0.2
"""Seconds between two polls until all components have started."""
TERM_SECONDS: Final = 5.0
LOCK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class KeeperRecord:
    """The published state of a keeper."""

    pid: int
    start: str | None
    """The boot and the moment at which the keeper began (millrace.base.process): a reused id is another's."""
    address: str
    at: float
    """Last start of Airflow in Unix seconds. An older heartbeat is from an earlier run."""
    restarts: int = 0
    reason: str = ""
    """Reason of the last restart."""

    def process(self) -> ProcessInfo | None:
        """Return the keeper's process, or None if it has ended."""
        found = find_process(self.pid)
        return found if found is not None and found.start == self.start else None


def read_record(state: Path) -> KeeperRecord | None:
    """Return the keeper's record in the folder `state`.

    Return None if there is no readable record, or if no process holds it: it is then a copy of another
    installation's.
    """
    try:
        data, is_held = read_locked_file(state / RECORD_FILE)
        return KeeperRecord(**json.loads(data)) if is_held else None
    except (FileNotFoundError, ValueError, TypeError):
        return None


def write_record(state: Path, record: KeeperRecord) -> LockedFile:
    """Publish `record` until the returned handle is closed."""
    return LockedFile(state / RECORD_FILE, asdict(record))


class AirflowGroup:
    """One run of the command in its own process group, within the keeper's session."""

    def __init__(self, command: list[str], log: Path, *, components: int, settle: float, log_bytes: int) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        self._log, self._log_bytes = log, log_bytes
        self._components = components
        self._settled_at = Deadline.after(settle)
        self.complete = not components
        """Whether all components have started."""

    def fault(self) -> Fault | None:
        """Return what ended: the command, or one of its components. Rotates the log."""
        rotate_log(self._log, self._log_bytes)
        code = self._process.poll()
        if code is not None:
            return Fault(f"Airflow ended with {code}")
        if not self._components:
            return None
        children = sum(each.parent == self._process.pid for each in all_processes().values())
        self.complete = self.complete or children >= self._components
        if children < self._components and (self.complete or self._settled_at.expired()):
            return Fault(f"{self._components - children} of Airflow's {self._components} components ended")
        return None

    def stop(self, *, deadline: float) -> None:
        """End the command and the rest of the session, whatever their state."""
        # Orphans of a killed component hold its output open, and the command would wait for them: end them first.
        terminate(session_orphans(), deadline=TERM_SECONDS)
        leader = find_process(self._process.pid)
        if leader is not None:
            # Signal only the parent, which signals each component once. A second signal makes the scheduler abandon its
            # orderly shutdown and wait for its workers for ever.
            send_signal(leader, signal.SIGINT)
            wait_for_exit([leader], deadline=deadline)
        terminate(session_processes(), deadline=TERM_SECONDS)
        kill_all(session_processes, deadline=TERM_SECONDS)
        self._process.wait(timeout=TERM_SECONDS)


def session_processes() -> list[ProcessInfo]:
    """Return the other processes of this process's session."""
    mine = os.getsid(0)
    return [each for each in all_processes().values() if each.session == mine and each.pid != os.getpid()]


def session_orphans() -> list[ProcessInfo]:
    """Return the processes of the session whose parent has ended."""
    found = session_processes()
    inside = {os.getpid(), *(each.pid for each in found)}
    return [each for each in found if each.parent not in inside]


def keep(
    command: list[str], state: Path, record: KeeperRecord, stop: threading.Event, options: argparse.Namespace
) -> None:
    """Run `command` and restart it until `stop` is set. The record in `state` says how often, and why."""
    published = write_record(state, record)
    group: AirflowGroup | None = None

    def start() -> AirflowGroup:
        nonlocal record, published, group
        if group is not None:
            record = replace(record, at=time.time(), restarts=record.restarts + 1)
            published, former = write_record(state, record), published
            former.close()
        group = AirflowGroup(
            command,
            state / LOG_FILE,
            components=options.components,
            settle=options.settle,
            log_bytes=options.log_bytes,
        )
        return group

    def on_fault(fault: Fault) -> None:
        nonlocal record
        record = replace(record, reason=fault.cause)
        _say(f"{fault}; restarting it in {backoff.remaining_pause():.0f} s")

    def wait(seconds: float) -> bool:
        # Poll often until all components have started: a wait for Airflow asks what it does.
        starting = group is not None and not group.complete
        return stop.wait(min(seconds, FIRST_POLL) if starting else seconds)

    backoff = RestartBackoff(FIRST_PAUSE, LONGEST_PAUSE, steady=STEADY_SECONDS)
    Supervisor(start, backoff=backoff, stop_deadline=options.deadline, poll=options.poll, on_fault=on_fault).run(wait)


def main() -> int:
    options = _options()
    stop = threading.Event()

    def stop_it(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop_it)
    if os.getsid(0) != os.getpid():
        os.setsid()  # started by hand
    busy = LogBusy("another keeper runs for this installation")
    try:
        with exclusive_lock(options.state / LOCK_FILE, deadline=Deadline.after(LOCK_SECONDS), busy=busy):
            me = current_process()
            record = KeeperRecord(pid=me.pid, start=me.start, address=options.address, at=time.time())
            try:
                keep(options.command, options.state, record, stop, options)
            finally:
                (options.state / RECORD_FILE).unlink(missing_ok=True)
    except LogBusy as error:
        _say(str(error))
        return 1
    return 0


def _say(words: str) -> None:
    sys.stdout.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} keeper: {words}\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="folder of the record, the lock and the log")
    parser.add_argument("--address", default="", help="Airflow's URL, for the record")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds for a clean end before a kill")
    parser.add_argument(
        "--components", type=int, default=0, help="child processes of a complete Airflow; 0: not counted"
    )
    parser.add_argument("--settle", type=float, default=120.0, help="seconds until all components must be there")
    parser.add_argument("--poll", type=float, default=1.0, help="seconds between two polls")
    parser.add_argument("--log-bytes", type=int, default=LOG_BYTES, help="size at which the log is rotated")
    parser.add_argument("command", nargs="+", help="what to keep running")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
