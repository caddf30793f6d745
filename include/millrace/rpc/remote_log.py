"""The log through its server: a LogService for any number of processes.

    with RemoteLogService.connect(folder) as service:
        log = service.open("p0")
        ids = log.append([b"..."])

The service finds the server through the folder, starts it if none runs, and finds or starts it again after it dies.
Reads and idempotent calls are repeated until the deadline. An append is sent once: if its answer is lost,
LogUnavailable says that it is in the log once or not at all. The caller resolves this by the producer's sequence; the
next append works again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import pyarrow as pa

from millrace.base.backoff import jittered
from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, LogUnavailable, ServerStopping
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogDescription, LogEntries, StampFloor, VerifyReport
from millrace.rpc import calls
from millrace.rpc.append_pipeline import PIPELINE_APPENDS, PIPELINE_BYTES, AppendPipeline, Connector, as_values
from millrace.rpc.calls import Repeat, ServerCall
from millrace.rpc.discovery import ServerRecord, find_or_start, running_server
from millrace.rpc.launch import ServerLaunch
from millrace.rpc.link import AppendStream, ConnectionLost, Link, NotAccepted, Watchdog
from millrace.rpc.wire import DEFAULT_DEADLINE, ClockView, log_id, optional_log_id

_PAUSE: Final = 0.02

_LEAST: Final = 0.05
"""Minimum timeout of a call in seconds, however little of its deadline is left."""

_T = TypeVar("_T")


class RemoteLogService(Closeable):
    """A LogService whose log is in another process. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        start: bool,
        deadline: float,
        launch: ServerLaunch,
        record: ServerRecord | None = None,
    ) -> None:
        self._folder = folder
        self._record = record
        self._start = start
        self._launch = launch
        self.deadline = deadline
        self._watchdog = Watchdog()
        self._link: Link | None = None
        self._shutdowns = 0
        """Counts the shutdowns: a call that one of them ends starts no other server."""
        self._linking = threading.Lock()
        self._closed = False

    @classmethod
    def connect(
        cls,
        data_dir: str | Path,
        *,
        start: bool = True,
        deadline: float = DEFAULT_DEADLINE,
        launch: ServerLaunch | None = None,
    ) -> Self:
        """Connect to the log in `data_dir`.

        With `start`, start the server if none runs. `deadline` bounds each call, in seconds.

        Raises LogUnavailable if no server runs and `start` is False, or the error that kept the server from starting.
        """
        service = cls(Path(data_dir).absolute(), start=start, deadline=deadline, launch=launch or ServerLaunch())
        service.link(Deadline.after(deadline))
        return service

    @classmethod
    def at(
        cls,
        address: str,
        *,
        token: str,
        roots: str | Path = "",
        tls_name: str = "",
        deadline: float = DEFAULT_DEADLINE,
    ) -> Self:
        """Connect to the log at an address on any host, ``grpc://host:port`` or ``grpc+tls://host:port``.

        `roots` is a PEM file with trusted certificates (default: the system's); `tls_name` is the name in the server's
        certificate if that is not the host. The server is neither started nor stopped from here.

        Raises LogUnavailable, InvalidArgument.
        """
        if not address.startswith(("grpc://", "grpc+tls://")):
            raise InvalidArgument(
                f"{address!r} is not the address of a log server: write grpc://host:port or grpc+tls://host:port"
            )
        record = ServerRecord.remote(address, token, roots=str(roots), tls_name=tls_name)
        service = cls(Path(), start=False, deadline=deadline, launch=ServerLaunch(), record=record)
        service.link(Deadline.after(deadline))
        return service

    def create(self, pchannel: str) -> None:
        """Create an empty log. Raises ChannelExists; LogUnavailable if it is unknown whether it was created."""
        self.call(calls.CREATE, {"pchannel": pchannel})

    def open(self, pchannel: str) -> RemoteLog:
        """Return a handle to an existing log. Raises ChannelNotFound."""
        self.call(calls.OPEN, {"pchannel": pchannel})
        return RemoteLog(self, pchannel)

    def names(self) -> list[str]:
        """Return the PChannels, sorted."""
        return [str(name) for name in self.call(calls.NAMES, {})["names"]]

    def ends(self, pchannels: Iterable[str]) -> dict[str, LogId]:
        """Return the position after the last entry of each PChannel in one call.

        Raises ChannelNotFound; InvalidArgument from a server of an earlier build.
        """
        found = self.call(calls.ENDS, {"pchannels": list(pchannels)})["ends"]
        return {str(name): log_id(end) for name, end in found.items()}

    def drop(self, pchannel: str) -> None:
        """Delete a log. Raises ChannelNotFound; LogUnavailable if it is unknown whether it was deleted."""
        self.call(calls.DROP, {"pchannel": pchannel})

    def groups(self) -> list[str]:
        """Return the consumer groups, sorted."""
        return [str(name) for name in self.call(calls.GROUPS, {})["groups"]]

    def group_position(self, group: str, pchannel: str) -> LogId | None:
        """Return a group's position in a log; None if it never moved there. Raises ChannelNotFound."""
        return optional_log_id(self.call(calls.GROUP_POSITION, {"group": group, "pchannel": pchannel})["position"])

    def move_group(self, group: str, pchannel: str, position: LogId) -> None:
        """Move a group, durably. Raises ChannelNotFound, InvalidArgument, LogUnavailable (it may have moved)."""
        self.call(calls.MOVE_GROUP, {"group": group, "pchannel": pchannel, "position": position})

    def hold_group(self, group: str, pchannel: str, holder: str, *, seconds: float) -> None:
        """Hold a group's channel. Raises GroupBusy, InvalidArgument, LogUnavailable."""
        self.call(calls.HOLD_GROUP, {"group": group, "pchannel": pchannel, "holder": holder, "seconds": seconds})

    def drop_group(self, group: str) -> None:
        """Delete a group with all its positions."""
        self.call(calls.DROP_GROUP, {"group": group})

    def clock(self, *, accept: bool = False) -> ClockView:
        """Return the clock that stamps entries; with `accept`, the server accepts the wall clock, however far it leapt.

        Raises InvalidArgument if brokers stamp the entries.
        """
        return ClockView(**self.call(calls.ACCEPT_CLOCK if accept else calls.CLOCK, {}))

    def ping(self) -> dict[str, Any]:
        """Return the server's process id (`pid`) and whether it is stopping."""
        return self.call(calls.PING, {})

    def shutdown(self, *, timeout: float = DEFAULT_DEADLINE) -> None:
        """Stop the server of the folder cleanly and wait until its process is gone. Starts none for that.

        The server need not be the one that this service last used, which may have died. A later call would start
        another.
        """
        if self._record is not None:
            raise InvalidArgument(f"the log server at {self._record.address} runs on another host: stop it there")
        deadline = Deadline.after(timeout)
        self._shutdowns += 1
        cached = self._link
        if cached is not None:
            self.drop_link(cached)
        record = running_server(self._folder)
        if record is None:
            return
        link = Link(record, self._watchdog)
        try:
            link.act(calls.SHUTDOWN.name, {}, timeout=timeout)
        except ConnectionLost:
            pass  # it is stopping; the loop below waits for that
        finally:
            link.close()
        while record.alive():
            if not deadline.pause(jittered(_PAUSE)):
                raise LogUnavailable(f"the log server (process {record.pid}) was told to stop but still runs")

    def close(self) -> None:
        """Close the connection; the server keeps running. Idempotent."""
        with self._linking:
            self._closed = True
            link, self._link = self._link, None
        if link is not None:
            link.close()
        self._watchdog.close()

    # --- for RemoteLog, and for clients of the server's extensions ----------------------------------------------------

    def link(self, deadline: Deadline) -> Link:
        """Return the connection to the live server, found or started by `deadline`."""
        link = self._link
        if link is not None:
            return link
        while True:
            with self._linking:
                if self._closed:
                    raise LogUnavailable("this log service is closed: connect again")
                if self._link is not None:
                    return self._link
                record = self._record or find_or_start(
                    self._folder, start=self._start, deadline=deadline, launch=self._launch
                )
                link = Link(record, self._watchdog)
                try:
                    stopping = link.act(calls.PING.name, {}, timeout=deadline.remaining(minimum=0.1))["stopping"]
                    reason = "it is stopping"
                except ConnectionLost as error:
                    stopping, reason = True, str(error)
                if not stopping:
                    self._link = link
                    return link
                link.close()
            if not deadline.pause(jittered(_PAUSE)):
                raise LogUnavailable(f"the log server at {record.address} does not answer: {reason}")

    def drop_link(self, link: Link) -> None:
        """Drop a failed connection; the next call makes another."""
        with self._linking:
            if self._link is link:
                self._link = None
        link.close()

    def call(
        self, call: ServerCall, request: Mapping[str, Any], *, seconds: float | None = None, margin: float = 0.0
    ) -> dict[str, Any]:
        """Make one call of the registry, an action, within `seconds` (default: the service's deadline).

        The call is repeated if its answer is lost, unless its entry forbids that; then LogUnavailable says that its
        effect is unknown. The client waits `margin` seconds longer than the server, whose own error is more precise.
        """
        assert call.arguments >= request.keys(), f"{call.key} takes {sorted(call.arguments)}, not {sorted(request)}"
        limit = self.deadline if seconds is None else seconds

        def act(link: Link, deadline: Deadline) -> dict[str, Any]:
            timeout = limit + margin if margin else deadline.remaining(minimum=_LEAST)
            return link.act(call.name, dict(request), timeout=timeout)

        if call.repeat is Repeat.NEVER:
            return self.call_once(act, seconds=limit, what=f"whether {call.name} took effect is unknown")
        return self.call_with_retry(act, seconds=limit)

    def call_with_retry(self, call: Callable[[Link, Deadline], _T], *, seconds: float) -> _T:
        """Call `call(link, deadline)`, again on a new connection if it is lost, for at most `seconds`."""
        deadline, shutdowns = Deadline.after(seconds), self._shutdowns
        while True:
            link = self.link(deadline)
            try:
                link.check()
                return call(link, deadline)
            except ConnectionLost as error:
                self.drop_link(link)
                if self._shutdowns != shutdowns:
                    raise LogUnavailable("this client has shut the log server down meanwhile: call again") from error
                if not deadline.pause(jittered(_PAUSE)):
                    raise LogUnavailable(f"the log server did not answer within {seconds:.1f} s: {error}") from error

    def call_once(self, call: Callable[[Link, Deadline], _T], *, seconds: float, what: str) -> _T:
        """Call `call(link, deadline)`; call the next server only if a stopping one certainly did not accept it.

        Raises LogUnavailable if the answer was lost, and after `seconds`.
        """
        deadline = Deadline.after(seconds)
        while True:
            try:
                return send_once(self, call, deadline=deadline, what=what)
            except ServerStopping as error:
                if not deadline.pause(jittered(_PAUSE)):
                    raise LogUnavailable(f"not done: no log server accepted the call within {seconds:.1f} s") from error

    def mark_stale(self) -> None:
        """Do nothing: there is one server, and the next call asks it again (implements Connector)."""


