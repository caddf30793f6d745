"""The server's side of an append stream: batches in, acknowledgements out in the same order.

A stream is plain or pipelined. On a plain stream the client waits for each acknowledgement, so one thread reads,
appends and answers. On a pipelined stream a second thread reads ahead, and the batches that arrived while the log was
busy are merged into one append, in order. One disk sync then covers many appends of one client, as the log's group
commit covers several clients.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import pyarrow as pa
from pyarrow import flight

from millrace.base.errors import InvalidArgument, LogUnavailable, MillraceError
from millrace.message.ids import LogId
from millrace.rpc.wire import VALUE_SCHEMA, NotAccepted, ack_to_bytes, failure_to_bytes, is_valid_batch

MERGE_BYTES: Final = 4 << 20
"""Appends of one stream are merged up to this size; beyond it a copy costs more than a disk sync."""
READ_AHEAD_BYTES: Final = 64 << 20
"""Bytes buffered per stream before the server stops reading from it."""

_log = logging.getLogger(__name__)


class AppendBatch(Protocol):
    """Appends one atomic batch; returns its ids. Raises NotAccepted if the server is stopping."""

    def __call__(self, values: pa.LargeBinaryArray, *, alone: bool = True) -> Sequence[LogId]:
        """With `alone` False the batch is several merged appends. If it is refused, each is appended separately."""
        ...


def serve_appends(
    reader: flight.MetadataRecordBatchReader,
    writer: flight.MetadataRecordBatchWriter,
    append: AppendBatch,
    *,
    pipelined: bool,
    cancelled: Callable[[], bool],
) -> None:
    """Serve one stream until its client ends it or disconnects.

    Nothing is appended once `cancelled` returns True: the client has abandoned its unanswered appends and may continue
    on another server, where a late append would follow its successors.
    """
    if not pipelined:
        while (batch := _next(reader)) is not None and not cancelled():
            writer.write_metadata(pa.py_buffer(_appended(append, batch)))
        return
    inbox = _Inbox()
    ahead = threading.Thread(target=_read_ahead, args=(reader, inbox), name="append-stream", daemon=True)
    ahead.start()
    try:
        while (batches := inbox.take()) and not cancelled():
            for answer in _merged(append, batches):
                writer.write_metadata(pa.py_buffer(answer))
    finally:
        inbox.abandon()
        # ends with the stream: a failed write means failed reads too; the reader must not outlive this call
        ahead.join()


def _next(reader: flight.MetadataRecordBatchReader) -> pa.RecordBatch | None:
    """Return the next append of the stream, None at its end. Waits while the client keeps the stream open."""
    try:
        batch = reader.read_chunk().data
    except (StopIteration, flight.FlightError, pa.ArrowException, OSError):
        return None  # ended or disconnected: unanswered appends are ambiguous to the client, as documented
    if batch is None:
        return pa.RecordBatch.from_arrays([pa.nulls(0, pa.large_binary())], schema=VALUE_SCHEMA)
    return (
        batch if is_valid_batch(batch) else pa.RecordBatch.from_arrays([], names=[])
    )  # refused later as not an append


def _values(batch: pa.RecordBatch) -> pa.LargeBinaryArray:
    if batch.schema.names != VALUE_SCHEMA.names or batch.schema.types != VALUE_SCHEMA.types:
        raise InvalidArgument("an append is a record batch with the one column `value` of large_binary")
    values = batch.column(0)
    assert isinstance(values, pa.LargeBinaryArray)
    if values.null_count:
        raise InvalidArgument("an entry cannot be null")
    return values


def _answer(work: Callable[[], bytes]) -> bytes:
    try:
        return work()
    except (MillraceError, NotAccepted) as error:
        return failure_to_bytes(error)
    except Exception as error:
        _log.exception("an append failed unexpectedly")
        return failure_to_bytes(error)


def _appended(append: AppendBatch, batch: pa.RecordBatch) -> bytes:
    return _answer(lambda: ack_to_bytes(append(_values(batch))))


def _merged(append: AppendBatch, batches: list[pa.RecordBatch]) -> list[bytes]:
    """Append several batches as one if possible; return their answers. No batch is appended twice."""
    if len(batches) == 1:
        return [_appended(append, batches[0])]
    try:
        values = [_values(batch) for batch in batches]
        whole = pa.concat_arrays(values)
        assert isinstance(whole, pa.LargeBinaryArray)
        ids = append(whole, alone=False)
    except (LogUnavailable, NotAccepted) as error:
        return [failure_to_bytes(error)] * len(batches)
    except MillraceError:
        # One batch is invalid (too large, malformed), and nothing was appended: answer each separately.
        return [_appended(append, batch) for batch in batches]
    except Exception as error:
        _log.exception("an append failed unexpectedly")
        return [failure_to_bytes(error)] * len(batches)
    answers, start = [], 0
    for part in values:
        answers.append(ack_to_bytes(ids[start : start + len(part)]))
        start += len(part)
    return answers


class _Inbox:
    """Batches between the reading and the appending thread; bounded in bytes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: deque[pa.RecordBatch] = deque()
        self._bytes = 0
        self._ended = False

    def put(self, batch: pa.RecordBatch) -> bool:
        """Add a batch, waiting for room; False if nobody reads any more."""
        with self._changed:
            while self._bytes > READ_AHEAD_BYTES and not self._ended:
                self._changed.wait(1.0)
            self._batches.append(batch)
            self._bytes += batch.nbytes
            self._changed.notify_all()
            return not self._ended

    def take(self) -> list[pa.RecordBatch]:
        """Return the batches that have arrived, up to MERGE_BYTES but at least one; empty at the end of the stream."""
        with self._changed:
            while not self._batches and not self._ended:
                self._changed.wait(1.0)
            taken: list[pa.RecordBatch] = []
            total = 0
            while self._batches and (not taken or total + self._batches[0].nbytes <= MERGE_BYTES):
                batch = self._batches.popleft()
                total += batch.nbytes
                taken.append(batch)
            self._bytes -= total
            self._changed.notify_all()
            return taken

    def end(self) -> None:
        """Mark the end of the stream."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Discard all batches and release the reading thread."""
        with self._changed:
            self._ended = True
            self._batches.clear()
            self._changed.notify_all()


def _read_ahead(reader: flight.MetadataRecordBatchReader, inbox: _Inbox) -> None:
    try:
        while (batch := _next(reader)) is not None and inbox.put(batch):
            pass
    finally:
        inbox.end()
