"""A broker as a process: start it within a deadline, find it again by its folder, stop or kill it, restart it.

    <data>/broker.json   its ports, which stay the same over restarts, and the id of its process
    <data>/broker.log    its output
    <data>/tmp           temporary files of a Java server

A subclass defines what its server needs: files, command, and when it is ready. This class guarantees that a server
never outlives the process that started it: the kernel kills it with its parent.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from millrace.base.settings import Settings
from millrace.runtime.child_processes import ChildProcess, JobFailed
from millrace.runtime.java import find_java

RECORD_FILE: Final = "broker.json"
LOG_FILE: Final = "broker.log"
TEMPORARY: Final = "tmp"
LOOPBACK: Final = "127.0.0.1"
START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 30.0
_STARTS: Final = 3
_TIED: Final = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit('the starter is gone')\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
"""Makes the kernel kill this process when its parent dies (PR_SET_PDEATHSIG survives execve); becomes the server."""


class LocalServer(ABC):
    """One server of one folder. Not thread-safe. The server dies with the thread that starts it."""

    port_names: ClassVar[tuple[str, ...]]
    """Names of the ports that it listens on. The first one, ``client``, accepts connections once the server is up."""
    heap: ClassVar[str]
    """The default size of Java's heap; "" for a server that is not a Java program."""

    def __init__(
        self,
        data: Path,
        *,
        settings: Settings | None = None,
        heap: str = "",
        properties: Mapping[str, str] | None = None,
        host: str = LOOPBACK,
    ) -> None:
        """Describe the server of the folder; `start` starts it.

        `settings` name the cache of jars, `heap` is the size of Java's heap, and `properties` override the broker's
        configuration. `host` is the address on which it listens, and which clients use.
        """
        self.data = data.absolute()
        self.host = host
        self._settings = settings or Settings.load()
        self._heap = heap or self.heap
        self._properties = dict(properties or {})
        self.port: dict[str, int] = {}
        self._job: ChildProcess | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Its address for the setting `log` (millrace.log.registry) or `meta_store`."""

    @abstractmethod
    def prepare(self) -> list[str]:
        """Write the server's files into `data`, for the ports in `port`, and return the command that runs it."""

    @property
    def client_environment(self) -> dict[str, str]:
        """The login of clients, as environment variables of Millrace's processes; empty if it accepts everybody."""
        return {}

    @property
    def server_environment(self) -> dict[str, str]:
        """The server's environment variables: secrets, which a command line would show."""
        return {}

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"{self.host}:{self.port['client']}"

    def ready(self) -> bool:
        """Return whether it serves requests."""
        return is_listening(self.port[self.port_names[0]], self.host)

    @property
    def pid(self) -> int:
        """The id of the running process. Raises JobFailed if none runs."""
        if self._job is None:
            raise JobFailed(f"the broker of {self.data} is not running: start it")
        return self._job.pid

    def running(self) -> bool:
        return self._job is not None and self._job.running()

    def start(self, *, deadline: float = START_SECONDS) -> Self:
        """Start it over the content of `data`, on the ports that it had before.

        Raises JobFailed, DeadlineExceeded, InvalidSettings.
        """
        self.data.mkdir(parents=True, exist_ok=True)
        known = self._recorded()
        for attempt in range(_STARTS):
            self.port = known or dict(zip(self.port_names, free_ports(len(self.port_names)), strict=True))
            try:
                self._start(deadline)
                return self
            except JobFailed as error:
                # Another process may have taken a port since free_ports() looked.
                if known or attempt + 1 == _STARTS or "address already in use" not in str(error).lower():
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _start(self, deadline: float) -> None:
        command = self.prepare()
        tied = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
        job = ChildProcess(tied, log_file=self.data / LOG_FILE, env=self.server_environment)
        self._job = job
        try:
            job.wait_ready(self.ready, deadline=deadline)
        except BaseException:
            self.kill()
            raise
        record = {"ports": self.port, "pid": job.pid, "url": self.url}
        (self.data / RECORD_FILE).write_text(json.dumps(record) + "\n", encoding="utf-8")

    def stop(self, *, deadline: float = STOP_SECONDS) -> None:
        """Stop it cleanly; SIGKILL after `deadline` seconds. Idempotent."""
        job, self._job = self._job, None
        if job is not None:
            job.stop(deadline=deadline)

    def kill(self) -> None:
        """Send SIGKILL. The server can be started again over its data. Idempotent."""
        job, self._job = self._job, None
        if job is not None:
            job.kill()

    def tail(self) -> str:
        """Return the last lines of its output."""
        path = self.data / LOG_FILE
        return "\n".join(path.read_text(errors="replace").splitlines()[-30:]) if path.exists() else ""

    def __enter__(self) -> Self:
        return self if self.running() else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _recorded(self) -> dict[str, int] | None:
        try:
            record: dict[str, Any] = json.loads((self.data / RECORD_FILE).read_text(encoding="utf-8"))
            return {name: int(record["ports"][name]) for name in self.port_names}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None


def java_command(
    classpath: Sequence[str], *, heap: str, main: str, temporary: Path, options: Sequence[str] = ()
) -> list[str]:
    """Return the command of a small Java server, and empty the folder `temporary`, in which it puts its libraries.

    A server that is killed leaves them, and the next start removes them.
    """
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    options = [f"-Djava.io.tmpdir={temporary}", *options]
    # One compiler tier and the serial collector: a broker on a test machine starts sooner and needs fewer threads.
    small = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Xmx{heap}", "-XX:+ExitOnOutOfMemoryError"]
    return [str(find_java() / "bin" / "java"), *small, *options, "-cp", os.pathsep.join(classpath), main]


def free_ports(count: int) -> list[int]:
    """Return `count` unused ports of the loopback interface."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def is_listening(port: int, host: str = LOOPBACK) -> bool:
    """Return whether somebody listens on a port of `host`."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False
