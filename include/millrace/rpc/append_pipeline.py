"""Pipelined appends of one producer: appends are sent before earlier ones are answered. The client's side.

The log answers with ids (RemoteLog.pipeline), the append host with the chain's decisions (AppendClient.append_stream).
The pipeline is the same for both.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Generic, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from millrace.base.deadline import Deadline
from millrace.base.errors import AssignmentStale, InvalidArgument, LogUnavailable, MillraceError, ServerStopping
from millrace.rpc.link import ConnectionLost, Link, NotAccepted

PIPELINE_APPENDS: Final = 256
PIPELINE_BYTES: Final = 32 << 20

T = TypeVar("T")
_Answer = TypeVar("_Answer", covariant=True)


class Connector(Protocol):
    """Finds the server: RemoteLogService, or a ChannelRoute (millrace.client.channel_router)."""

    deadline: float

    def link(self, deadline: Deadline) -> Link: ...

    def drop_link(self, link: Link) -> None: ...

    def mark_stale(self) -> None:
        """Note that the last server refused because it does not own the PChannel.

        The next `link` looks up the owner.
        """
        ...


class AnswerStream(Protocol[_Answer]):
    """One open stream: appends are sent and answers received in the same order."""

    @property
    def ended(self) -> bool:
        """Whether the stream itself ended, so that an error concerns it and not an append."""
        ...

    def send(self, values: pa.LargeBinaryArray, *, deadline: Deadline) -> None: ...

    def receive(self, *, deadline: Deadline) -> _Answer: ...

    def close(self) -> None: ...


class AppendFuture(Generic[T]):
    """An append in flight."""

    __slots__ = ("_answers", "_error", "_pipeline", "bytes")

    def __init__(self, pipeline: AppendPipeline[T], size: int) -> None:
        self._pipeline = pipeline
        self.bytes = size
        self._answers: list[T] = []
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether its answer has been read."""
        return bool(self._answers) or self._error is not None

    def result(self) -> T:
        """Return its answer; raises what an append without a pipeline raises. Waits at most the service's deadline."""
        self._pipeline.wait_for(self)
        if self._error is not None:
            raise self._error
        return self._answers[0]

    def settle(self, answer: T) -> None:
        self._answers.append(answer)

    def fail(self, error: Exception) -> None:
        self._error = error


