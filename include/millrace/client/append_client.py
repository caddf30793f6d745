"""Appends through the machine's append host, from any process: results and typed rejections in milliseconds.

    with AppendClient.connect(settings.data_dir) as client:
        result = client.append("p0", encode_entry([message]), deadline=5.0).result()

The server is found through the data folder and started where none runs. An append is sent once. Where its answer was lost
on the way, LogUnavailable says that it is in the log once or not at all; DeadlineExceeded, that it was not decided in time.
In both cases the caller appends the same bytes again: messages with a producer sequence have one effect, and the repeat gets
the first one's result (law 8). Messages without a producer must not be repeated blindly; `attempts` is therefore 1 unless
the caller asks for more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa
from pyarrow import flight

from millrace.errors import InvalidArgument, LogUnavailable, MillraceError
from millrace.log.discovery import ServerLaunch
from millrace.log.remote import RemoteLogService
from millrace.log.server_link import CONNECTION_FAILURES, ConnectionLost, Link, NotTaken, lost
from millrace.log.server_wire import VALUE_SCHEMA, ack_from_bytes, to_json
from millrace.node.append_host import DEFAULT_DEADLINE, Entries, as_values
from millrace.node.append_host_outcome import AppendOutcome
from millrace.node.append_host_server import LAUNCH, NAME, TIMEOUT, tailed_rows
from millrace.node.tail_buffer import Evicted, Tailed

STREAM_APPENDS: Final = 256
STREAM_BYTES: Final = 32 << 20
_MARGIN: Final = 2.0
"""Seconds that a client waits beyond what it lets the server wait: the server's answer is the better one."""


