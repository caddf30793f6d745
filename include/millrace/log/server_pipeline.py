"""Appends of one producer that are sent before the earlier ones are acknowledged: the client's side of a pipelined stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Protocol, Self

import numpy as np
import pyarrow as pa

from millrace.errors import InvalidArgument, LogUnavailable
from millrace.log.server_link import AppendStream, ConnectionLost, Link, NotTaken
from millrace.message.ids import LogId

PIPELINE_APPENDS: Final = 256
PIPELINE_BYTES: Final = 32 << 20


class Connector(Protocol):
    """What finds the server: RemoteLogService."""

    deadline: float

    def link(self, deadline: float) -> Link: ...

    def drop_link(self, link: Link) -> None: ...


class PendingAppend:
    """An append on its way."""

    __slots__ = ("_error", "_ids", "_pipeline", "bytes")

    def __init__(self, pipeline: AppendPipeline, size: int) -> None:
        self._pipeline = pipeline
        self.bytes = size
        self._ids: list[LogId] | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._ids is not None or self._error is not None

    def result(self) -> list[LogId]:
        """Its ids, once durable; raises what RemoteLog.append raises. Waits at most the service's deadline."""
        self._pipeline._await(self)
        if self._error is not None:
            raise self._error
        assert self._ids is not None
        return self._ids

    def _settle(self, ids: list[LogId] | None, error: Exception | None) -> None:
        self._ids, self._error = ids, error


class AppendPipeline:
    """Appends of one producer, in order, sent before the earlier ones are acknowledged; the server merges them.

    There is no thread behind it: whoever waits for a result reads the acknowledgements up to his own. When the connection
    breaks, every append in flight fails as ambiguous and the next one goes out on a new connection. Nothing is ever sent
    twice, so order holds. Thread-safe.
    """

    def __init__(self, service: Connector, pchannel: str, *, appends: int, bytes: int) -> None:
        if appends < 1 or bytes < 1:
            raise InvalidArgument("a pipeline needs room for at least one append")
        self._service = service
        self._pchannel = pchannel
        self._appends = appends
        self._room = bytes
        self._lock = threading.RLock()
        self._pending: deque[PendingAppend] = deque()
        self._bytes = 0
        self._link: Link | None = None
        self._stream: AppendStream | None = None

    def submit(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> PendingAppend:
        """Send one atomic batch; waits only while the pipeline is full. Failures come out of `result`, but LogUnavailable
        is raised here where no server can be reached: then this batch is not in the log."""
        array = as_values(values)
        with self._lock:
            pending = PendingAppend(self, array.nbytes)
            if not len(array):
                pending._settle([], None)
                return pending
            while self._pending and (len(self._pending) >= self._appends or self._bytes + pending.bytes > self._room):
                self._receive()
            deadline = time.monotonic() + self._service.deadline
            stream = self._open(deadline)
            self._pending.append(pending)
            self._bytes += pending.bytes
            try:
                stream.send(array, deadline=deadline)
            except ConnectionLost as error:
                self._break(error)
            return pending

    def flush(self) -> None:
        """Wait for everything in flight; raises the first failure among it."""
        with self._lock:
            waiting = list(self._pending)
        for pending in waiting:
            pending.result()

    def close(self) -> None:
        """Give up the stream; what is in flight and unanswered is ambiguous. Call `flush` first. Idempotent."""
        with self._lock:
            self._break(ConnectionLost("the pipeline was closed"))

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

    def _open(self, deadline: float) -> AppendStream:
        if self._stream is not None and self._link is not None:
            try:
                self._link.check()
            except ConnectionLost as error:
                self._break(error)
        while self._stream is None or self._link is None:
            link = self._service.link(deadline)
            try:
                link.check()
                self._stream, self._link = AppendStream(link, self._pchannel, pipelined=True), link
            except ConnectionLost as error:
                self._service.drop_link(link)
                if time.monotonic() >= deadline:
                    raise LogUnavailable(f"no log server could be reached: {error}") from error
        return self._stream

    def _await(self, pending: PendingAppend) -> None:
        while not pending.done:
            with self._lock:
                if not pending.done:
                    self._receive()

    def _receive(self) -> None:
        """Take one acknowledgement, which is the oldest append's."""
        assert self._stream is not None
        try:
            ids = self._stream.receive(deadline=time.monotonic() + self._service.deadline)
        except ConnectionLost as error:
            self._break(error)
        except NotTaken:
            self._settle(None, LogUnavailable("the log server is stopping: this batch is not in the log"))
            if not self._pending:
                self._break(ConnectionLost("the log server is stopping"))
        except Exception as error:
            self._settle(None, error)
        else:
            self._settle(ids, None)

    def _settle(self, ids: list[LogId] | None, error: Exception | None) -> None:
        pending = self._pending.popleft()
        self._bytes -= pending.bytes
        pending._settle(ids, error)

    def _break(self, error: ConnectionLost) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._link is not None:
            if self._pending:
                self._service.drop_link(self._link)
            self._link = None
        while self._pending:
            self._settle(
                None,
                LogUnavailable(
                    f"whether this batch is in the log is unknown: the connection broke before its answer ({error})"
                ),
            )


def as_values(values: Sequence[bytes] | pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """The values of one append as Arrow holds them. Raises InvalidArgument for anything but bytes.

    Built from buffers: `pa.array` would import pandas, which costs a short-lived producer more than all its appends.
    """
    if isinstance(values, pa.LargeBinaryArray):
        return values
    try:
        data = b"".join(values)
        offsets = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, values), dtype=np.int64, count=len(values)), out=offsets[1:])
    except TypeError as error:
        raise InvalidArgument(f"the values of an append are bytes ({error})") from None
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