class AppendPipeline(Generic[T]):
    """Appends of one producer, in order, sent before earlier ones are answered; the server merges them. Thread-safe.

    There is no thread: a caller that waits for a result reads all answers up to its own. If the connection breaks,
    every append in flight fails as ambiguous, and the next one uses a new connection. Nothing is ever sent twice, so
    order holds. At most `appends` appends of `bytes` bytes in total are in flight. An answer may take `margin` seconds
    longer than the service's deadline.
    """

    def __init__(
        self,
        service: Connector,
        open_stream: Callable[[Link], AnswerStream[T]],
        *,
        appends: int = PIPELINE_APPENDS,
        bytes: int = PIPELINE_BYTES,
        margin: float = 0.0,
    ) -> None:
        if appends < 1 or bytes < 1:
            raise InvalidArgument("a pipeline needs room for at least one append")
        self._service = service
        self._open_stream = open_stream
        self._appends = appends
        self._room = bytes
        self._margin = margin
        self._lock = threading.RLock()
        self._pending: deque[AppendFuture[T]] = deque()
        self._bytes = 0
        self._link: Link | None = None
        self._stream: AnswerStream[T] | None = None
        self._answered = False
        """Whether the stream has had an answer."""

    def submit(self, values: bytes | Sequence[bytes] | pa.LargeBinaryArray) -> AppendFuture[T]:
        """Send one atomic batch; waits only while the pipeline is full.

        Failures are raised by `result`. Only LogUnavailable is raised here, if no server can be reached: then this
        batch is not in the log.
        """
        array = as_values(values)
        with self._lock:
            pending = AppendFuture(self, array.nbytes)
            while self._pending and (len(self._pending) >= self._appends or self._bytes + pending.bytes > self._room):
                self._receive()
            deadline = Deadline.after(self._service.deadline)
            stream = self._open(deadline)
            self._pending.append(pending)
            self._bytes += pending.bytes
            try:
                stream.send(array, deadline=deadline)
            except ConnectionLost as error:
                self._break(error)
            except MillraceError as error:
                self._ended(error)
            return pending

    def wait_for(self, pending: AppendFuture[T]) -> None:
        """Read answers until `pending` has its own."""
        while not pending.done:
            with self._lock:
                if not pending.done:
                    self._receive()

    def flush(self) -> None:
        """Wait for everything in flight; raise the first failure."""
        with self._lock:
            waiting = list(self._pending)
        for pending in waiting:
            pending.result()

    def close(self) -> None:
        """Close the stream; appends without an answer are ambiguous. Call `flush` first. Idempotent."""
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

    def _open(self, deadline: Deadline) -> AnswerStream[T]:
        if self._stream is not None and self._link is not None:
            try:
                self._link.check()
            except ConnectionLost as error:
                self._break(error)
        while self._stream is None:
            link = self._service.link(deadline)
            try:
                link.check()
                self._stream, self._link, self._answered = self._open_stream(link), link, False
            except ConnectionLost as error:
                self._service.drop_link(link)
                if deadline.expired():
                    raise LogUnavailable(f"no log server could be reached: {error}") from error
        return self._stream

    def _receive(self) -> None:
        """Read one answer, which is the oldest append's."""
        assert self._stream is not None
        try:
            answer = self._stream.receive(deadline=Deadline.after(self._service.deadline + self._margin))
        except ConnectionLost as error:
            self._break(error)
        except NotAccepted:
            self._oldest().fail(ServerStopping("the log server is stopping: this batch is not in the log"))
            if not self._pending:
                self._break(ConnectionLost("the log server is stopping"))
        except AssignmentStale as error:
            # Later appends in flight may be refused, too, or not: the caller resends them with the same sequences.
            self._oldest().fail(error)
            self._link = None  # the connection works, and others may use it
            self._break(ConnectionLost(str(error)))
            self._service.mark_stale()
        except Exception as error:
            if self._stream.ended:
                self._ended(error)
                return
            self._answered = True
            self._oldest().fail(error)
        else:
            self._answered = True
            self._oldest().settle(answer)

    def _ended(self, error: Exception) -> None:
        """Handle the end of the stream by the server.

        If it answered nothing on the stream, it refused the stream as a whole (too many, or not allowed): every append
        fails with that error. Otherwise appends in flight after the oldest are ambiguous.
        """
        self._oldest().fail(error)
        while self._pending and not self._answered:
            self._oldest().fail(error)
        self._break(ConnectionLost(str(error)))

    def _oldest(self) -> AppendFuture[T]:
        """Remove and return the oldest append in flight."""
        pending = self._pending.popleft()
        self._bytes -= pending.bytes
        return pending

    def _break(self, error: ConnectionLost) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        link, self._link = self._link, None
        in_use = bool(self._pending)
        while self._pending:  # before anything that may fail: each has a waiting caller
            self._oldest().fail(
                LogUnavailable(
                    f"whether this batch is in the log is unknown: the connection broke before the answer ({error})"
                )
            )
        if link is not None and in_use:
            self._service.drop_link(link)


Entries: TypeAlias = bytes | Sequence[bytes] | pa.LargeBinaryArray
"""The argument of one append."""


def as_values(values: Entries) -> pa.LargeBinaryArray:
    """Return the value or values of one append as an Arrow array. Raises InvalidArgument for anything but bytes.

    Built from buffers: `pa.array` would import pandas, which costs a short-lived producer more than all its appends.
    """
    if isinstance(values, pa.LargeBinaryArray):
        return values
    if isinstance(values, bytes):
        values = [values]
    try:
        data = b"".join(values)
        offsets = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, values), dtype=np.int64, count=len(values)), out=offsets[1:])
    except TypeError as error:
        raise InvalidArgument(f"the values of an append are bytes ({error})") from None
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