class AppendClient:
    """Appends, ticks and tails through the append host of one data folder. Thread-safe."""

    def __init__(self, service: RemoteLogService) -> None:
        self.service = service
        self._idle: dict[tuple[int, str], list[_Stream]] = {}
        self._lock = threading.Lock()

    @classmethod
    def connect(
        cls,
        data_dir: str | Path,
        *,
        start: bool = True,
        deadline: float = DEFAULT_DEADLINE,
        idle_timeout: float | None = None,
        launch: ServerLaunch = LAUNCH,
    ) -> Self:
        """The client of the log in `<data_dir>/log`; `start` lets it start the server as `launch` says, which must hold
        the append host.

        Raises LogUnavailable where no server runs and `start` is False, or what keeps it from starting.
        """
        if idle_timeout is not None:
            launch = replace(launch, idle_timeout=idle_timeout)
        folder = Path(data_dir) / "log"
        return cls(RemoteLogService.connect(folder, start=start, deadline=deadline, launch=launch))

    def append(
        self,
        pchannel: str,
        entries: Entries,
        *,
        deadline: float | None = None,
        attempts: int = 1,
        retry_delay: float = 1.0,
    ) -> AppendOutcome:
        """Append entries as one atomic batch; what the chain decided about their messages, within `deadline` seconds
        (default: the one of `connect`).

        With `attempts` above 1, what failed with a retriable error is sent again after `retry_delay` seconds: only for
        messages with a producer sequence. Raises LogUnavailable and DeadlineExceeded (ambiguous, see above),
        ChannelNotFound, EntryTooLarge, or what parked the PChannel.
        """
        values = as_values(entries)
        end = time.monotonic() + (self.service.deadline if deadline is None else deadline)
        for attempt in range(1, attempts + 1):
            try:
                return self._append_once(pchannel, values, max(0.001, end - time.monotonic()))
            except MillraceError as error:
                if not error.retriable or attempt == attempts or time.monotonic() + retry_delay >= end:
                    raise
            threading.Event().wait(retry_delay)
        raise InvalidArgument(f"{attempts} attempts: give 1 or more")

    def append_stream(
        self, pchannel: str, *, appends: int = STREAM_APPENDS, bytes: int = STREAM_BYTES
    ) -> AppendOutcomeStream:
        """Appends of one producer, in order, sent before the earlier ones are decided: at most `appends` or `bytes` of them."""
        return AppendOutcomeStream(self, pchannel, appends=appends, bytes=bytes)

    def tick(self, pchannel: str, *, deadline: float = DEFAULT_DEADLINE) -> int:
        """Append a time tick; a tick up to which every earlier append is decided."""
        return int(self._act("tick", {"pchannel": pchannel, "deadline": deadline}, deadline)["tick"])

    def confirm(self, pchannel: str, tick: int, *, deadline: float = DEFAULT_DEADLINE) -> int:
        """Wait until everything up to `tick` is decided; the confirmed tick. Raises DeadlineExceeded."""
        return int(self._act("confirm", {"pchannel": pchannel, "tick": tick, "deadline": deadline}, deadline)["tick"])

    def describe(self, pchannel: str) -> dict[str, Any]:
        """Where the append host stands: position, last_tick, term, parked."""
        return self._act("describe", {"pchannel": pchannel}, self.service.deadline)

    def metrics(self) -> str:
        """The host's metrics in the Prometheus text format."""

        def call(link: Link, deadline: float) -> str:
            try:
                (found,) = link.client.do_action(
                    flight.Action(f"{NAME}/metrics", b""), link.options(self.service.deadline)
                )
            except CONNECTION_FAILURES as error:
                raise lost(error) from error
            return str(found.body.to_pybytes().decode())

        return self.service.repeated(call, seconds=self.service.deadline)

    def restart(self, pchannel: str) -> None:
        """Have the host follow the PChannel anew, once what parked it is cured."""
        self._act("restart", {"pchannel": pchannel}, self.service.deadline)

    def tail(self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 8 << 20) -> Tailed | Evicted:
        """The messages behind `after_tick` from the host's buffer; waits up to `timeout` seconds (at most 10) for some."""
        request = {
            "extension": NAME,
            "tail": pchannel,
            "after": after_tick,
            "timeout": timeout,
            "max_bytes": max_bytes,
        }
        batches, metadata = self.service.repeated(
            lambda link, deadline: link.get(request, timeout=timeout + self.service.deadline),
            seconds=self.service.deadline + timeout,
        )
        if "evicted" in metadata:
            return Evicted(int(metadata["evicted"]))
        return Tailed([tailed_rows(batch) for batch in batches if batch.num_rows], int(metadata["confirmed"]))

    def close(self) -> None:
        """Release the connection; the server goes on. Idempotent."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for streams in idle.values():
            for stream in streams:
                stream.close()
        self.service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _act(self, name: str, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        return self.service.repeated(
            lambda link, deadline: link.act(f"{NAME}/{name}", request, timeout=seconds + _MARGIN), seconds=seconds
        )

    def _append_once(self, pchannel: str, values: pa.LargeBinaryArray, seconds: float) -> AppendOutcome:
        def call(link: Link, deadline: float) -> AppendOutcome:
            key = (id(link), pchannel)
            with self._lock:
                idle = self._idle.get(key)
                stream = idle.pop() if idle else None
            if stream is None:
                self._forget_others(link)
                stream = _Stream(link, pchannel, pipelined=False)
            keep = False
            try:
                stream.send(values, deadline=deadline)
                outcome = stream.receive(deadline=deadline + _MARGIN)
                keep = True
                return outcome
            except MillraceError:
                keep = True
                raise
            finally:
                if keep:
                    with self._lock:
                        self._idle.setdefault(key, []).append(stream)
                else:
                    stream.close()

        return self.service.sent_once(
            call, seconds=seconds, what=f"whether this append to {pchannel} is in the log is unknown"
        )

    def _forget_others(self, link: Link) -> None:
        """Close idle streams to servers that were found before `link`."""
        with self._lock:
            old = [stream for streams in self._idle.values() for stream in streams if stream.link is not link]
            self._idle = {key: streams for key, streams in self._idle.items() if streams and streams[0].link is link}
        for stream in old:
            stream.close()


class _Stream:
    """One open append stream: appends go out and answers come in, in the same order; one thread at a time."""

    def __init__(self, link: Link, pchannel: str, *, pipelined: bool) -> None:
        self.link = link  # kept alive as long as the stream is, so that its id names it
        command = to_json({"extension": NAME, "pchannel": pchannel, "pipelined": pipelined})
        try:
            self._writer, self._reader = link.client.do_exchange(
                flight.FlightDescriptor.for_command(command), link.options(None)
            )
            self._writer.begin(VALUE_SCHEMA)
        except CONNECTION_FAILURES as error:
            raise lost(error, sent=False) from error

    def send(self, values: pa.LargeBinaryArray, *, deadline: float) -> None:
        """Send one append that the server may wait for until `deadline` (monotonic). Raises ConnectionLost."""
        batch = pa.RecordBatch.from_arrays([values], schema=VALUE_SCHEMA)
        seconds = TIMEOUT.pack(max(0.001, deadline - time.monotonic()))
        with self.link.watchdog.guard(self._reader.cancel, deadline + _MARGIN):
            try:
                self._writer.write_with_metadata(batch, pa.py_buffer(seconds))
            except CONNECTION_FAILURES as error:
                raise lost(error) from error

    def receive(self, *, deadline: float) -> AppendOutcome:
        """The next answer. Raises what that append raised, NotTaken or ConnectionLost."""
        with self.link.watchdog.guard(self._reader.cancel, deadline):
            try:
                chunk = self._reader.read_chunk()
            except CONNECTION_FAILURES as error:
                raise lost(error) from error
        if chunk.data is not None:
            return AppendOutcome(chunk.data)
        ack_from_bytes(chunk.app_metadata.to_pybytes() if chunk.app_metadata is not None else b"")
        raise ConnectionLost("the append host answered with nothing")

    def close(self) -> None:
        """End the stream. Idempotent; never raises for a stream that broke."""
        try:
            self._reader.cancel()
            self._writer.close()
        except CONNECTION_FAILURES:
            pass  # it is gone already, which is all we want


class AppendFuture:
    """An append on its way through an :class:`AppendOutcomeStream`."""

    __slots__ = ("_error", "_outcome", "_stream", "bytes")

    def __init__(self, stream: AppendOutcomeStream, size: int) -> None:
        self._stream = stream
        self.bytes = size
        self._outcome: AppendOutcome | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether its answer has been read."""
        return self._outcome is not None or self._error is not None

    def outcome(self) -> AppendOutcome:
        """Its decisions, once they are made; raises what :meth:`AppendClient.append` raises."""
        self._stream.wait_for(self)
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def settle(self, outcome: AppendOutcome | None, error: Exception | None) -> None:
        self._outcome, self._error = outcome, error


