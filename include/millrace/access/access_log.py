"""The access log of the data plane: who read or wrote what, when, how much, and whether it was allowed.

A line is one append, one read or one denied call, as a JSON object (docs/access.md). Reads and appends are sampled;
denied calls are always logged. Lines go through a bounded queue to one thread that writes them. A line that finds the
queue full, or the disk, is dropped and counted: no call waits for its line. Files are rotated, and the oldest removed.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.errors import MillraceError, PermissionDenied
from millrace.base.settings import Settings

QUEUED: Final = 4096
"""Lines that wait to be written; more are dropped and counted."""
_LONGEST: Final = 255
"""Characters of a name in a line."""
_ANONYMOUS: Final = "-"
"""The principal of a call without a valid token."""
_CLOSE_SECONDS: Final = 5.0

Access = Literal["read", "write", "call"]
Result = Literal["written", "dropped"]
Pieces = Iterator[tuple[pa.RecordBatch, bytes]]

_log: Final = logging.getLogger(__name__)


class ReadStream(NamedTuple):
    """The answer to a read: its schema, and its batches with their metadata."""

    schema: pa.Schema
    pieces: Pieces


class AccessLog(Closeable):
    """Writes the access log of one server process. Thread-safe; no method waits or raises."""

    def __init__(
        self,
        path: Path,
        *,
        sample: float,
        file_bytes: int,
        files: int,
        queued: int = QUEUED,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Start the thread that writes to `path`.

        Of reads and appends, the share `sample` has a line. A file is rotated before it exceeds `file_bytes`. `files`
        files are kept at most, the current one included.
        """
        self.path = path
        self.counts = Counter[Result]()
        """Number of lines by result."""
        self.on_line: Callable[[Result], None] = lambda result: None
        """Called with the result of each line."""
        self._sample = sample
        self._file_bytes, self._files = file_bytes, files
        self._chance = chance
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(queued)
        self._file: IO[bytes] | None = None
        self._size = 0
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, settings: Settings) -> AccessLog:
        """Return the access log of this process, as the settings say."""
        return cls(
            settings.access_log_path,
            sample=settings.access_log_sample,
            file_bytes=settings.access_log_bytes,
            files=settings.access_log_files,
        )

    def read(self, principal: str, call: str, on: str, pieces: Pieces) -> Pieces:
        """Return the pieces of a read, which has a line when it ends, if it is sampled."""
        return self._counted(principal, call, on, pieces) if self._is_sampled() else pieces

    def _counted(self, principal: str, call: str, on: str, pieces: Pieces) -> Pieces:
        rows = size = 0
        outcome, begun = "ok", time.monotonic()
        try:
            for batch, metadata in pieces:
                rows += batch.num_rows
                size += batch.nbytes
                yield batch, metadata
        except GeneratorExit:
            outcome = "abandoned"
            raise
        except Exception as error:
            outcome = _code(error)
            raise
        finally:
            if isinstance(pieces, Generator):
                pieces.close()
            self._put("read", principal, call, on, outcome, begun, rows, size, self._sample)

    @contextmanager
    def writing(
        self, principal: str, call: str, on: str, measure: Callable[[], tuple[int, int]], *, alone: bool = True
    ) -> Iterator[None]:
        """Enclose an append, which has a line if it is sampled or denied. `measure` returns its rows and bytes.

        Without `alone`, several appends are merged; if one is refused, each comes again separately.
        """
        sampled, begun, outcome = self._is_sampled(), time.monotonic(), "ok"
        denied = False
        try:
            yield
        except Exception as error:
            outcome, denied = _code(error), isinstance(error, PermissionDenied) and alone
            sampled = sampled and alone
            raise
        finally:
            if sampled or denied:
                rows, size = measure()
                self._put("write", principal, call, on, outcome, begun, rows, size, 1.0 if denied else self._sample)

    def denied(self, principal: str, call: str, on: str, code: str = PermissionDenied.code) -> None:
        """Write the line of a denied call. An empty `principal` is a caller without a valid token."""
        self._put("call", principal or _ANONYMOUS, call, on, code, time.monotonic(), 0, 0, 1.0)

    def _is_sampled(self) -> bool:
        return self._chance() < self._sample

    def _put(
        self,
        access: Access,
        principal: str,
        call: str,
        on: str,
        outcome: str,
        begun: float,
        rows: int,
        size: int,
        sample: float,
    ) -> None:
        line = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "access": access,
            "principal": principal[:_LONGEST],
            "call": call[:_LONGEST],
            "on": on[:_LONGEST],
            "rows": rows,
            "bytes": size,
            "outcome": outcome,
            "ms": round(1000 * (time.monotonic() - begun)),
            "sample": sample,
        }
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._count("dropped")

    def _count(self, result: Result) -> None:
        self.counts[result] += 1
        self.on_line(result)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            except OSError as error:
                if not self._failed:  # once, not for each line that a full disk refuses
                    _log.warning("cannot write the access log %s: %s", self.path, error)
                self._failed = True
                self._close_file()
                self._count("dropped")
            else:
                self._failed = False
                self._count("written")
        self._close_file()

    def _write(self, line: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            self._file = os.fdopen(descriptor, "ab", buffering=0)
            self._size = os.fstat(descriptor).st_size
            if self._size and os.pread(descriptor, 1, self._size - 1) != b"\n":
                line = b"\n" + line  # the last line was cut off by a crash
        if self._size and self._size + len(line) > self._file_bytes:
            self._close_file()
            self._rotate()
            self._write(line)
            return
        written = 0
        try:
            while written < len(line):  # a disk that is nearly full takes a part of it
                written += self._file.write(line[written:])
        except OSError:
            if written:
                os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += written

    def _rotate(self) -> None:
        """Renumber the files, the newest first; the last one is replaced."""
        if self._files == 1:
            self.path.unlink()
        for number in range(self._files - 1, 0, -1):
            newer = self._rotated(number - 1)
            if newer.exists():
                newer.replace(self._rotated(number))

    def _rotated(self, number: int) -> Path:
        return self.path.with_suffix(f".{number}{self.path.suffix}") if number else self.path

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        """Write what waits, and stop. Idempotent."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=_CLOSE_SECONDS)
            except queue.Full:
                return  # the disk hangs: the thread is a daemon
            self._thread.join(_CLOSE_SECONDS)


def _code(error: Exception) -> str:
    return error.code if isinstance(error, MillraceError) else type(error).__name__
