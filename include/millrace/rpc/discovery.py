"""Discovery of a log folder's server: how it is found, started and recognized as dead.

It uses `server.json` and two lock files.

`server.json` (mode 0600: its readers may use the log) has the address, the process and a token that is generated at
each start. It is valid only while that process locks the file (millrace.base.file_lock), so a copied folder, a reused
process id or a clock step cannot mislead. The server holds `server.lock` for its lifetime, so there is never a second
one, whatever `server.json` says. `server.starting.lock` serializes starters.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import DataFolderCopied, LogBusy, LogUnavailable
from millrace.base.file_lock import LockedFile, exclusive_lock, is_locked, read_locked_file
from millrace.base.files import make_folder
from millrace.base.package import ROOT
from millrace.base.process import current_process, find_process, has_open_files
from millrace.rpc.launch import ServerLaunch
from millrace.rpc.wire import error_from_bytes

RECORD_FILE: Final = "server.json"
LOCK_FILE: Final = "server.lock"
STARTING_FILE: Final = "server.starting.lock"
OUTPUT_FILE: Final = "server.log"
STARTUP_ERROR: Final = "millrace-log-server cannot start: "
"""Prefix of the line by which a server that cannot start reports the typed error to its starter."""

REMOTE_PID: Final = 0
"""The process id of a server on another host."""

_POLL: Final = 0.01
_SAME_START: Final = 2.0


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """One running server. `started` is in seconds since boot; `instance` is random for each start."""

    address: str
    pid: int
    started: float
    instance: str
    token: str
    roots: str = ""
    """File with trusted certificates (PEM) for TLS; empty: no TLS, or the system's certificates."""
    tls_name: str = ""
    """The name to expect in its certificate; empty: the host of its address."""
    holds: bool = False
    """Whether the server locks `server.json` itself; servers of earlier builds lock only `server.lock`."""

    @classmethod
    def remote(cls, address: str, token: str, *, roots: str = "", tls_name: str = "") -> ServerRecord:
        """Make the record of a server on another host, which cannot be looked up, started or watched from here."""
        return cls(address, REMOTE_PID, 0.0, "", token, roots, tls_name)

    @classmethod
    def of_this_process(cls, address: str) -> ServerRecord:
        """Make a record of this process with a new instance id and token."""
        me = current_process()
        return cls(address, me.pid, me.seconds_since_boot, secrets.token_hex(8), secrets.token_urlsafe(32), holds=True)

    def alive(self) -> bool:
        """Return whether that process still runs; assumed for a server on another host."""
        if self.pid == REMOTE_PID:
            return True
        found = find_process(self.pid)
        return found is not None and abs(found.seconds_since_boot - self.started) < _SAME_START


class Liveness:
    """Checks within a microsecond whether a record's process still runs."""

    def __init__(self, record: ServerRecord) -> None:
        self._record = record
        self._descriptor = -1
        if record.pid == REMOTE_PID:
            return
        try:
            self._descriptor = os.pidfd_open(record.pid)
        except (OSError, AttributeError):
            pass  # gone already, or no pidfd support: the record is checked on each call
        if not record.alive():
            self.close()  # the descriptor may belong to another process with the same id

    def is_alive(self) -> bool:
        """Return whether the process runs. A zombie does not."""
        descriptor = self._descriptor
        if descriptor < 0:
            return self._record.alive()
        ended = select.poll()  # one poll object serves one thread at a time
        ended.register(descriptor, select.POLLIN)
        return not ended.poll(0)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def write_record(folder: Path, record: ServerRecord) -> LockedFile:
    """Publish `record`, readable by the owner only, while the returned object exists.

    The caller holds `server.lock`.
    """
    return LockedFile(folder / RECORD_FILE, asdict(record))


def read_record(folder: Path) -> ServerRecord | None:
    """Return the record in `folder`, of a live or dead server; None if there is no readable one."""
    return _read(folder)[0]


