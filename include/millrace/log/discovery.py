"""How the server of a log folder is found, started and recognised as dead: `server.json` and two lock files.

`server.json` (mode 0600: whoever can read it may use the log) names the address, the process and a token generated at each
start. It counts only while that very process lives: the process id with its start time since boot, so that neither a reused
id nor a step of the clock deceives. `server.lock` is held by the server for its lifetime, so that there is never a second
one, whatever `server.json` says; `server.starting.lock` lets one of several starters start.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

import psutil

import millrace
from millrace.errors import LogBusy, LogUnavailable
from millrace.log.server_wire import error_from_bytes

RECORD_FILE: Final = "server.json"
LOCK_FILE: Final = "server.lock"
STARTING_FILE: Final = "server.starting.lock"
OUTPUT_FILE: Final = "server.log"
STARTUP_ERROR: Final = "millrace-log-server cannot start: "
"""Begins the line by which a server that cannot start tells its starter the typed error."""

ELSEWHERE: Final = 0
"""The process id of a server on another host."""

_POLL: Final = 0.01
_SAME_START: Final = 2.0


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """One running server. `started` is in seconds since boot, `instance` random for each start."""

    address: str
    pid: int
    started: float
    instance: str
    token: str
    roots: str = ""
    """File with the certificates (PEM) by which its TLS is trusted; empty: no TLS, or the system's own."""
    tls_name: str = ""
    """The name to look for in its certificate; empty: the host of its address."""

    @classmethod
    def elsewhere(cls, address: str, token: str, *, roots: str = "", tls_name: str = "") -> ServerRecord:
        """A server on another host, of which only this is known: it cannot be looked up, started or watched from here."""
        return cls(address, ELSEWHERE, 0.0, "", token, roots, tls_name)

    @classmethod
    def of_this_process(cls, address: str) -> ServerRecord:
        """A record of this process with a new instance id and token."""
        pid = os.getpid()
        started = _started(pid)
        assert started is not None, "this process lives"
        return cls(address, pid, started, secrets.token_hex(8), secrets.token_urlsafe(32))

    def alive(self) -> bool:
        """Whether that very process still runs; of a server on another host that is not known, and assumed."""
        if self.pid == ELSEWHERE:
            return True
        started = _started(self.pid)
        return started is not None and abs(started - self.started) < _SAME_START


@dataclass(frozen=True, slots=True)
class ServerLaunch:
    """How a client starts a server; one that runs already is taken as it is."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: a free one."""
    idle_timeout: float | None = None
    """Seconds without work until it stops by itself; None: never."""
    tls: tuple[str, str, str] | None = None
    """Files of its certificate chain and key (PEM), and the name in the certificate; None: no TLS."""
    backend: str = ""
    """URL of the log that it serves (millrace.log.registry); empty: the embedded one in the folder."""
    connections: int | None = None
    """Connections that it takes (millrace.log.server_connections); None: as many as is usual."""
    streams: int | None = None
    """Streams of appends that it takes."""
    settings: tuple[tuple[str, str], ...] = ()
    """Of the backend (RocksMQSettings for the embedded log), by name."""
    extensions: tuple[str, ...] = ()
    """What else it hosts: `module:function`, each of which takes the LogService and the folder and returns an Extension."""

    def to_json(self) -> str:
        """As one text, for a process that may have to start the server anew: see :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerLaunch:
        """Inverse of :meth:`to_json`."""
        document = json.loads(text)
        pairs = [(str(name), str(value)) for name, value in document["settings"]]
        tls = document["tls"]
        return cls(
            **document
            | {
                "tls": None if tls is None else tuple(tls),
                "settings": tuple(pairs),
                "extensions": tuple(document["extensions"]),
            }
        )

    def arguments(self) -> list[str]:
        """As the server's command line takes them."""
        given = [f"--host={self.host}", f"--port={self.port}"]
        if self.idle_timeout is not None:
            given.append(f"--idle-timeout={self.idle_timeout}")
        if self.tls is not None:
            given += [f"--tls-{part}={value}" for part, value in zip(("cert", "key", "name"), self.tls, strict=True)]
        if self.backend:
            given.append(f"--backend={self.backend}")
        if self.connections is not None:
            given.append(f"--connections={self.connections}")
        if self.streams is not None:
            given.append(f"--streams={self.streams}")
        given += [f"--set={name}={value}" for name, value in self.settings]
        given += [f"--extension={extension}" for extension in self.extensions]
        return given


