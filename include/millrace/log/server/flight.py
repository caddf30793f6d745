"""The Flight service of the log server: maps calls to methods of the log.

Its process and the wire protocol are described in millrace.log.server.main.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Protocol, Self, runtime_checkable

import pyarrow as pa
from pyarrow import flight

from millrace.access.access_log import AccessLog, ReadStream
from millrace.access.grants import Caller
from millrace.access.permissions import authorize
from millrace.access.token_file import TokenFile
from millrace.base.deadline import Deadline
from millrace.base.errors import (
    ChannelNotFound,
    InvalidArgument,
    LogUnavailable,
    MillraceError,
    PermissionDenied,
    ServerFull,
)
from millrace.log.clock import require_log_clock
from millrace.log.protocol import Log, LogService, stamp_floor
from millrace.log.server.append_stream import serve_appends
from millrace.log.server.authentication import MIDDLEWARE_KEY, TokenAuthentication
from millrace.log.server.connections import ConnectionGuard, ConnectionLimits
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries, weight
from millrace.message.wire.decode import framed_counts
from millrace.rpc import calls
from millrace.rpc.calls import SERVER_CALLS, ServerCall, handlers_of, handles, server_calls
from millrace.rpc.wire import (
    NotAccepted,
    flight_error,
    log_id,
    optional_log_id,
    request_number,
    request_of,
    to_json,
)

_log = logging.getLogger(__name__)


class Gate:
    """Counts running work, refuses more once closed, and knows how long the server has been idle.

    Work of extensions counts towards activity only: it is neither refused nor waited for here, since extensions end
    it themselves.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = 0
        self._extensions = 0
        self._closed = False
        self._quiet_since = time.monotonic()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Run one piece of work.

        Raises NotAccepted once the gate is closed.
        """
        with self._changed:
            if self._closed:
                raise NotAccepted
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._quiet_since = time.monotonic()
                self._changed.notify_all()

    def track(self, change: int) -> None:
        """Record that work of extensions began (`change` > 0) or ended (< 0)."""
        with self._changed:
            self._extensions += change
            self._quiet_since = time.monotonic()

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Run one piece of an extension's work."""
        self.track(1)
        try:
            yield
        finally:
            self.track(-1)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def idle_seconds(self) -> float:
        """Seconds without work; 0 while there is some."""
        with self._changed:
            return 0.0 if self._active or self._extensions else time.monotonic() - self._quiet_since

    def close(self, *, timeout: float) -> bool:
        """Refuse new work and wait for running work; False if that takes longer than `timeout` seconds."""
        with self._changed:
            self._closed = True
            return self._changed.wait_for(lambda: self._active == 0, timeout)


class TrackedStream:
    """Reader and writer of an extension's stream. A request counts as work until it is answered."""

    def __init__(
        self, gate: Gate, reader: flight.MetadataRecordBatchReader, writer: flight.MetadataRecordBatchWriter
    ) -> None:
        self._gate = gate
        self._reader = reader
        self._writer = writer
        self._changing = threading.Lock()
        self._open = 0

    def read_chunk(self) -> flight.FlightStreamChunk:
        chunk = self._reader.read_chunk()
        self._note(1)
        return chunk

    def __iter__(self) -> Self:
        return self

    __next__ = read_chunk

    def begin(self, schema: pa.Schema) -> None:
        self._writer.begin(schema)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)
        self._note(-1)

    def write_metadata(self, metadata: pa.Buffer) -> None:
        self._writer.write_metadata(metadata)
        self._note(-1)

    def write_with_metadata(self, batch: pa.RecordBatch, metadata: pa.Buffer) -> None:
        self._writer.write_with_metadata(batch, metadata)
        self._note(-1)

    def finish(self) -> None:
        """End the stream: unanswered requests no longer count as work."""
        self._note(-self._open)

    def _note(self, change: int) -> None:
        with self._changing:
            self._open += change
            self._gate.track(change)


