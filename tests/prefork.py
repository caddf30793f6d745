"""What makes the processes of `make test` quick: log servers start by a fork, and no disk is waited for.

A server is a fork of a process that has imported what a server imports. It is a process of its own, as its starter's
command line and environment say: it can be killed, it outlives its starter, and it leaves no zombie. The fork saves the
second of imports, in which tests that start hundreds of servers spend much of their time. Modules that use
`started_as_by_users` start servers as users do, as does every other way to run a test.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millrace.base import failpoint
from millrace.base.package import ROOT
from millrace.rpc import discovery
from millrace.rpc.launch import ServerLaunch

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_spawn = discovery._spawn
SERVER = "millrace.log.server.main"
IMPORTED = (
    "millrace.runtime.arrow_without_pandas",  # first, before an array is made
    "millrace.access.token_file",
    "millrace.base.data_folder",
    "millrace.log.generations.service",
    "millrace.log.rocksmq.service",
    "millrace.log.server.flight",
    "millrace.node.append.server",
    "millrace.runtime.process_setup",
)
"""What a server of the embedded log imports, and no more. Python runs the server's own module as `__main__`."""
_ALLOCATOR = "jemalloc_bg_thd"
"""The thread of Arrow's allocator, which prepares itself for a fork."""


class Prefork:
    """The process that forks, started by the first server of a test run."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def spawn(self, folder: Path, output: Path, launch: ServerLaunch) -> int:
        """Start a server as `millrace.rpc.discovery` does, and return its process id."""
        environment = os.environ | dict(launch.environment)
        if failpoint.VARIABLE in environment:  # read when it is imported
            return _spawn(folder, output, launch)
        request = {
            "arguments": ["--data", str(folder.absolute()), *launch.arguments()],
            "environment": environment,
            "output": str(output.absolute()),
        }
        channel = self._connected()
        channel.sendall(json.dumps(request).encode() + b"\n")
        return int(channel.recv(64))

    def _connected(self) -> socket.socket:
        if self._channel is None:
            self._channel, theirs = socket.socketpair()
            paths = [str(ROOT), str(Path(__file__).parents[1])]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},  # no threads
                cwd="/",
            )
            theirs.close()
            self._channel.settimeout(60)
        return self._channel

    def close(self) -> None:
        """End the process that forks; its servers stay."""
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._process.wait(timeout=15)
            self._channel = self._process = None


def skip_syncs() -> None:
    """Check the files that this process syncs, and do not wait for the disk.

    Only a power loss shows whether a file was synced. Tests of that replace `os.fsync` to note which files were.
    """
    os.fsync = os.fdatasync = _checked


def _checked(file: FileDescriptorLike) -> None:
    os.fstat(file if isinstance(file, int) else file.fileno())


@contextmanager
def servers() -> Iterator[None]:
    """Start this process's log servers by forks while the block runs."""
    prefork = Prefork()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "_spawn", prefork.spawn)
        try:
            yield
        finally:
            prefork.close()


@pytest.fixture(scope="module")
def started_as_by_users() -> Iterator[None]:
    """Servers start as users start them in the tests of a module that names this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "_spawn", _spawn)
        yield


def _threads() -> set[str]:
    """The names of the threads beside this one."""
    others = [each for each in Path("/proc/self/task").iterdir() if each.name != str(os.getpid())]
    return {(each / "comm").read_text().strip() for each in others}


def _serve(channel: socket.socket) -> None:
    for name in IMPORTED:
        import_module(name)
    skip_syncs()
    gc.collect()
    gc.freeze()
    for line in channel.makefile("rb"):
        assert _threads() == {_ALLOCATOR}, "a fork would leave other threads' locks taken"
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            # The child of a child that has ended belongs to init, as a server's does.
            pid = os.fork()
            if pid:
                os.write(write, b"%d" % pid)
                os._exit(0)
            channel.close()
            os.close(read)
            os.close(write)
            _become_server(json.loads(line))
        os.waitpid(middle, 0)
        channel.sendall(os.read(read, 64))
        os.close(read)
        os.close(write)


def _become_server(request: dict[str, object]) -> None:
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        output = os.open(str(request["output"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        sys.argv[1:] = request["arguments"]  # type: ignore[assignment]
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
