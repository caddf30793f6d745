"""The server's side of an append stream: batches come in, acknowledgements go out in the same order.

A stream is plain or pipelined. On a plain one the client waits for each acknowledgement, so one thread reads, appends and
answers, with no handover in between. On a pipelined one a second thread reads ahead, and whatever has arrived while the log
was busy is appended together, in order: one acknowledgement of the disk then covers many appends of one client, as the log's
own group commit covers several clients.
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
"""Appends of one stream are merged up to this many bytes: beyond, a copy costs more than the disk's acknowledgement."""
READ_AHEAD_BYTES: Final = 64 << 20
"""What the server holds of one stream before it stops reading from it."""

_log = logging.getLogger(__name__)


class AppendBatch(Protocol):
    """Appends one atomic batch; its ids. Raises NotTaken: the server is stopping."""

    def __call__(self, values: pa.LargeBinaryArray, *, alone: bool = True) -> Sequence[LogId]:
        """Without `alone` it is several appends made one; where it is refused, each follows by itself."""
        ...


def serve_appends(
    reader: flight.MetadataRecordBatchReader,
    writer: flight.MetadataRecordBatchWriter,
    append: AppendBatch,
    *,
    pipelined: bool,
    cancelled: Callable[[], bool],
) -> None:
    """Serve one stream until its client ends it or goes away.

    Once `cancelled`, nothing more is appended: the client has given up what it has no answer for and may go on elsewhere, so
    that a late append would come behind its successors.
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
        ahead.join()  # ends with the stream: a write fails only where reads fail too, and the reader must not outlive this call


def _next(reader: flight.MetadataRecordBatchReader) -> pa.RecordBatch | None:
    """The next append of the stream, None at its end. Waits as long as the client keeps the stream open."""
    try:
        batch = reader.read_chunk().data
    except (StopIteration, flight.FlightError, pa.ArrowException, OSError):
        return None  # ended, or the client went away: what it has no answer for is ambiguous to it, as it should be
    if batch is None:
        return pa.RecordBatch.from_arrays([pa.nulls(0, pa.large_binary())], schema=VALUE_SCHEMA)
    return (
        batch if is_valid_batch(batch) else pa.RecordBatch.from_arrays([], names=[])
    )  # is refused as what it is: no append


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
        _log.exception("an append failed inside")
        return failure_to_bytes(error)


def _appended(append: AppendBatch, batch: pa.RecordBatch) -> bytes:
    return _answer(lambda: ack_to_bytes(append(_values(batch))))


def _merged(append: AppendBatch, batches: list[pa.RecordBatch]) -> list[bytes]:
    """The answers to several appends, made as one where that works. Never appends one of them twice."""
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
        # One of them is at fault (too large, malformed), and nothing was appended: each gets its own answer.
        return [_appended(append, batch) for batch in batches]
    except Exception as error:
        _log.exception("an append failed inside")
        return [failure_to_bytes(error)] * len(batches)
    answers, start = [], 0
    for part in values:
        answers.append(ack_to_bytes(ids[start : start + len(part)]))
        start += len(part)
    return answers


class _Inbox:
    """Batches between the thread that reads a stream and the one that appends them; bounded in bytes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: deque[pa.RecordBatch] = deque()
        self._bytes = 0
        self._ended = False

    def put(self, batch: pa.RecordBatch) -> bool:
        """Add a batch, waiting for room; False where nobody takes any more."""
        with self._changed:
            while self._bytes > READ_AHEAD_BYTES and not self._ended:
                self._changed.wait(1.0)
            self._batches.append(batch)
            self._bytes += batch.nbytes
            self._changed.notify_all()
            return not self._ended

    def take(self) -> list[pa.RecordBatch]:
        """What has arrived, up to MERGE_BYTES but at least one; empty once the stream ended and all is taken."""
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
        """No batch follows."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nobody takes any more: let the reading thread go."""
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
