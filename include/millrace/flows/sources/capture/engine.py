"""Debezium's embedded engine as a child process, and the frames between the two (java/CaptureEngine.java).

The engine sends a batch, waits for `acknowledge`, and only then confirms the position to the database and continues. A
batch without acknowledgement is repeated after the next start. The process ends with its standard input, so it never
outlives the process that started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import as_file, files
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from millrace.base.closeable import Closeable
from millrace.base.errors import CaptureEnded
from millrace.base.settings import Settings
from millrace.runtime.jars import Jar, exit_code, locked_jars, parse_lock
from millrace.runtime.java import find_java

_PACKAGE: Final = "millrace.flows.sources.capture"
_HEADER: Final = struct.Struct(">cI")
_MAX_BYTES: Final = 1 << 30
_STOP_SECONDS: Final = 15.0
# A thread that runs out of memory ends alone, and the engine would be silent forever.
_JVM: Final = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-Duser.timezone=UTC",  # drivers convert dates and times in the JVM's zone, where some hours may not exist
)
_ENVIRONMENT: Final = (
    "PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "JAVA_HOME", "JAVA_TOOL_OPTIONS",
    "JDK_JAVA_OPTIONS",
)  # fmt: skip
"""Variables of the worker's environment that the engine gets. Others may hold passwords."""
_TERMINATING: Final = b"Terminating due to java.lang.OutOfMemoryError"
TOO_LARGE: Final = "rows are too large for its memory"
"""The text in the error of an engine that ran out of memory. The next one reads fewer rows of a snapshot at once."""
_QUEUE_BYTES: Final = 32 << 20
"""The most bytes of events in the engine's queue. Each is in the heap several times while it is written."""
_LOG_BYTES: Final = 16 << 20
"""The most bytes of the engine's log. The previous log is retained once."""


class Event(msgspec.Struct, gc=False, rename={"table": "t", "operation": "o", "key": "k", "after": "a", "before": "b"}):
    """A change, or a mark between changes."""

    operation: str
    """c, u, d, r (snapshot), t (truncate); BEGIN, END of a transaction; ddl, heartbeat, tombstone, notification."""
    table: str = ""
    key: msgspec.Raw = msgspec.Raw()
    after: msgspec.Raw = msgspec.Raw()
    before: msgspec.Raw = msgspec.Raw()
    snapshot: str | None = msgspec.field(name="s", default=None)
    milliseconds: int = msgspec.field(name="m", default=0)
    transaction: str | None = msgspec.field(name="g", default=None)
    described: bool = msgspec.field(name="d", default=False)
    """Whether the table has the columns of the batch's next `Columns` from here on."""
    notification: str = msgspec.field(name="n", default="")
    """The kind of a notification, or the statement of a ddl. `after` has the details."""
    partition: Any = msgspec.field(name="p", default=None)
    offset: Any = msgspec.field(name="f", default=None)


class Batch(NamedTuple):
    """Events in order. The last one has the offset from which the engine continues."""

    lines: list[bytes]
    events: list[Event]


class History(NamedTuple):
    """A record of the schema history, to be passed to the next start."""

    record: str


class Columns(NamedTuple):
    """The columns of a table, from the next batch's event with `described` on."""

    table: str
    description: dict[str, Any]


