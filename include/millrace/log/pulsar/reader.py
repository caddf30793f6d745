"""The reading side of one Pulsar topic: readers that continue from the last position and detect gaps.

A Pulsar reader silently skips missing entries. Here every message is compared with the previous one: it must have the
next index of the batch, or the next entry of the ledger. At a change of ledger, or if a reader does not start where
requested, :class:`Continuity` decides from the topic's ledgers whether something was skipped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import pulsar
import pyarrow as pa

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import LogCorrupted, LogUnavailable
from millrace.log.pulsar.settings import PulsarSettings
from millrace.log.pulsar.writer import BATCH_BITS, BATCH_MASK, to_log_error
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_OVERHEAD_BYTES, ENTRY_SCHEMA, LogEntries
from millrace.rpc.append_pipeline import as_values

_IDLE_READERS: Final = 8
_SLICE: Final = 0.2
"""Seconds after which a waiting reader checks whether truncation has passed it."""
_PAUSE: Final = 0.05
"""Seconds between two requests to a broker that has closed the reader."""
QUEUE_MESSAGES: Final = (16, 1000)
"""Minimum and maximum number of prefetched messages."""


class Continuity(Protocol):
    """The questions that a reader asks its log."""

    def check_start(self, position: LogId) -> None:
        """Raise PositionTruncated if `position` is before the log's current beginning."""
        ...

    def check_jump(self, after: LogId, found: LogId) -> None:
        """Raise if the log holds, or held, an entry between position `after` and entry `found` of another ledger."""
        ...

    def check_alive(self, position: LogId) -> None:
        """Raise LogUnavailable if the handle is closed, PositionTruncated if this process truncated past `position`."""
        ...

    def message_bytes(self) -> float:
        """Return the mean size of a message, if known."""
        ...