def _read(folder: Path) -> tuple[ServerRecord | None, bool]:
    """Return the record, and whether a process locks it."""
    try:
        data, held_now = read_locked_file(folder / RECORD_FILE)
        document = json.loads(data)
        record = ServerRecord(
            address=str(document["address"]),
            pid=int(document["pid"]),
            started=float(document["started"]),
            instance=str(document["instance"]),
            token=str(document["token"]),
            roots=str(document.get("roots", "")),
            tls_name=str(document.get("tls_name", "")),
            holds=bool(document.get("holds", False)),
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None, False
    return record, held_now


def running_server(folder: Path) -> ServerRecord | None:
    """Return the record of the server that runs for `folder`, or None.

    Raises DataFolderCopied if the record names a live process that serves another folder, of which this one is a copy.
    """
    while True:
        record, proven = _read(folder)
        if record is None or not record.alive():
            return None
        if proven or (not record.holds and is_locked(folder / LOCK_FILE)):
            return record
        if _read(folder)[0] != record:
            continue  # it shut down meanwhile, or another one started
        if not has_open_files(record.pid):
            return None  # it is exiting: its files are closed, and its process id is freed next
        raise DataFolderCopied(
            f"{folder} is a copy: its {RECORD_FILE} names the log server of the original (process {record.pid}), which"
            " runs. Remove"
            f" {folder / RECORD_FILE} to use the copy on its own. A copy made while the original was being written may"
            " be"
            " torn: `millrace operations backup` makes a consistent one"
        )


def await_record(folder: Path, *, seconds: float) -> ServerRecord | None:
    """Return the record of the live server; None if no process locks the folder.

    If a process locks it and `server.json` is missing, wait up to `seconds` for the server to write it again. Starts
    and creates nothing.

    Raises LogBusy if the file is still missing, DataFolderCopied.
    """
    if (found := running_server(folder)) is not None or not is_locked(folder / LOCK_FILE):
        return found
    if (
        found := poll_until(lambda: running_server(folder), Deadline.after(seconds), interval=_POLL)
    ) is None and is_locked(folder / LOCK_FILE):
        raise LogBusy(
            f"a process holds {folder / LOCK_FILE}, but {RECORD_FILE} does not name it: find it (fuser"
            f" {folder / LOCK_FILE}) and stop it"
        )
    return found


def remove_record(folder: Path, record: ServerRecord) -> None:
    """Remove `record`, unless another server has published its own since."""
    if read_record(folder) == record:
        (folder / RECORD_FILE).unlink(missing_ok=True)


def find_or_start(folder: Path, *, start: bool, deadline: Deadline, launch: ServerLaunch | None = None) -> ServerRecord:
    """Return the record of the live server of `folder`; start one if there is none and `start` is True.

    Raises LogUnavailable if there is none and `start` is False. Raises the error that kept a started server from
    running (LogCorrupted and others); DataFolderCopied.
    """
    record = running_server(folder)
    if record is not None:
        return record
    if not start:
        raise LogUnavailable(
            f"no log server runs for {folder}: start it with python -m millrace.log.server.main --data {folder}"
        )
    try:
        make_folder(folder)
        with exclusive_lock(folder / STARTING_FILE, deadline=deadline):
            record = running_server(folder)
            if record is not None:
                return record
            return _start(folder, deadline=deadline, launch=launch or ServerLaunch())
    except OSError as error:  # somebody removes the folder, or the disk is full
        raise LogUnavailable(f"no log server can be started in {folder}: {error}") from error


def _start(folder: Path, *, deadline: Deadline, launch: ServerLaunch) -> ServerRecord:
    output = folder / OUTPUT_FILE
    with output.open("ab") as file:
        offset = file.tell()
    pid = _spawn(folder, output, launch)
    while True:
        record = running_server(folder)
        if record is not None:
            return record
        if find_process(pid) is None:
            raise _startup_failure(output, offset)
        if not deadline.pause(_POLL):
            raise LogUnavailable(f"the log server (process {pid}) is not up yet; it writes to {output}")


def _spawn(folder: Path, output: Path, launch: ServerLaunch) -> int:
    """Start a server in its own session, as a child of init: it outlives this process and leaves it no zombie."""
    command = [
        os.path.abspath(sys.executable),  # relative in a task of Spark with a packed environment
        "-P",
        "-m",
        "millrace.log.server.main",
        "--data",
        str(folder.absolute()),
        *launch.arguments(),
    ]
    package_root = str(ROOT)
    inherited = os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package_root, inherited)))}
    environment |= dict(launch.environment)
    shell = subprocess.run(
        ["/bin/sh", "-c", '"$@" </dev/null >>"$0" 2>&1 & echo $!', str(output.absolute()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
        cwd="/",
        start_new_session=True,
        check=True,
        timeout=10,
    )
    return int(shell.stdout)


def _startup_failure(output: Path, offset: int) -> Exception:
    with output.open("rb") as file:
        file.seek(offset)
        lines = file.read(1 << 20).decode(errors="replace").splitlines()
    for line in reversed(lines):
        if line.startswith(STARTUP_ERROR):
            return error_from_bytes(line.removeprefix(STARTUP_ERROR).encode())
    tail = " | ".join(lines[-3:])
    return LogUnavailable(f"the log server exited during startup; {output} ends with: {tail}")
