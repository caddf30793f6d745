"""What a process apart runs: it answers questions from its standard input until that ends, or nobody has asked anything for a while.

It knows no deadline: who asked kills it. Where that one is gone, the kernel ends it by its CPU time.
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
    """With who asked, while a question is worked on."""

    def __init__(self, source: int, sink: int, where: int) -> None:
        self._source, self._sink, self._where = source, sink, where

    def report_position(self, where: str) -> None:
        """Say where the work is: it is named where it ends there."""
        os.pwrite(self._where, where.encode(errors="replace")[:POSITION_BYTES].ljust(POSITION_BYTES), 0)

    def ask_caller(self, what: Any) -> Any:
        """What who asked knows of `what`. The deadline stands still meanwhile."""
        self.send(FrameKind.CALLBACK, what)
        return json.loads(self.receive(FrameKind.CALLBACK_RESULT))

    def send(self, kind: FrameKind, value: Any) -> None:
        body = json.dumps(value).encode()
        left = memoryview(FRAME_HEADER.pack(kind, len(body)) + body)
        while left:
            left = left[os.write(self._sink, left) :]

    def receive(self, kind: FrameKind) -> bytes:
        """The body of the next frame. Ends this process where there is none any more."""
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
    """Answer questions by `handle`, whose answers are JSON; within the CPU time and the memory that the command line says. `handle` raises
    TooMuchWork for a limit of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True, help="of CPU time that one answer takes at most")
    parser.add_argument("--memory-mib", type=int, required=True, help="that this process may have")
    parser.add_argument("--where", type=int, required=True, help="an open file that says where the work is")
    options = parser.parse_args()
    seconds, memory_mib = options.seconds, options.memory_mib
    # A copy, and nothing in its place: what a library prints is no frame.
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
            talk.send(FrameKind.LIMIT, ["memory", f"it needs more than {memory_mib} MiB of memory"])
        except Exception as error:
            talk.send(FrameKind.FAILURE, f"{type(error).__name__}: {error}"[:2000])