class Engine(Closeable):
    """A running engine. Only one thread may call `read` and `acknowledge`."""

    def __init__(
        self,
        settings: Settings,
        properties: Mapping[str, str],
        *,
        log_file: Path,
        tables: Sequence[str] = (),
        partition: Any = None,
        offset: Any = None,
        history: Sequence[str] = (),
    ) -> None:
        """Start at `offset` with the `history` before it, or with a snapshot. Raises the errors of fetching the jars.

        DDL that the engine's parser does not support ends it only if it names one of `tables`.
        """
        with as_file(files(_PACKAGE) / "java" / "capture-engine.jar") as ours:
            paths = os.pathsep.join([str(ours), *debezium_jars(settings)])
        log_file.parent.mkdir(parents=True, exist_ok=True)
        bound_log(log_file)
        with log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [str(find_java() / "bin" / "java"), *_JVM, "-cp", paths, "millrace.CaptureEngine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
        self._log_file = log_file
        start: dict[str, Any] = {"properties": {"max.queue.size.in.bytes": str(_QUEUE_BYTES), **properties}}
        start["tables"] = [each.rpartition(".")[2] for each in tables]
        if offset is not None:
            start |= {"partition": partition, "offset": offset, "history": list(history)}
        self._send(b"P", json.dumps(start).encode())  # through the pipe, since the process list would show passwords

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> Batch | History | Columns:
        """Wait for the next frame. Raises CaptureEnded."""
        stream = self._process.stdout
        assert stream is not None, "the process has a pipe"
        header = self._exactly(stream, _HEADER.size)
        if header == _TERMINATING[: _HEADER.size]:  # written by the JVM itself
            raise CaptureEnded(f"the capture engine ended: {TOO_LARGE} ({_JVM[0]}); its log is {self._log_file}")
        kind, size = _HEADER.unpack(header)
        if size > _MAX_BYTES:
            raise CaptureEnded(f"the capture engine sent a frame of {size} bytes")
        body = self._exactly(stream, size)
        if kind == b"B":
            return Batch(body.splitlines(), _events.decode_lines(body))
        if kind == b"H":
            return History(body.decode())
        if kind == b"S":
            found = json.loads(body)
            return Columns(found["table"], found)
        raise CaptureEnded(_reason(json.loads(body)))

    def acknowledge(self) -> None:
        """Confirm that the last batch is durable. Raises CaptureEnded."""
        bound_log(self._log_file)
        self._send(b"A", b"")

    def signal(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send a Debezium signal. Raises CaptureEnded."""
        self._send(b"G", json.dumps({"id": secrets.token_hex(8), "type": kind, "data": dict(data)}).encode())

    def close(self) -> None:
        """End the process. Idempotent. A `read` in another thread raises CaptureEnded."""
        process = self._process
        if process.stdin is not None and not process.stdin.closed:
            with suppress(OSError):
                process.stdin.close()
        timer = threading.Timer(_STOP_SECONDS, process.kill)
        timer.start()
        try:
            process.wait(timeout=_STOP_SECONDS + 5)
        finally:
            timer.cancel()

    def _send(self, kind: bytes, body: bytes) -> None:
        stream = self._process.stdin
        assert stream is not None, "the process has a pipe"
        try:
            stream.write(_HEADER.pack(kind, len(body)) + body)
            stream.flush()
        except (OSError, ValueError):
            raise self._gone() from None

    def _exactly(self, stream: IO[bytes], size: int) -> bytes:
        try:
            found = stream.read(size)
        except ValueError:  # closed in the meantime
            found = b""
        if len(found) < size:
            raise self._gone()
        return found

    def _gone(self) -> CaptureEnded:
        code = self._process.poll()
        words = "does not respond" if code is None else f"ended with {code}"
        return CaptureEnded(f"the capture engine {words}; its log is {self._log_file}")


_events: Final = msgspec.json.Decoder(Event)


def _reason(report: Mapping[str, Any]) -> str:
    causes = [str(each) for each in report.get("causes", ())]
    said = [each for each in causes if not each.endswith(": null")] or causes
    words = said[-1] if said else str(report.get("message", "without a reason"))
    # Debezium's long messages have the place at the beginning and the error at the end.
    return f"the capture engine stopped: {words if len(words) < 1000 else f'{words[:200]} … {words[-600:]}'}"


def bound_log(path: Path) -> None:
    """Move the log of an engine aside when it is large. A running engine continues with the emptied file."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


def debezium_jars(settings: Settings, *, deadline: float = 300) -> list[str]:
    """Return the paths of Debezium's jars; fetch those that the cache lacks. Raises as `fetch_jars`."""
    return locked_jars(_lock(), "debezium", settings, deadline=deadline)


def debezium_lock() -> tuple[Jar, ...]:
    """Return the pinned jars."""
    return parse_lock(_lock(), "debezium")


def _lock() -> str:
    return (files(_PACKAGE) / "debezium.lock").read_text(encoding="utf-8")


def server_number(name: str) -> int:
    """Return a number for a binlog reader that is stable for one name and practically unique."""
    digest = hashlib.sha256(name.encode()).digest()
    return 1_000_000 + int.from_bytes(digest[:4], "big") % 2_000_000_000


def regex_of(name: str) -> str:
    """Return a Java regular expression that matches exactly `name`."""
    return "".join(each if each.isalnum() or each == "_" else f"\\{each}" for each in name)


if __name__ == "__main__":  # prints the class path, for tools/capture_jar.sh
    sys.exit(exit_code(lambda: sys.stdout.write(os.pathsep.join(debezium_jars(Settings.load(), deadline=900)))))
