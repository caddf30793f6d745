"""The caller side of a sandbox: a few worker processes, started on demand, reused, and killed if they exceed a limit.

sandbox = Sandbox("millrace.flows.samples")
sandbox.call(request)                 # JSON; raises TooMuchWork, ServiceBusy
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.package import ROOT
from millrace.runtime.sandbox.errors import ServiceBusy, TooMuchWork
from millrace.runtime.sandbox.protocol import FRAME_HEADER, POSITION_BYTES, FrameKind

CALL_SECONDS: Final = 5.0
"""Time that one request may take."""
MEMORY_MIB: Final = 512
ANSWER_BYTES: Final = 16 << 20
MAX_PROCESSES: Final = 2
MAX_QUEUED: Final = 6
"""Requests that may wait for a worker; each blocks a thread of its caller."""
_START_SECONDS: Final = 30.0
_END_SECONDS: Final = 10.0
_WORDS: Final = 500
_PASSED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE")
"""Environment variables that a worker inherits. The others may hold secrets."""


class Sandbox(Closeable):
    """Asks ``python -m module``, which runs :func:`millrace.runtime.sandbox.worker.serve`. Thread-safe."""

    def __init__(
        self,
        module: str,
        *,
        seconds: float = CALL_SECONDS,
        max_processes: int = MAX_PROCESSES,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._module, self._seconds = module, seconds
        self._most = max_processes + max_queued
        self._asking = 0
        self._free = threading.Semaphore(max_processes)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._closed = False

    def call(self, question: Any, on_callback: Callable[[Any], Any] | None = None) -> Any:
        """Run `question` in a worker and return its answer.

        `on_callback` answers what the worker asks meanwhile; that time does not count.
        Raises TooMuchWork, which names the limit, and ServiceBusy if too many requests wait.
        """
        body = pickle.dumps(question)
        with self._turn():
            while True:
                child, used = self._take()
                try:
                    if not used:
                        child.await_ready(Deadline.after(_START_SECONDS))
                    found = child.ask(body, on_callback)
                except _Gone:
                    child.end()
                    if used:  # it reached its idle limit between two requests: take another
                        continue
                    raise ServiceBusy(f"{self._module} ended before it answered") from None
                except BaseException:
                    child.end()
                    raise
                self._give_back(child)
                return found

    def close(self) -> None:
        """End idle workers; a busy one ends after its answer. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.end()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            if self._asking >= self._most:
                raise ServiceBusy(f"{self._most} dry runs or checks of declarations are running: try again")
            self._asking += 1
        try:
            if not self._free.acquire(timeout=_START_SECONDS + self._seconds * self._most):
                raise ServiceBusy("dry runs and checks of declarations take long at the moment: try again")
            try:
                yield
            finally:
                self._free.release()
        finally:
            with self._lock:
                self._asking -= 1

    def _take(self) -> tuple[_Child, bool]:
        """Return a worker, and whether it has served a request before."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return _Child(self._module, self._seconds), False

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        child.end()


class _Gone(Exception):
    """The worker ended on its own before it answered."""


class _Child:
    """A worker process that serves one request at a time."""

    def __init__(self, module: str, seconds: float) -> None:
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._where = os.memfd_create(module)
        command = [sys.executable, "-m", module, "--seconds", str(seconds), "--memory-mib", str(MEMORY_MIB)]
        command += ["--where", str(self._where)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            start_new_session=True,
            pass_fds=[self._where],
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._sink, self._source = self._process.stdin, self._process.stdout
        os.set_blocking(self._sink.fileno(), False)
        self._seconds = seconds

    def await_ready(self, deadline: Deadline) -> None:
        """Wait until the worker has loaded its imports; the start does not count as request time."""
        try:
            self._hear(deadline)
        except TooMuchWork:
            raise ServiceBusy("a process for dry runs and checks of declarations did not start: try again") from None

    def ask(self, body: bytes, reply: Callable[[Any], Any] | None) -> Any:
        deadline = Deadline.after(self._seconds)
        self._say(FrameKind.REQUEST, body, deadline)
        while True:
            kind, found = self._hear(deadline)
            if kind == FrameKind.CALLBACK and reply is not None:
                begun = deadline.clock()
                answer = json.dumps(reply(found)).encode()
                deadline = deadline.extended(deadline.clock() - begun)
                self._say(FrameKind.CALLBACK_RESULT, answer, deadline)
            elif kind == FrameKind.LIMIT:
                limit, words = found
                raise self._over(str(limit)[:_WORDS], str(words)[:_WORDS])
            elif kind == FrameKind.RESULT:
                return found
            else:
                raise RuntimeError(f"error in a sandbox: {str(found)[:_WORDS]}")

    def end(self) -> None:
        """Kill it. Idempotent."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        if not self._source.closed:
            os.close(self._where)
        self._sink.close()
        self._source.close()

    def _say(self, kind: FrameKind, body: bytes, deadline: Deadline) -> None:
        left = memoryview(FRAME_HEADER.pack(kind, len(body)) + body)
        while left:
            self._await(self._sink.fileno(), select.POLLOUT, deadline)
            try:
                left = left[os.write(self._sink.fileno(), left) :]
            except BrokenPipeError:
                raise self._ended() from None
            except BlockingIOError:
                continue

    def _hear(self, deadline: Deadline) -> tuple[FrameKind, Any]:
        kind, size = FRAME_HEADER.unpack(self._exactly(FRAME_HEADER.size, deadline))
        if size > ANSWER_BYTES:
            raise self._over("answer", f"the answer has more than {ANSWER_BYTES >> 20} MiB")
        return FrameKind(kind), json.loads(self._exactly(size, deadline))

    def _exactly(self, size: int, deadline: Deadline) -> bytes:
        found = bytearray()
        while len(found) < size:
            self._await(self._source.fileno(), select.POLLIN, deadline)
            part = os.read(self._source.fileno(), min(size - len(found), 1 << 20))
            if not part:
                raise self._ended()
            found += part
        return bytes(found)

    def _await(self, file: int, event: int, deadline: Deadline) -> None:
        poll = select.poll()
        poll.register(file, event)
        if not poll.poll(1000 * deadline.remaining()):
            raise self._over("time", f"not done within {self._seconds:g} s")

    def _ended(self) -> Exception:
        """Derive from the exit code why the worker closed its pipes."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        if code in (0, -signal.SIGTERM):
            return _Gone()
        if code == -signal.SIGXCPU:
            return self._over("time", f"not done within {self._seconds:g} s")
        if code in (-signal.SIGABRT, -signal.SIGKILL):  # by its allocator, or by the kernel
            return self._over("memory", f"more than {MEMORY_MIB} MiB of memory needed")
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return self._over("depth", "nested too deeply")
        return self._over("crash", f"the process crashed ({code})")

    def _over(self, limit: str, words: str) -> TooMuchWork:
        where = os.pread(self._where, POSITION_BYTES, 0).decode(errors="replace").strip()
        return TooMuchWork(f"{where}: {words}" if where else words, limit=limit, where=where)