class Liveness:
    """Tells at once, and for a microsecond, whether a record's process still runs."""

    def __init__(self, record: ServerRecord) -> None:
        self._record = record
        self._descriptor = -1
        if record.pid == ELSEWHERE:
            return
        try:
            self._descriptor = os.pidfd_open(record.pid)
        except (OSError, AttributeError):
            pass  # gone already, or a system without process descriptors: the record itself is asked each time
        if not record.alive():
            self.close()  # the descriptor may be another process's that got the id

    def lives(self) -> bool:
        """Whether the process runs. A zombie does not."""
        descriptor = self._descriptor
        if descriptor < 0:
            return self._record.alive()
        ended = select.poll()  # one poll object serves one thread at a time
        ended.register(descriptor, select.POLLIN)
        return not ended.poll(0)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _started(pid: int) -> float | None:
    """When a process started, in seconds since boot; None where it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return None
            return float(process.create_time() - psutil.boot_time())
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return None


def write_record(folder: Path, record: ServerRecord) -> None:
    """Publish `record`, whole or not at all, readable by the owner alone. The caller holds `server.lock`."""
    scratch = folder / f".{RECORD_FILE}.writing"
    scratch.unlink(missing_ok=True)  # of a server that was killed right here
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(record), file)
    scratch.replace(folder / RECORD_FILE)


def read_record(folder: Path) -> ServerRecord | None:
    """The record in `folder`, of a living server or a dead one; None where there is none that can be read."""
    try:
        document = json.loads((folder / RECORD_FILE).read_text())
        return ServerRecord(
            address=str(document["address"]),
            pid=int(document["pid"]),
            started=float(document["started"]),
            instance=str(document["instance"]),
            token=str(document["token"]),
            roots=str(document.get("roots", "")),
            tls_name=str(document.get("tls_name", "")),
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None


def remove_record(folder: Path, record: ServerRecord) -> None:
    """Take `record` back, unless another server has published its own since."""
    if read_record(folder) == record:
        (folder / RECORD_FILE).unlink(missing_ok=True)


@contextmanager
def held(path: Path, *, deadline: float) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it with the process. Raises LogBusy at `deadline` (monotonic)."""
    file: IO[bytes] = path.open("ab")
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LogBusy(f"another process holds {path}: it serves or starts this log") from None
                time.sleep(_POLL)
        yield


def locate(folder: Path, *, start: bool, deadline: float, launch: ServerLaunch | None = None) -> ServerRecord:
    """The record of the living server of `folder`; where there is none, starts one or, without `start`, raises LogUnavailable.

    `deadline` is a monotonic time. Raises what kept a started server from running (LogCorrupted, ...).
    """
    record = read_record(folder)
    if record is not None and record.alive():
        return record
    if not start:
        raise LogUnavailable(
            f"no log server runs for {folder}: start it with python -m millrace.log.server --data {folder}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder / STARTING_FILE, deadline=deadline):
        record = read_record(folder)
        if record is not None and record.alive():
            return record
        return _start(folder, deadline=deadline, launch=launch or ServerLaunch())


def _start(folder: Path, *, deadline: float, launch: ServerLaunch) -> ServerRecord:
    output = folder / OUTPUT_FILE
    with output.open("ab") as file:
        offset = file.tell()
    pid = _spawn(folder, output, launch)
    while True:
        record = read_record(folder)
        if record is not None and record.alive():
            return record
        if _started(pid) is None:
            raise _startup_failure(output, offset)
        if time.monotonic() >= deadline:
            raise LogUnavailable(f"the log server (process {pid}) is not up yet; it writes to {output}")
        time.sleep(_POLL)


def _spawn(folder: Path, output: Path, launch: ServerLaunch) -> int:
    """Start a server in a session of its own, a child of init and not of ours: it outlives us and leaves us no zombie."""
    command = [sys.executable, "-P", "-m", "millrace.log.server", "--data", str(folder.absolute()), *launch.arguments()]
    package_root = str(Path(millrace.__file__).parent.parent.absolute())
    inherited = os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package_root, inherited)))}
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
    return LogUnavailable(f"the log server ended while it started; {output} ends with: {tail}")
