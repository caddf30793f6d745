"""Poll a database or a folder beside a flow's tasks, and store the changes in the capture's spool.

A *poller* repeatedly reads one connection until nothing is left. Its changes go into the spool in one synced
transaction with its offset. So each change is in the spool exactly once, whenever a process is killed.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from millrace.base.closeable import Closeable
from millrace.base.errors import DeadlineExceeded, MillraceError, StreamBusy
from millrace.base.failpoint import hit
from millrace.flows.records import BINARY, FAULT, PLACE, Record
from millrace.flows.sources.capture.lane import CapturedRows, Change
from millrace.flows.sources.capture.shared_spool import SharedSpool
from millrace.flows.sources.capture.spool import Changes, Mark, Spool
from millrace.runtime.supervisor import RestartBackoff

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
_FULL_PAUSE: Final = 0.2
_LAG_SECONDS: Final = 5.0
"""Seconds between two measurements of the lag, and the longest poll that does not count as lag."""
_NOTED_SECONDS: Final = 60.0
"""Seconds after which an idle feeder notes again that it has read everything."""
UNREAD_ROWS: Final = 100_000
"""The most rows whose bytes are counted as unread."""

_logger: Final = logging.getLogger(__name__)
encode: Final = msgspec.json.Encoder(decimal_format="number").encode


_Connection = TypeVar("_Connection", contravariant=True)


class Poller(Protocol[_Connection]):
    """Reads a source by one connection. One thread at a time."""

    def begin(self, connection: _Connection, spool: Spool) -> None:
        """Initialise from the source and the spool after a connect. Raises InvalidSettings, LogUnavailable."""
        ...

    def poll(self, connection: _Connection, spool: Spool, room: Callable[[], bool], /) -> None:
        """Read and append everything that is new. Calls `room` before each part, and stops when it returns false."""
        ...

    def unread(self, connection: _Connection, spool: Spool, /) -> int | None:
        """Return about how many bytes are unread; None if unknown.

        Called from another thread, with another connection.
        """
        return None

    def wait(self, stop: threading.Event, seconds: float, /) -> None:
        """Return after `seconds`, or when `stop` is set or new data is known to exist."""
        stop.wait(seconds)


class PollingFeeder(Closeable):
    """Feeds the spool in `folder` until it is closed. Raises StreamBusy if another process feeds it."""

    def __init__(
        self,
        connect: Callable[[], AbstractContextManager[Any]],
        words: str,
        folder: Path,
        poller: Poller[Any],
        *,
        every_seconds: float,
        max_bytes: int,
        shared: SharedSpool | None = None,
    ) -> None:
        """`connect` opens what `poller` reads; `words` name it in messages. `shared` is that of Spool."""
        self._connect, self._words, self._poller = connect, words, poller
        self._every, self._max_bytes = every_seconds, max_bytes
        # A second connection that asks nothing may do harm: a socket takes messages, which are lost when it closes.
        self._measures = type(poller).unread is not Poller.unread
        self._spool = Spool(folder, write=True, shared=shared)
        self._taken_over: StreamBusy | None = None
        self._stop, self._complete = threading.Event(), threading.Event()
        self._error = ""
        self._read_at: float = self._spool.fact("read_at") or time.time()
        """When a poll last read everything, in seconds since 1970."""
        self._noted_at = 0.0
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()
        self._watch = threading.Thread(target=self._measure, name="capture-lag", daemon=True)
        self._watch.start()

    def check(self) -> None:
        """Raise the error of another machine that took over the spool, if any."""
        if self._taken_over is not None:
            raise self._taken_over

    def close(self) -> None:
        """Stop. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._watch.join()
        self._spool.close()

    def wait_complete(self, seconds: float) -> None:
        """Wait until everything was read once. Raises DeadlineExceeded, with the last error."""
        if not self._complete.wait(seconds):
            raise DeadlineExceeded(f"{self._words} was not read within {seconds:.0f} s. {self._error}")

    def _run(self) -> None:
        backoff = RestartBackoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while not self._stop.is_set():
            try:
                self._spool.resume()
                with self._connect() as connection:
                    self._poller.begin(connection, self._spool)
                    while not self._stop.is_set():
                        self._poller.poll(connection, self._spool, self._room)
                        if self._stop.is_set():
                            return
                        self._note_read()
                        self._complete.set()
                        self._poller.wait(self._stop, self._every)
            except StreamBusy as error:
                _logger.warning("%s: %s", self._words, error)
                self._taken_over, self._error = error, str(error)
                return
            except Exception as error:
                if not isinstance(error, MillraceError | OSError | sqlite3.Error):
                    _logger.exception("%s", self._words)
                self._error = str(error)
                try:
                    self._spool.note(error=self._error)
                except sqlite3.Error:
                    pass  # a full disk cannot store the reason either; the log has it
                backoff.record_failure(self._error)
                pause = backoff.remaining_pause()
                _logger.warning("%s (again in %.0f s)", error, pause)
                self._stop.wait(pause)

    def _note_read(self) -> None:
        """Note that everything is read, as a heartbeat, since an idle source writes nothing else."""
        self._read_at = now = time.time()
        if self._error or now - self._noted_at > _NOTED_SECONDS:
            self._spool.note(error="", read_at=now, lag_bytes=0, lag_seconds=0.0)
            self._error, self._noted_at = "", now

    def _measure(self) -> None:
        """Record the lag until this is closed."""
        while not self._stop.wait(_LAG_SECONDS):
            try:
                with Spool(self._spool.folder) as spool:
                    self._note_lag(spool)
            except Exception:  # the next attempt may succeed
                _logger.warning("the lag of %s is unknown", self._words, exc_info=True)

    def _note_lag(self, spool: Spool) -> None:
        standing = spool.standing()
        age = time.time() - self._read_at
        if age < self._every + _LAG_SECONDS:
            if standing.lag_bytes != 0 or standing.lag_seconds:
                spool.note(lag_bytes=0, lag_seconds=0.0, read_at=self._read_at)
            return
        unread: int | None = None
        if self._measures:
            try:
                with self._connect() as connection:
                    unread = self._poller.unread(connection, spool)
            except (MillraceError, OSError, sqlite3.Error):
                pass  # the poll reports the same error
        spool.note(lag_bytes=unread, lag_seconds=round(age, 1))

    def _room(self) -> bool:
        """Wait while the spool is full. Return False if the feeder is closed."""
        while not self._stop.is_set() and self._spool.standing().bytes > self._max_bytes:
            self._stop.wait(_FULL_PAUSE)
        return not self._stop.is_set()