def send_once(connector: Connector, call: Callable[[Link, Deadline], _T], *, deadline: Deadline, what: str) -> _T:
    """Call `call(link, deadline)` once, on a connection that works.

    One that breaks before anything is sent is replaced.

    Raises ServerStopping if the server accepted nothing, LogUnavailable if the answer was lost or no server was found.
    """
    while True:
        link = connector.link(deadline)
        try:
            link.check()
            return call(link, deadline)
        except NotAccepted as error:
            connector.drop_link(link)
            raise ServerStopping("the log server is stopping: it accepted nothing of this call") from error
        except ConnectionLost as error:
            connector.drop_link(link)
            if error.sent:
                raise LogUnavailable(
                    f"{what}: the connection to the log server broke before the answer ({error})"
                ) from error
            if deadline.expired():
                raise LogUnavailable(f"not done: no log server could be reached in time ({error})") from error


class RemoteLog:
    """One PChannel's log through the server. Thread-safe: each appending thread uses a stream of its own."""

    def __init__(self, service: RemoteLogService, pchannel: str) -> None:
        self._open: RemoteLogService | None = service
        self.pchannel = pchannel

    @property
    def _service(self) -> RemoteLogService:
        service = self._open
        if service is None:
            raise LogUnavailable("this handle is closed: open the log again")
        return service

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> Sequence[LogId]:
        """Append one atomic batch and return its ids once all are durable.

        If the server certainly accepted nothing, the batch is sent again.

        Raises EntryTooLarge (nothing is appended). Raises LogUnavailable if the answer was lost: the batch is in the
        log once or not at all.
        """
        array = as_values(values)
        if not len(array):
            return []

        def send(link: Link, deadline: Deadline) -> Sequence[LogId]:
            with link.stream(self.pchannel) as stream:
                stream.send(array, deadline=deadline)
                return stream.receive(deadline=deadline)

        return self._service.call_once(
            send, seconds=self._service.deadline, what="whether this batch is in the log is unknown"
        )

    def pipeline(
        self, *, appends: int = PIPELINE_APPENDS, bytes: int = PIPELINE_BYTES
    ) -> AppendPipeline[Sequence[LogId]]:
        """Open a pipeline: appends in order, at most `appends` of them with `bytes` bytes in total in flight."""

        def stream(link: Link) -> AppendStream:
            return AppendStream(link, self.pchannel, pipelined=True)

        return AppendPipeline(self._service, stream, appends=appends, bytes=bytes)

    def read(
        self,
        position: LogId,
        *,
        end: LogId | None = None,
        max_bytes: int = 64 << 20,
        timeout: float = 0.0,
    ) -> LogEntries:
        """Read entries with position <= id < end, as millrace.log.protocol.Log.read specifies.

        Raises PositionTruncated, ChannelNotFound, LogUnavailable.
        """
        waited_until = Deadline.after(timeout)
        while True:
            wait = waited_until.remaining()
            request = {
                "pchannel": self.pchannel,
                "position": position,
                "end": end,
                "max_bytes": max_bytes,
                "timeout": wait,
            }
            batches, metadata = self._service.call_with_retry(
                lambda link, deadline, request=request: link.get(request, timeout=deadline.remaining(minimum=_LEAST)),  # type: ignore[misc]
                seconds=self._service.deadline + wait,
            )
            rows = [batch for batch in batches if batch.num_rows]
            following = log_id(metadata["next"])
            if rows or wait <= 0 or (end is not None and following >= end):
                return LogEntries(_joined(rows), following)
            if metadata["busy"]:
                # The server has no thread left for the wait: ask again soon.
                waited_until.pause(_PAUSE)

    def truncate(self, position: LogId) -> int:
        """Remove everything before `position`; return the bytes freed.

        If the connection broke, these are the bytes freed by the last attempt.
        """
        return int(self._service.call(calls.TRUNCATE, {"pchannel": self.pchannel, "position": position})["freed"])

    def describe(self) -> LogDescription:
        """Return the log's begin, end and size."""
        found = self._service.call(calls.DESCRIBE, {"pchannel": self.pchannel})
        return LogDescription(begin=log_id(found["begin"]), end=log_id(found["end"]), bytes=int(found["bytes"]))

    def end(self) -> LogId:
        """Return the position after the last entry."""
        return self.describe().end

    def stamp_floor(self) -> StampFloor | None:
        """Return what the server's log promises about later stamps.

        None if it promises nothing, or if a server of an earlier build does not know the call.
        """
        try:
            found = self._service.call(calls.FLOOR, {"pchannel": self.pchannel})
        except InvalidArgument:
            return None
        return StampFloor(log_id(found["end"]), int(found["ms"])) if found else None

    def enforce_retention(self, *, allowed: LogId) -> int:
        """Remove whole files beyond the server's retention settings; return the bytes freed.

        Nothing from `allowed` on is removed.
        """
        return int(self._service.call(calls.RETAIN, {"pchannel": self.pchannel, "allowed": allowed})["freed"])

    def verify(self, *, seconds: float = 3600.0) -> VerifyReport:
        """Verify every checksum of the log, which may take up to `seconds`. Raises LogUnavailable after that."""

        found = self._service.call(calls.VERIFY, {"pchannel": self.pchannel}, seconds=seconds)
        return VerifyReport(**found | {"first_bad": optional_log_id(found["first_bad"])})

    def close(self) -> None:
        """Refuse calls from now on; other handles keep working. Idempotent."""
        self._open = None


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if not batches:
        return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in ENTRY_SCHEMA], schema=ENTRY_SCHEMA)
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