@runtime_checkable
class RetainingLog(Protocol):
    """A log with its own retention and checksums, as the embedded one."""

    def enforce_retention(self, *, allowed: LogId) -> int: ...

    def verify(self) -> Any: ...


class Extension(Protocol):
    """A component hosted in the server's process, next to the log (the append host, for example).

    Its methods run in server threads and may raise any MillraceError, which reaches the client typed. The registry of
    calls (millrace.rpc.calls) has admitted the caller; the extension checks permissions that the registry leaves to it.
    """

    name: str

    def do_exchange(
        self,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
        caller: Caller,
    ) -> None:
        """Serve a stream whose command is a JSON object with `"extension": name`.

        The reader has read_chunk. The writer has begin, write_batch and write_metadata; each of the last two answers
        one request.
        """
        ...

    def do_get(self, ticket: flight.Ticket, caller: Caller) -> ReadStream:
        """Answer a ticket that is a JSON object with `"extension": name`."""
        ...

    def do_action(self, action: flight.Action, caller: Caller) -> Sequence[bytes]:
        """Answer an action of type `name/...`; one bytes object per result."""
        ...

    def admit(self, pchannel: str, values: pa.LargeBinaryArray, caller: Caller, *, alone: bool) -> pa.LargeBinaryArray:
        """Return entries as they are appended directly, with their stamps. A MillraceError refuses them all.

        Without `alone` they are several merged appends; if refused, each is checked again separately.
        """
        ...

    def truncated(self, pchannel: str, freed: int) -> None:
        """Record that a caller truncated a PChannel's log, which freed `freed` bytes."""
        ...

    def use_access_log(self, access_log: AccessLog) -> None:
        """Use the server's access log for the appends that the extension serves. Called before the first call."""
        ...

    def denied(self, call: str) -> None:
        """Record that a call was denied, for a missing role or an invalid token."""
        ...

    def close(self) -> None:
        """Stop. Called once, while the log is still open but accepts no more appends from streams."""
        ...


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits of reads: threads that wait for entries, seconds of one wait, and bytes of one message on the wire."""

    waiting: int = 128
    max_wait: float = 10.0
    wait_slice: float = 0.25
    chunk_bytes: int = 8 << 20


WILDCARD_HOSTS: Final = frozenset({"0.0.0.0", "::", "[::]"})


_ANSWERS_SECONDS: Final = 0.2


class LogServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type information
    """Serves `service`. It listens from construction until :meth:`close`."""

    def __init__(
        self,
        service: LogService,
        *,
        tokens: Sequence[str],
        token_file: TokenFile | None = None,
        registry: Mapping[str, ServerCall] = SERVER_CALLS,
        extensions: Sequence[Extension] = (),
        limits: ReadLimits | None = None,
        connections: ConnectionLimits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: tuple[bytes, bytes] | None = None,
        stop_asked: threading.Event | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        """Start to listen. The call `shutdown` sets `stop_asked`; the server's owner then closes it.

        The server closes `access_log`.

        Raises InvalidArgument if a call of the log has no handler.
        """
        self._service = service
        self._registry = registry
        self._handlers = handlers_of(self, server_calls(""))
        self._reads: dict[str, list[ServerCall]] = {}
        for call in registry.values():
            self._reads.setdefault(call.name, []).append(call)
        self._logs: dict[str, Log] = {}
        self._opening = threading.Lock()
        self._extensions = {extension.name: extension for extension in extensions}
        self._access_log = access_log
        if access_log is not None:
            for extension in extensions:
                extension.use_access_log(access_log)
        self._limits = limits or ReadLimits()
        self._waiting = threading.BoundedSemaphore(self._limits.waiting)
        bounds = connections or ConnectionLimits()
        self._streams_taken = bounds.streams
        self._streams = threading.BoundedSemaphore(bounds.streams)
        self.gate = Gate()
        self.stop_asked = stop_asked or threading.Event()
        scheme = "grpc" if tls is None else "grpc+tls"
        super().__init__(
            f"{scheme}://{host}:{port}",
            tls_certificates=None if tls is None else [tls],
            middleware={MIDDLEWARE_KEY: TokenAuthentication(tokens, token_file, self._unauthenticated)},
        )
        self.connections = ConnectionGuard(self.port, bounds)
        self.connections.start()
        # Clients that look it up are on this host, and cannot connect to a wildcard address.
        self.address = f"{scheme}://{'127.0.0.1' if host in WILDCARD_HOSTS else host}:{self.port}"

    @property
    def idle_seconds(self) -> float:
        """Seconds without a connection or work.

        An idle client keeps its connection and thereby its server, so an append never meets a server that stops by
        itself.
        """
        return min(self.gate.idle_seconds, self.connections.unused_seconds)

    def close(self, *, timeout: float = 10.0) -> None:
        """Refuse new work, finish running work (at most `timeout` seconds), close extensions, logs and service."""
        if not self.gate.close(timeout=timeout):
            _log.warning("work is still running after %.0f s; closing the log anyway", timeout)
        for extension in self._extensions.values():
            extension.close()
        with self._opening:
            logs, self._logs = self._logs, {}
        for log in logs.values():
            log.close()
        self._service.close()
        self.connections.close()
        if self._access_log is not None:
            self._access_log.close()
        # Stops the listener, in a thread of its own: it waits for streams that clients hold open. Answers that are
        # under way, above all to the call `shutdown`, get there before the process ends.
        listener = threading.Thread(target=self.shutdown, name="flight-shutdown", daemon=True)
        listener.start()
        listener.join(_ANSWERS_SECONDS)

    # --- Flight's methods ---------------------------------------------------------------------------------------------

    @handles(calls.APPEND_TO_LOG)
    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        caller = self._welcomed(context)
        with _typed(), self._stream():
            command = request_of(descriptor.command or b"")
            if "extension" in command:
                extension = self._extension(command["extension"])
                self._require(caller, self._named(f"{extension.name}/do_exchange"), command)
                stream = TrackedStream(self.gate, reader, writer)
                try:
                    extension.do_exchange(descriptor, stream, stream, caller)
                finally:
                    stream.finish()
                return
            self._require(caller, calls.APPEND_TO_LOG, command)
            serve_appends(
                reader,
                writer,
                partial(self._append, caller, _name(command, "append")),
                pipelined=bool(command.get("pipelined")),
                cancelled=context.is_cancelled,
            )

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """Serve one stream inside this context.

        Raises ServerFull.
        """
        if not self._streams.acquire(blocking=False):
            self.connections.make_room()
            raise ServerFull(
                f"the log server has {self._streams_taken} append streams open, its limit (setting log_streams): "
                "close idle producers, or retry"
            )
        try:
            yield
        finally:
            self._streams.release()

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        caller = self._welcomed(context)
        with _typed():
            request = request_of(ticket.ticket)
            if "extension" in request:
                extension = self._extension(request["extension"])
                self._require(caller, self._read_of(extension, request), request)
                call = self._read_of(extension, request)
                with self.gate.tracked(), self._denials(caller, call, request):
                    found = extension.do_get(ticket, caller)
            else:
                call = calls.READ_LOG
                self._require(caller, call, request)
                found = self._read(context, request)
            pieces = found.pieces
            if self._access_log is not None:
                pieces = self._access_log.read(caller.principal.name, call.name, _read_on(call, request), pieces)
            return flight.GeneratorStream(found.schema, pieces)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Sequence[bytes]:
        caller = self._welcomed(context)
        with _typed():
            name, slash, _ = action.type.partition("/")
            extension = self._extension(name) if slash else None
            call = self._named(action.type)
            if call.is_stream:
                raise InvalidArgument(f"{action.type!r} is a stream, not an action")
            # An extension's body need not be JSON unless the call's permission depends on it.
            request = request_of(action.body.to_pybytes()) if extension is None or call.argument else {}
            self._require(caller, call, request)
            if extension is not None:
                with self.gate.tracked(), self._counted(caller, call, request):
                    return extension.do_action(action, caller)
            return [to_json(call.checked(self._handlers[call.key](request)))]

    def _named(self, name: str) -> ServerCall:
        """Return the call of that name. Raises InvalidArgument if there is none."""
        call = self._registry.get(name)
        if call is None:
            raise InvalidArgument(f"unknown call {name[:100]!r}")
        return call

    def _read_of(self, extension: Extension, request: Mapping[str, Any]) -> ServerCall:
        """Return the extension's read that a ticket names. Raises InvalidArgument."""
        for each in self._reads.get(f"{extension.name}/do_get", ()):
            if not each.ticket or each.ticket in request:
                return each
        raise InvalidArgument(f"the ticket names no read of {extension.name!r}")

    def _require(self, caller: Caller, call: ServerCall, request: Mapping[str, Any]) -> None:
        """Admit a call.

        Raises what millrace.access.permissions.authorize raises.
        """
        with self._counted(caller, call, request):
            authorize(caller, call.key, request, calls=self._registry)

    @contextmanager
    def _counted(self, caller: Caller, call: ServerCall, request: Mapping[str, Any]) -> Iterator[None]:
        """Report denied calls to the extensions and the access log."""
        try:
            with self._denials(caller, call, request):
                yield
        except PermissionDenied:
            for extension in self._extensions.values():
                extension.denied(call.name)
            raise

    @contextmanager
    def _denials(self, caller: Caller, call: ServerCall, request: Mapping[str, Any]) -> Iterator[None]:
        """Write denied calls to the access log."""
        try:
            yield
        except PermissionDenied:
            if self._access_log is not None:
                self._access_log.denied(caller.principal.name, call.name, _read_on(call, request))
            raise

    def _unauthenticated(self) -> None:
        if self._access_log is not None:
            self._access_log.denied("", "", "", "UNAUTHENTICATED")

    def _welcomed(self, context: flight.ServerCallContext) -> Caller:
        """Return the caller, and mark its connection as authenticated while its token is valid."""
        caller: Caller = context.get_middleware(MIDDLEWARE_KEY).caller
        self.connections.welcome(context.peer(), caller)
        return caller

    # --- appends and reads --------------------------------------------------------------------------------------------

    def _append(
        self, caller: Caller, pchannel: str, values: pa.LargeBinaryArray, *, alone: bool = True
    ) -> Sequence[LogId]:
        with ExitStack() as inside:
            if self._access_log is not None:
                inside.enter_context(
                    self._access_log.writing(
                        caller.principal.name,
                        calls.APPEND_TO_LOG.name,
                        pchannel,
                        lambda: (int(framed_counts(values).sum()), int(values.nbytes)),
                        alone=alone,
                    )
                )
            return self._appended(caller, pchannel, values, alone=alone)

    def _appended(self, caller: Caller, pchannel: str, values: pa.LargeBinaryArray, *, alone: bool) -> Sequence[LogId]:
        caller.require_valid()
        with self.gate.admit():
            log = self._open(pchannel)
            for extension in self._extensions.values():
                values = extension.admit(pchannel, values, caller, alone=alone)
            try:
                return log.append(values)
            except LogUnavailable:
                # The log may have stopped after a failed write; reopening lets it recover before the next append.
                with self._opening:
                    self._logs.pop(pchannel, None)
                raise

    @handles(calls.READ_LOG)
    def _read(self, context: flight.ServerCallContext, request: dict[str, Any]) -> ReadStream:
        log = self._open(_name(request, "pchannel"))
        position, end = log_id(request.get("position")), optional_log_id(request.get("end"))
        max_bytes, timeout = (
            int(request_number(request, "max_bytes", 64 << 20)),
            request_number(request, "timeout", 0.0),
        )
        with self.gate.admit():
            first = log.read(position, end=end, max_bytes=min(max_bytes, self._limits.chunk_bytes))
        busy = False
        # An empty range never gets entries: do not wait.
        if not first.batch.num_rows and timeout > 0 and (end is None or first.next < end):
            first, busy = self._wait(context, log, position, end, max_bytes, timeout)
        return ReadStream(ENTRY_SCHEMA, self._pieces(log, first, end, max_bytes, busy))

    def _pieces(
        self, log: Log, entries: LogEntries, end: LogId | None, max_bytes: int, busy: bool
    ) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Yield a read in chunks, so that the log reads the next one while the client processes this one."""
        piece = self._limits.chunk_bytes
        while True:
            yield entries.batch, to_json({"next": entries.next, "busy": busy})
            size = weight(entries.batch)
            max_bytes -= size
            if size < piece // 2 or max_bytes < piece // 2:
                return  # the end of the log, or enough
            try:
                with self.gate.admit():
                    entries = log.read(entries.next, end=end, max_bytes=min(max_bytes, piece))
            except (MillraceError, NotAccepted):
                return  # the entries so far are valid; the next read starts at this error and reports it
            if not entries.batch.num_rows or weight(entries.batch) > 2 * piece:
                return

    def _wait(
        self,
        context: flight.ServerCallContext,
        log: Log,
        position: LogId,
        end: LogId | None,
        max_bytes: int,
        timeout: float,
    ) -> tuple[LogEntries, bool]:
        """Wait for entries in slices, so that a disconnected client or a stopping server frees the thread.

        Returns the entries, and whether no thread was free to wait.
        """
        deadline = Deadline.after(min(timeout, self._limits.max_wait))
        size = min(max_bytes, self._limits.chunk_bytes)
        can_wait = self._waiting.acquire(blocking=False)
        try:
            while True:
                left = deadline.remaining()
                wait = min(self._limits.wait_slice, left) if can_wait else 0.0
                with self.gate.admit():
                    entries = log.read(position, end=end, max_bytes=size, timeout=max(0.0, wait))
                settled = entries.batch.num_rows or (end is not None and entries.next >= end)
                if settled or not can_wait or left <= 0 or context.is_cancelled():
                    return entries, not can_wait
        finally:
            if can_wait:
                self._waiting.release()

    def _open(self, pchannel: str) -> Log:
        log = self._logs.get(pchannel)
        if log is None:
            with self._opening:
                log = self._logs.get(pchannel)
                if log is None:
                    if self.gate.closed:
                        raise LogUnavailable("the log server is stopping")
                    log = self._logs[pchannel] = self._service.open(pchannel)
        return log

    def _extension(self, name: object) -> Extension:
        extension = self._extensions.get(str(name))
        if extension is None:
            raise InvalidArgument(f"this log server has no extension {name!r}: start it with --extension")
        return extension

    # --- actions ------------------------------------------------------------------------------------------------------

    @handles(calls.CREATE)
    def _act_create(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            self._service.create(_name(request, "pchannel"))
        return {}

    @handles(calls.DROP)
    def _act_drop(self, request: dict[str, Any]) -> dict[str, Any]:
        pchannel = _name(request, "pchannel")
        with self.gate.admit(), self._opening:
            log = self._logs.pop(pchannel, None)
            if log is not None:
                log.close()
            self._service.drop(pchannel)
        return {}

    @handles(calls.NAMES)
    def _act_names(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"names": self._service.names()}

    @handles(calls.OPEN)
    def _act_open(self, request: dict[str, Any]) -> dict[str, Any]:
        pchannel = _name(request, "pchannel")
        if pchannel not in self._service.names():
            raise ChannelNotFound(f"PChannel {pchannel} does not exist: create it first")
        return {}

    @handles(calls.GROUPS)
    def _act_groups(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"groups": self._service.groups()}

    @handles(calls.GROUP_POSITION)
    def _act_group_position(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            found = self._service.group_position(_name(request, "group"), _name(request, "pchannel"))
        return {"position": found}

    @handles(calls.MOVE_GROUP)
    def _act_move_group(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            position = log_id(request.get("position"))
            self._service.move_group(_name(request, "group"), _name(request, "pchannel"), position)
        return {}

    @handles(calls.HOLD_GROUP)
    def _act_hold_group(self, request: dict[str, Any]) -> dict[str, Any]:
        seconds = request_number(request, "seconds", 0.0)
        with self.gate.admit():
            self._service.hold_group(
                _name(request, "group"), _name(request, "pchannel"), _name(request, "holder"), seconds=seconds
            )
        return {}

    @handles(calls.DROP_GROUP)
    def _act_drop_group(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            self._service.drop_group(_name(request, "group"))
        return {}

    @handles(calls.DESCRIBE)
    def _act_describe(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            found = self._open(_name(request, "pchannel")).describe()
        return {"begin": found.begin, "end": found.end, "bytes": found.bytes}

    @handles(calls.FLOOR)
    def _act_floor(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            floor = stamp_floor(self._open(_name(request, "pchannel")))
        return {} if floor is None else floor._asdict()

    @handles(calls.ENDS)
    def _act_ends(self, request: dict[str, Any]) -> dict[str, Any]:
        names = request.get("pchannels")
        if not isinstance(names, list):
            raise InvalidArgument("the request needs 'pchannels', a list of names")
        with self.gate.admit():
            return {"ends": {name: self._open(_name({"name": name}, "name")).end() for name in names}}

    @handles(calls.TRUNCATE)
    def _act_truncate(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            freed = self._open(_name(request, "pchannel")).truncate(log_id(request.get("position")))
        return self._freed(request, freed)

    @handles(calls.RETAIN)
    def _act_retain(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            freed = self._keeper(request).enforce_retention(allowed=log_id(request.get("allowed")))
        return self._freed(request, freed)

    def _freed(self, request: dict[str, Any], freed: int) -> dict[str, Any]:
        for extension in self._extensions.values():
            extension.truncated(_name(request, "pchannel"), freed)
        return {"freed": freed}

    @handles(calls.VERIFY)
    def _act_verify(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            return asdict(self._keeper(request).verify())

    def _keeper(self, request: dict[str, Any]) -> RetainingLog:
        log = self._open(_name(request, "pchannel"))
        if not isinstance(log, RetainingLog):
            raise InvalidArgument("this log has no retention or checksums of its own: its broker manages them")
        return log

    @handles(calls.CLOCK)
    def _act_clock(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            return asdict(require_log_clock(self._service).view())

    @handles(calls.ACCEPT_CLOCK)
    def _act_accept_clock(self, request: dict[str, Any]) -> dict[str, Any]:
        with self.gate.admit():
            return asdict(require_log_clock(self._service).accept())

    @handles(calls.PING)
    def _act_ping(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid(), "stopping": self.gate.closed}

    @handles(calls.SHUTDOWN)
    def _act_shutdown(self, request: dict[str, Any]) -> dict[str, Any]:
        self.stop_asked.set()
        return {}


@contextmanager
def _typed() -> Iterator[None]:
    """Convert errors of the body so that the client raises them typed."""
    try:
        yield
    except flight.FlightError:
        raise
    except NotAccepted:
        raise flight.FlightUnavailableError("the log server is stopping") from None
    except MillraceError as error:
        raise flight_error(error) from None
    except Exception as error:
        _log.exception("a call failed unexpectedly")
        raise flight_error(error) from None


def _read_on(call: ServerCall, request: Mapping[str, Any]) -> str:
    """Return what a call is about, as a line of the access log names it: a collection, PChannel or group."""
    value = request.get(call.ticket or call.argument or "pchannel")
    if isinstance(value, Mapping):
        return ",".join(map(str, value))
    return "" if value is None or isinstance(value, bool) else str(value)


def _name(request: dict[str, Any], key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"the request needs {key!r}, a name")
    return value