class AppendOutcomeStream:
    """A pipelined producer. There is no thread behind it: whoever waits for an outcome reads the answers up to his own.

    When the connection breaks, every append in flight fails as ambiguous (LogUnavailable) and the next one goes out on a new
    connection. Nothing is sent twice; the caller repeats what failed, in order, with the same sequences. Thread-safe.
    """

    def __init__(self, client: AppendClient, pchannel: str, *, appends: int, bytes: int) -> None:
        if appends < 1 or bytes < 1:
            raise InvalidArgument("a stream needs room for at least one append")
        self._service = client.service
        self._pchannel = pchannel
        self._appends = appends
        self._room = bytes
        self._lock = threading.RLock()
        self._pending: deque[AppendFuture] = deque()
        self._bytes = 0
        self._stream: _Stream | None = None

    def submit(self, entries: Entries) -> AppendFuture:
        """Send one atomic batch; waits only while the stream is full. Failures come out of the future, but LogUnavailable
        is raised here where no server can be reached: then this batch is not in the log."""
        values = as_values(entries)
        with self._lock:
            future = AppendFuture(self, values.nbytes)
            while self._pending and (len(self._pending) >= self._appends or self._bytes + future.bytes > self._room):
                self._receive()
            deadline = time.monotonic() + self._service.deadline
            stream = self._open(deadline)
            self._pending.append(future)
            self._bytes += future.bytes
            try:
                stream.send(values, deadline=deadline)
            except ConnectionLost as error:
                self._break(error)
            return future

    def wait_for(self, future: AppendFuture) -> None:
        """Read answers until `future` has its own."""
        while not future.done:
            with self._lock:
                if not future.done:
                    self._receive()

    def flush(self) -> None:
        """Wait for everything in flight; raises the first failure among it (a rejection is none)."""
        with self._lock:
            waiting = list(self._pending)
        for future in waiting:
            future.outcome()

    def close(self) -> None:
        """Give up the stream; what is in flight and unanswered is ambiguous. Call `flush` first. Idempotent."""
        with self._lock:
            self._break(ConnectionLost("the stream was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def _open(self, deadline: float) -> _Stream:
        while self._stream is None:
            link = self._service.link(deadline)
            try:
                link.check()
                self._stream = _Stream(link, self._pchannel, pipelined=True)
            except ConnectionLost as error:
                self._service.drop_link(link)
                if time.monotonic() >= deadline:
                    raise LogUnavailable(f"no log server could be reached: {error}") from error
        return self._stream

    def _receive(self) -> None:
        """Take one answer, which is the oldest append's."""
        assert self._stream is not None
        try:
            outcome = self._stream.receive(deadline=time.monotonic() + self._service.deadline + _MARGIN)
        except ConnectionLost as error:
            self._break(error)
        except NotTaken:
            self._settle(None, LogUnavailable("the log server is stopping: this batch is not in the log"))
            if not self._pending:
                self._break(ConnectionLost("the log server is stopping"))
        except Exception as error:
            self._settle(None, error)
        else:
            self._settle(outcome, None)

    def _settle(self, outcome: AppendOutcome | None, error: Exception | None) -> None:
        future = self._pending.popleft()
        self._bytes -= future.bytes
        future.settle(outcome, error)

    def _break(self, error: ConnectionLost) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
            if self._pending:
                self._service.drop_link(stream.link)
        while self._pending:
            self._settle(
                None,
                LogUnavailable(
                    f"whether this batch is in the log is unknown: the connection broke before its answer ({error})"
                ),
            )
