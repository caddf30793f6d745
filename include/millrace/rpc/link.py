"""A client's connection to one running log server: calls with a deadline each, and reusable append streams.

A Link belongs to one ServerRecord. If a call is lost (ConnectionLost), the client drops the link, finds the server
again and makes a new one. Nothing here retries.

When the process ends, its links close and it waits a moment for the threads that are inside Flight: one that returned
to an interpreter that is gone would crash the process.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
from pyarrow import flight

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import LogUnavailable, MillraceError
from millrace.message.ids import LogId
from millrace.rpc.discovery import Liveness, ServerRecord
from millrace.rpc.wire import (
    AUTHORIZATION,
    VALUE_SCHEMA,
    NotAccepted,
    ack_from_bytes,
    from_json,
    to_json,
    typed_error,
)

CONNECTION_FAILURES: Final = (flight.FlightError, pa.ArrowException, OSError, StopIteration)
"""Errors that Flight raises if a call is lost. One with `extra_info` was answered, and is unpacked first."""

EXIT_SECONDS: Final = 1.5
"""How long the end of a process waits for calls. A tail's call without news takes a second."""
_TICK: Final = 0.1

_log: Final = logging.getLogger(__name__)


class ConnectionLost(Exception):
    """The call was lost; whether it had an effect is unknown unless `sent` is False."""

    def __init__(self, reason: str, *, sent: bool = True) -> None:
        super().__init__(reason)
        self.sent = sent


