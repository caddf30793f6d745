"""The worker side of a sandbox: serve requests from standard input until it closes or stays idle.

The worker has no deadline of its own: the caller kills it. If the caller is gone, the kernel's CPU limit ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import select
import sys
from collections.abc import Callable
from typing import Any, Final

from millrace.runtime.sandbox.errors import TooMuchWork
from millrace.runtime.sandbox.protocol import FRAME_HEADER, POSITION_BYTES, FrameKind

IDLE_SECONDS: Final = 60.0
_GRACE_SECONDS: Final = 2


class CallerConnection:
    """The connection to the caller while a request is served."""

    def __init__(self, source: int, sink: int, where: int) -> None:
        self._source, self._sink, self._where = source, sink, where

    def report_position(self, where: str) -> None:
        """Record the position of the work; an error of the sandbox names it."""
        os.pwrite(self._where, where.encode(errors="replace")[:POSITION_BYTES].ljust(POSITION_BYTES), 0)

    def ask_caller(self, what: Any) -> Any:
        """Ask the caller about `what` and return its answer. The deadline does not run meanwhile."""
        self.send(FrameKind.CALLBACK, what)
        return json.loads(self.receive(FrameKind.CALLBACK_RESULT))

    def send(self, kind: FrameKind, value: Any) -> None:
        body = json.dumps(value).encode()
        left = memoryview(FRAME_HEADER.pack(kind, len(body)) + body)
        while left:
            left = left[os.write(self._sink, left) :]

    def receive(self, kind: FrameKind) -> bytes:
        """Return the body of the next frame. Exits the process at the end of the input."""
        found, size = FRAME_HEADER.unpack(self._exactly(FRAME_HEADER.size))
        assert found == kind, f"{FrameKind(found).name} where {kind.name} was to come"
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._source, min(size, 1 << 20))
            if not part:
                sys.exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def serve(handle: Callable[[Any, CallerConnection], Any]) -> None:
    """Serve requests with `handle`, which returns JSON, within the CPU time and memory that the command line sets.

    `handle` raises TooMuchWork for a limit of its own.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True, help="CPU seconds that one request may take")
    parser.add_argument("--memory-mib", type=int, required=True, help="memory limit of this process")
    parser.add_argument("--where", type=int, required=True, help="an open file that holds the position of the work")
    options = parser.parse_args()
    seconds, memory_mib = options.seconds, options.memory_mib
    # Frames go to a copy of stdout, and stdout to stderr: a library that prints must not break a frame.
    sink = os.dup(1)
    os.dup2(2, 1)
    talk = CallerConnection(0, sink, options.where)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))
    talk.send(FrameKind.READY, None)
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        question = pickle.loads(talk.receive(FrameKind.REQUEST))
        spent = resource.getrusage(resource.RUSAGE_SELF)
        until = int(spent.ru_utime + spent.ru_stime + seconds) + _GRACE_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        talk.report_position("")
        try:
            talk.send(FrameKind.RESULT, handle(question, talk))
        except TooMuchWork as error:
            talk.send(FrameKind.LIMIT, [error.limit, str(error)])
        except MemoryError:
            talk.send(FrameKind.LIMIT, ["memory", f"more than {memory_mib} MiB of memory needed"])
        except Exception as error:
            talk.send(FrameKind.FAILURE, f"{type(error).__name__}: {error}"[:2000])