def line_of(
    operation: str,
    *,
    key: dict[str, Any] | None = None,
    after: dict[str, Any] | msgspec.Raw | None = None,
    milliseconds: int = 0,
    transaction: str | None = None,
    binary: Iterable[str] = (),
    place: str = "",
    fault: str = "",
    text: str = "",
) -> bytes:
    """Return a change as a line of the spool: :class:`millrace.flows.sources.capture.engine.Event`.

    `place` is where it was read. A line that could not be read has a `fault` and its `text`.
    """
    found: dict[str, Any] = {"o": operation, "m": milliseconds or time.time_ns() // 1_000_000}
    more = {"k": key, "a": after, "g": transaction, "x": ",".join(binary), "w": place, "e": fault, "v": text}
    found |= {name: value for name, value in more.items() if value}
    # JSON that a source gives as text may have line breaks between its values: the spool has a line for each change.
    return encode(found).replace(b"\n", b" ")


def append(
    spool: Spool,
    changes: Sequence[tuple[str, bytes]],
    marks: Sequence[int],
    offset: Any,
    *,
    complete: bool = True,
    source: str = "",
    whole: bool = True,
    columns: Sequence[tuple[str, dict[str, Any], int]] = (),
    also: Callable[[sqlite3.Connection], None] | None = None,
) -> None:
    """Append `changes` to the spool, with the offset after them. Transactions end after `marks` of them.

    `source` names the position in the source at the marks; at marks that are not `whole`, no tick is recorded.
    `columns` and `also` are those of :meth:`Spool.append`.
    """
    now = time.time_ns() // 1_000_000
    spool.append(
        changes,
        [Mark(each, source, now, whole) for each in marks],
        partition=None,
        offset=offset,
        complete=complete,
        columns=columns,
        moment=now if changes else None,
        also=also,
    )
    hit("capture.spooled")


class _Origin(msgspec.Struct, rename={"binary": "x", "place": "w", "fault": "e", "text": "v"}):
    binary: str = ""
    place: str = ""
    fault: str = ""
    text: str = ""


_ORIGIN: Final = msgspec.json.Decoder(_Origin)


class PolledRows(CapturedRows):
    """Reads changes of a poller, whose lines list their columns of bytes and name the place where they were read."""

    def _records(
        self, found: Changes, events: Sequence[Change], lists: Sequence[tuple[str, bytes]]
    ) -> Sequence[Record]:
        return [_with_origin(*each) for each in zip(super()._records(found, events, lists), found.lines, strict=True)]


def _with_origin(record: Record, line: bytes) -> Record:
    """Return a record with the fault, place and binary columns of its line."""
    origin = _ORIGIN.decode(line)
    headers = list(record.headers)
    if origin.fault:
        headers.insert(0, (FAULT, origin.fault.encode()))
        record = record._replace(value=origin.text.encode())
    if origin.place:
        headers.append((PLACE, origin.place.encode()))
    if origin.binary:
        headers.append((BINARY, origin.binary.encode()))
    return record._replace(headers=headers)