class Watchdog:
    """Ends waits that Flight cannot bound: a read on an open stream has no timeout, but can be cancelled."""

    def __init__(self) -> None:
        self._guards: dict[int, tuple[Deadline, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def guard(self, cancel: Callable[[], None], deadline: Deadline) -> Iterator[None]:
        """Call `cancel` if the block still runs at `deadline`, within a tenth of a second."""
        if self._thread is None:
            self._start()
        number = next(self._numbers)
        self._guards[number] = (deadline, cancel)
        try:
            yield
        finally:
            self._guards.pop(number, None)

    @property
    def busy(self) -> bool:
        """Whether a block runs."""
        return bool(self._guards)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="log-client-watchdog", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(_TICK):
            for number, (deadline, cancel) in list(self._guards.items()):
                if deadline.expired() and number in self._guards:
                    self._guards.pop(number, None)
                    cancel()


class ExchangeStream:
    """One open stream of requests and answers, in the same order; one thread at a time. A request is one append."""

    def __init__(self, link: Link, command: dict[str, Any]) -> None:
        self.link = link
        self.ended = False
        """Whether the stream has ended and is of no further use."""
        try:
            with link.calling() as client:
                self._writer, self._reader = client.do_exchange(
                    flight.FlightDescriptor.for_command(to_json(command)), link.options(None)
                )
        except CONNECTION_FAILURES as error:
            raise call_error(error, sent=False) from error
        self._begun = False
        link.opened(self)

    def request(self, values: pa.LargeBinaryArray, metadata: bytes | None, *, deadline: Deadline) -> None:
        """Send one append by `deadline`. Raises ConnectionLost."""
        batch = pa.RecordBatch.from_arrays([values], schema=VALUE_SCHEMA)
        with self.link.watchdog.guard(self._reader.cancel, deadline):
            try:
                if not self._begun:
                    self._writer.begin(VALUE_SCHEMA)
                    self._begun = True
                if metadata is None:
                    self._writer.write_batch(batch)
                else:
                    self._writer.write_with_metadata(batch, pa.py_buffer(metadata))
            except CONNECTION_FAILURES as error:
                self.ended = True
                raise call_error(error, sent=self._begun) from error

    def answer(self, *, deadline: Deadline) -> flight.FlightStreamChunk:
        """Return the next answer by `deadline`. Raises ConnectionLost, or the typed error that ended the stream."""
        with self.link.watchdog.guard(self._reader.cancel, deadline):
            try:
                return self._reader.read_chunk()
            except CONNECTION_FAILURES as error:
                self.ended = True
                raise call_error(error) from error

    def cancel(self) -> None:
        """Cancel the stream: a thread that waits on it gets ConnectionLost."""
        self.ended = True
        self._reader.cancel()

    def close(self) -> None:
        """Close the stream. Idempotent; never raises for a broken stream."""
        try:
            self._reader.cancel()
            self._writer.close()
        except CONNECTION_FAILURES:
            pass  # it is closed already


class AppendStream(ExchangeStream):
    """A stream of appends to the log itself, each answered with its ids."""

    def __init__(self, link: Link, pchannel: str, *, pipelined: bool) -> None:
        super().__init__(link, {"append": pchannel, "pipelined": pipelined})

    def send(self, values: pa.LargeBinaryArray, *, deadline: Deadline) -> None:
        """Send one append. Raises ConnectionLost."""
        self.request(values, None, deadline=deadline)

    def receive(self, *, deadline: Deadline) -> Sequence[LogId]:
        """Return the next acknowledgement. Raises what that append raised, NotAccepted or ConnectionLost."""
        metadata = self.answer(deadline=deadline).app_metadata
        return ack_from_bytes(metadata.to_pybytes() if metadata is not None else b"")


class Link:
    """A Flight client for one server, with its token and its idle append streams."""

    def __init__(self, record: ServerRecord, watchdog: Watchdog) -> None:
        self.record = record
        self.watchdog = watchdog
        self.client = flight.FlightClient(record.address, **_tls(record))
        self._calls = 0
        """Calls that are being started. Flight's client may be closed only while there are none."""
        self._headers = [(AUTHORIZATION.encode(), f"Bearer {record.token}".encode())]
        self._idle: dict[str, list[AppendStream]] = {}
        self._streams: weakref.WeakSet[ExchangeStream] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._reads = 0
        """Threads that wait for the next part of an answer."""
        self._server = Liveness(record)
        self._closed = _process_ends.is_set()
        _links.add(self)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def busy(self) -> bool:
        """Whether a thread is inside Flight."""
        return bool(self._calls or self._reads or self.watchdog.busy)

    def opened(self, stream: ExchangeStream) -> None:
        """Register a stream, which ends with this connection.

        Raises ConnectionLost if the connection is closed already.
        """
        with self._lock:
            self._streams.add(stream)
            closed = self._closed
        if closed:
            stream.cancel()
            raise ConnectionLost("the connection was closed", sent=False)

    @contextmanager
    def calling(self) -> Iterator[flight.FlightClient]:
        """Yield Flight's client to start a call. Raises ConnectionLost if the connection is closed.

        Closing Flight's client destroys what a call that is being started uses: the process would crash.
        """
        with self._lock:
            if self._closed:
                raise ConnectionLost("the connection was closed", sent=False)
            self._calls += 1
        try:
            yield self.client
        finally:
            with self._lock:
                self._calls -= 1
                last = self.closed and not self._calls
            if last:
                self.client.close()

    def options(self, timeout: float | None) -> flight.FlightCallOptions:
        """Return the options of a call: its token and, unless None, its timeout in seconds from now."""
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)

    def check(self) -> None:
        """Raise ConnectionLost(sent=False) if the server's process is gone.

        So no call is sent that cannot be answered, or whose outcome stays unknown.
        """
        if not self._server.is_alive():
            raise ConnectionLost(f"the log server (process {self.record.pid}) is gone", sent=False)

    def act(self, name: str, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """Call one action. Raises its typed error or ConnectionLost."""
        try:
            with self.calling() as client:
                results = list(client.do_action(flight.Action(name, to_json(request)), self.options(timeout)))
            return from_json(results[0].body.to_pybytes()) if results else {}
        except CONNECTION_FAILURES as error:
            raise call_error(error) from error

    def get(self, request: dict[str, Any], *, timeout: float) -> tuple[list[pa.RecordBatch], dict[str, Any]]:
        """Call one DoGet; return its batches and the metadata of the last. Raises its typed error or ConnectionLost."""
        _, parts = self.parts(request, timeout=timeout)
        found = list(parts)
        metadata = found[-1][1]
        if metadata is None:
            raise ConnectionLost("the log server sent an empty answer to a read")
        return [batch for batch, _ in found], metadata

    def parts(
        self, request: dict[str, Any], *, timeout: float
    ) -> tuple[pa.Schema, Iterator[tuple[pa.RecordBatch, dict[str, Any] | None]]]:
        """Stream one DoGet: return the schema, and an iterator of batches, each with its metadata, if any.

        An iterator that is not exhausted cancels the call when it is closed. Raises the call's typed error or
        ConnectionLost, here or with a batch.
        """
        try:
            with self.calling() as client:
                reader = client.do_get(flight.Ticket(to_json(request)), self.options(timeout))
            with self._reading():
                schema, first = reader.schema, next(reader, None)
        except CONNECTION_FAILURES as error:
            raise call_error(error) from error
        if first is None:
            raise ConnectionLost("the log server sent an empty answer to a read")

        def rest() -> Iterator[tuple[pa.RecordBatch, dict[str, Any] | None]]:
            ended = False
            try:
                chunk = first
                while chunk is not None:
                    metadata = chunk.app_metadata
                    yield chunk.data, None if metadata is None else from_json(metadata.to_pybytes())
                    with self._reading():
                        chunk = next(reader, None)
                ended = True
            except CONNECTION_FAILURES as error:
                ended = True
                raise call_error(error) from error
            finally:
                if not ended:
                    reader.cancel()

        return schema, rest()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            self._reads += 1
        try:
            yield
        finally:
            with self._lock:
                self._reads -= 1

    @contextmanager
    def stream(self, pchannel: str) -> Iterator[AppendStream]:
        """Yield a plain append stream for exclusive use.

        It is reused if the block ends normally or with a typed error.
        """
        self.check()
        with self._lock:
            idle = self._idle.get(pchannel)
            stream = idle.pop() if idle else None
        if stream is None:
            stream = AppendStream(self, pchannel, pipelined=False)
        keep = False
        try:
            yield stream
            keep = True
        except MillraceError:
            keep = not stream.ended
            raise
        finally:
            with self._lock:
                keep = keep and not self._closed
                if keep:
                    self._idle.setdefault(pchannel, []).append(stream)
            if not keep:
                stream.close()

    def close(self) -> None:
        """Close the idle streams and the client; cancel streams in use, even if they wait for a suspended server."""
        with self._lock:
            unused = not self._calls and not self._closed
            self._closed = True
            idle = [stream for each in self._idle.values() for stream in each]
            self._idle.clear()
            used = [stream for stream in self._streams if stream not in idle]
        for stream in idle:
            stream.close()
        for broken in used:
            broken.cancel()  # closing the client does not end them: their callers would wait for their deadlines
        if unused:
            self.client.close()
        self._server.close()

    def close_streams(self) -> None:
        """Close all streams that were opened; no thread uses one."""
        for stream in list(self._streams):
            stream.close()


class Waiting(Protocol):
    """What has calls that wait at a server for long."""

    def end_waits(self) -> None:
        """Ask the server to answer these calls now, and let no more of them wait."""
        ...


_links: Final[weakref.WeakSet[Link]] = weakref.WeakSet()
_waiting: Final[weakref.WeakSet[Waiting]] = weakref.WeakSet()
_process_ends: Final = threading.Event()


def end_waits_with_process(waiting: Waiting) -> None:
    """Have `waiting` end its waits if it is there when the process ends: no call inside Flight can be cancelled."""
    _waiting.add(waiting)


@atexit.register
def _end_calls() -> None:
    """Begin no more calls, end those that can be ended, and wait for the others."""
    _process_ends.set()
    for waiting in list(_waiting):
        try:
            waiting.end_waits()
        except Exception as error:  # the server is away, and so are its calls
            _log.debug("calls that wait were not ended: %s", error)
    links = list(_links)
    for link in links:
        link.close()
    if poll_until(lambda: not any(link.busy for link in links), Deadline.after(EXIT_SECONDS), interval=0.01):
        for link in links:
            link.close_streams()  # Arrow complains of one that is only cancelled


def _tls(record: ServerRecord) -> dict[str, Any]:
    """Return the TLS options for FlightClient. Raises LogUnavailable if the certificates cannot be read."""
    if not record.roots:
        return {}
    try:
        trusted: dict[str, Any] = {"tls_root_certs": Path(record.roots).read_bytes()}
    except OSError as error:
        raise LogUnavailable(f"the certificates in {record.roots} cannot be read: {error}") from error
    if record.tls_name:
        trusted["override_hostname"] = record.tls_name
    return trusted


def call_error(error: BaseException, *, sent: bool = True) -> MillraceError | ConnectionLost:
    """Return the typed error that a failed call carries, else ConnectionLost."""
    typed = typed_error(error)
    if typed is not None:
        return typed
    # A refused token proves that nothing was processed: another server has this address now.
    sent = sent and not isinstance(error, flight.FlightUnauthenticatedError)
    return ConnectionLost(str(error) or type(error).__name__, sent=sent)


__all__ = [
    "CONNECTION_FAILURES",
    "AppendStream",
    "ConnectionLost",
    "ExchangeStream",
    "Link",
    "NotAccepted",
    "Watchdog",
    "call_error",
    "end_waits_with_process",
]
