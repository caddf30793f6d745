"""The append host's streams: appends arrive, and their answers leave in the same order.

Appends that arrive while the log is busy are appended together. Answers follow as they are decided.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import pyarrow as pa
from pyarrow import flight

from millrace.base.errors import InvalidArgument, MillraceError
from millrace.node.append.pending import PendingOutcome
from millrace.rpc.bundles import BundledAppend, decode_bundle
from millrace.rpc.outcome import AppendOutcome
from millrace.rpc.wire import DEFAULT_DEADLINE, TIMEOUT, failure_to_bytes, is_valid_batch

MAX_OUTCOME_WAIT: Final = 86400.0
MERGE_BYTES: Final = 1 << 20
"""Waiting appends of one stream are merged up to this size. Beyond it, the copy costs more than a disk sync."""
INBOX_BYTES: Final = 32 << 20
"""Unprocessed bytes of one stream after which the server stops reading it."""
_UNANSWERED: Final = 1024

SubmitAppends: TypeAlias = Callable[[Sequence[pa.LargeBinaryArray]], list[PendingOutcome]]
"""Appends several batches as one and returns the pending outcome of each.

Raises NotAccepted, and errors that refuse all of them.
"""


class PipelinedStream:
    """One pipelined stream: one thread reads ahead, the caller's appends, a third answers in order."""

    def __init__(
        self,
        submit: SubmitAppends,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        self._submit = submit
        self._reader = reader
        self._writer = writer
        self._changed = threading.Condition()
        self._inbox: deque[tuple[pa.LargeBinaryArray, float]] = deque()
        self._bytes = 0
        self._ended = False
        self._fault: MillraceError | None = None
        self._answers: queue.Queue[tuple[PendingOutcome | bytes, float] | None] = queue.Queue(_UNANSWERED)

    def serve(self) -> None:
        """Serve the stream until its client ends it or disconnects.

        Raises InvalidArgument after answering the valid requests before it.
        """
        ahead = threading.Thread(target=self._read_ahead, name="append-stream-in", daemon=True)
        answering = threading.Thread(target=self._answer, name="append-stream-out", daemon=True)
        ahead.start()
        answering.start()
        try:
            while requests := self._take():
                pendings = submit_each(self._submit, [values for values, _ in requests])
                for pending, (_, timeout) in zip(pendings, requests, strict=True):
                    self._answers.put((pending, timeout))
        finally:
            self._answers.put(None)
            answering.join()
            ahead.join()
        if self._fault is not None:
            raise self._fault

    def _read_ahead(self) -> None:
        try:
            while (request := next_append(self._reader)) is not None:
                size = request[0].nbytes
                with self._changed:
                    while self._bytes > INBOX_BYTES and not self._ended:
                        self._changed.wait(1.0)
                    self._inbox.append(request)
                    self._bytes += size
                    self._changed.notify_all()
        except MillraceError as error:
            self._fault = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _take(self) -> list[tuple[pa.LargeBinaryArray, float]]:
        """Return arrived appends, at least one and up to MERGE_BYTES; empty at the end of the stream."""
        with self._changed:
            while not self._inbox and not self._ended:
                self._changed.wait(1.0)
            taken: list[tuple[pa.LargeBinaryArray, float]] = []
            size = 0
            while self._inbox and (not taken or size + self._inbox[0][0].nbytes <= MERGE_BYTES):
                taken.append(self._inbox.popleft())
                size += taken[-1][0].nbytes
            self._bytes -= size
            self._changed.notify_all()
            return taken

    def _answer(self) -> None:
        gone = False
        while (item := self._answers.get()) is not None:
            if gone:
                continue  # the client disconnected: unanswered appends stay ambiguous to it, as they must
            pending, timeout = item
            decided = pending if isinstance(pending, bytes) else answer(partial(pending.outcome, timeout=timeout))
            try:
                write_answer(self._writer, decided)
            except (flight.FlightError, pa.ArrowException, OSError):
                gone = True


def submit_each(submit: SubmitAppends, appends: list[pa.LargeBinaryArray]) -> Sequence[PendingOutcome | bytes]:
    """Append several batches as one; if one is at fault, each by itself. Never appends anything twice.

    Returns the pending outcome of each, or its failure in wire form.
    """
    try:
        return submit(appends)
    except MillraceError as error:
        if error.retriable or len(appends) == 1:
            return [failure_to_bytes(error)] * len(appends)
        # Too large, empty, malformed or not allowed: nothing was appended.
        return [each for values in appends for each in submit_each(submit, [values])]
    except Exception as error:
        return [failure_to_bytes(error)] * len(appends)


def next_append(reader: flight.MetadataRecordBatchReader) -> tuple[pa.LargeBinaryArray, float] | None:
    """Return the next append of a stream and its timeout in seconds; None at the end. Raises InvalidArgument."""
    chunk = _next_chunk(reader)
    if chunk is None:
        return None
    timeout = DEFAULT_DEADLINE if chunk.app_metadata is None else _timeout(chunk.app_metadata.to_pybytes())
    return _values(chunk), timeout


def next_bundle(reader: flight.MetadataRecordBatchReader) -> list[BundledAppend] | None:
    """Return the appends of the next bundle of a stream; None at the end. Raises InvalidArgument."""
    chunk = _next_chunk(reader)
    if chunk is None:
        return None
    metadata = b"" if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
    return decode_bundle(_values(chunk), metadata)


def _next_chunk(reader: flight.MetadataRecordBatchReader) -> flight.FlightStreamChunk | None:
    try:
        return reader.read_chunk()
    except (StopIteration, flight.FlightError, pa.ArrowException, OSError):
        return None  # the stream ended, or the client disconnected


def _values(chunk: flight.FlightStreamChunk) -> pa.LargeBinaryArray:
    """Return the entries of a message; none if it has another form, to be refused as an append without entries."""
    batch = chunk.data
    values = batch.column(0) if batch is not None and is_valid_batch(batch) and batch.num_columns else None
    return values if isinstance(values, pa.LargeBinaryArray) else pa.array([], pa.large_binary())


def _timeout(metadata: bytes) -> float:
    seconds: float = TIMEOUT.unpack(metadata)[0] if len(metadata) == TIMEOUT.size else -1.0
    if not 0 <= seconds <= MAX_OUTCOME_WAIT:
        raise InvalidArgument(
            f"the metadata of an append is its seconds to wait, 0 to {MAX_OUTCOME_WAIT:g}, as a little-endian "
            "double of "
            f"{TIMEOUT.size} bytes; these are {len(metadata)} bytes"
        )
    return seconds


def answer(decide: Callable[[], AppendOutcome]) -> AppendOutcome | bytes:
    """Return the decisions, or the failure in wire form."""
    try:
        return decide()
    except Exception as error:
        return failure_to_bytes(error)


def write_answer(writer: flight.MetadataRecordBatchWriter, decided: AppendOutcome | bytes) -> None:
    """Write the answer to one append."""
    if isinstance(decided, bytes):
        writer.write_metadata(pa.py_buffer(decided))
    else:
        writer.write_batch(decided.rows)