class PulsarReader:
    """A reader with its prefetched messages. Used by one thread at a time."""

    def __init__(
        self, client: Any, settings: PulsarSettings, topic: str, position: LogId, continuity: Continuity
    ) -> None:
        self._topic = topic
        self._continuity = continuity
        self._timeout = settings.operation_timeout
        self.position = position
        """Position of the next read."""
        self._held: Any = None
        continuity.check_start(position)
        self._ledger, self._entry = position
        self.queue = int(
            min(max(settings.prefetch_bytes / continuity.message_bytes(), QUEUE_MESSAGES[0]), QUEUE_MESSAGES[1])
        )
        # Start after the previous entry: a reader that starts at its first message takes the last message read for one
        # still to come after a reconnect (has_message_available), and drops it when it comes.
        before = position.entry - 1
        start = pulsar.MessageId.earliest
        if position.ledger:
            start = pulsar.MessageId(-1, position.ledger, before >> BATCH_BITS, before & BATCH_MASK)
        try:
            self._reader = client.create_reader(settings.topic_url(topic), start, receiver_queue_size=self.queue)
        except pulsar.PulsarException as error:
            raise to_log_error(error, topic, "opening a reader") from error
        # without the wrapper's message object: a third of the cost per message
        self._next = self._reader._reader.read_next

    def read(self, *, end: LogId | None, max_bytes: int, timeout: float) -> LogEntries:
        """Return entries from :attr:`position` on; see :meth:`millrace.log.protocol.Log.read`."""
        ledgers: list[int] = []
        entries: list[int] = []
        stamps: list[int] = []
        values: list[bytes] = []
        size, until = 0, Deadline.after(timeout) if timeout > 0 else None
        next_message, none = self._next, pulsar.Timeout
        while size < max_bytes or not values:
            if self._held is not None:
                message, self._held = self._held, None
            else:
                try:
                    message = next_message(0)
                except none:
                    message = self._awaited(until if not values else None)
                    if message is None:
                        break
                except pulsar.PulsarException as error:
                    raise to_log_error(error, self._topic, "a read") from error
            given = message.message_id()
            ledger = given.ledger_id()
            entry = given.entry_id() << BATCH_BITS | max(0, given.batch_index())
            # The common case, the next message of a batch, costs two comparisons.
            if entry == self._entry and ledger == self._ledger:
                self._entry = entry + 1
            elif not self._follows(LogId(ledger, entry)):
                continue  # a duplicate: the client repeats some messages after a reconnect
            if end is not None and (ledger, entry) >= end:
                self._hold(ledger, entry, message)
                break
            value = message.data()
            counted = len(value) + ENTRY_OVERHEAD_BYTES
            if values and size + counted > max_bytes:
                self._hold(ledger, entry, message)
                break
            size += counted
            ledgers.append(ledger)
            entries.append(entry)
            stamps.append(message.publish_timestamp())
            values.append(value)
        if values:
            self.position = LogId(ledgers[-1], entries[-1] + 1)
        columns = [_int64(column) for column in (ledgers, entries, stamps)]
        return LogEntries(pa.RecordBatch.from_arrays([*columns, as_values(values)], schema=ENTRY_SCHEMA), self.position)

    def _hold(self, ledger: int, entry: int, message: Any) -> None:
        """Keep a message for the next read."""
        self._held, self._ledger, self._entry = message, ledger, entry

    def _follows(self, found: LogId) -> bool:
        """Return whether `found` is new and the next entry.

        Raises if something was skipped.
        """
        after = LogId(self._ledger, self._entry)
        if found < after:
            return False
        if found != after:
            same_ledger = found.ledger == after.ledger
            batch_end = same_ledger and found.entry == ((after.entry >> BATCH_BITS) + 1) << BATCH_BITS
            if not (batch_end and after.entry & BATCH_MASK):
                if same_ledger:
                    raise LogCorrupted(
                        f"{self._topic} continues at {found} after {after}: the broker lost entries in between, or"
                        " they belong to Pulsar transactions (docs/pulsar.md). Restore the ledger, or read from a"
                        " later position"
                    )
                self._continuity.check_jump(after, found)
        self._ledger, self._entry = found.ledger, found.entry + 1
        return True

    def _awaited(self, until: Deadline | None) -> Any:
        """Return the next message; None if none comes before `until` (None: do not wait)."""
        try:
            while until is not None:
                self._continuity.check_alive(self.position)
                if until.expired():
                    break
                try:
                    return self._next(max(1, int(until.remaining(maximum=_SLICE) * 1000)))
                except pulsar.Timeout:
                    continue
            if not self._has_more():
                return None
            deadline = Deadline.after(self._timeout)
            while not deadline.expired():
                self._continuity.check_alive(self.position)
                try:
                    return self._next(int(_SLICE * 1000))
                except pulsar.Timeout:
                    continue
        except pulsar.PulsarException as error:
            raise to_log_error(error, self._topic, "a read") from error
        raise LogUnavailable(
            f"the broker has more entries of {self._topic}, but sent none within {self._timeout:.0f} s"
        )

    def _has_more(self) -> bool:
        """Return whether the log has more entries.

        Retries while the broker has closed the reader and the client has not noticed.
        """
        deadline = Deadline.after(self._timeout)
        while True:
            try:
                return bool(self._reader.has_message_available())
            except pulsar.BrokerMetadataError:
                self._continuity.check_alive(self.position)
                if not deadline.pause(jittered(_PAUSE)):
                    raise

    def close(self) -> None:
        """Release the reader."""
        try:
            self._reader.close()
        except (pulsar.PulsarException, ValueError):
            pass  # the connection is gone, or the client has shut down


def _int64(values: list[int]) -> pa.Array:
    data = np.array(values, dtype=np.int64)
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(data)])


class PulsarReaderPool:
    """The idle readers of a log, by position. A sequential read keeps its prefetched messages."""

    def __init__(self, opened: Callable[[LogId], PulsarReader]) -> None:
        self._opened = opened
        self._idle: OrderedDict[int, PulsarReader] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def take(self, position: LogId) -> PulsarReader:
        """Return a reader at `position`, exclusively for this caller."""
        with self._lock:
            for key, cursor in reversed(self._idle.items()):
                if cursor.position == position:
                    return self._idle.pop(key)
        return self._opened(position)

    def give_back(self, cursor: PulsarReader) -> None:
        """Return a working reader to the pool."""
        with self._lock:
            if self._closed:
                doomed: PulsarReader | None = cursor
            else:
                self._idle[id(cursor)] = cursor
                doomed = self._idle.popitem(last=False)[1] if len(self._idle) > _IDLE_READERS else None
        if doomed is not None:
            doomed.close()

    def close_before(self, position: LogId) -> None:
        """Close idle readers before `position`."""
        with self._lock:
            doomed = [self._idle.pop(key) for key, cursor in list(self._idle.items()) if cursor.position < position]
        for cursor in doomed:
            cursor.close()

    def close(self) -> None:
        """Close idle readers, and those given back from now on."""
        with self._lock:
            self._closed = True
            doomed = list(self._idle.values())
            self._idle.clear()
        for cursor in doomed:
            cursor.close()
