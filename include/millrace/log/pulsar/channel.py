"""One PChannel on Pulsar: a topic, its writer, its readers, and its beginning.

Two durable records hold the beginning: the property ``begin``, exactly, and the subscription ``millrace``, whose
unread tail no broker deletes. Truncation moves the property first, so a crash in between keeps more than necessary.
The property ``first`` is the first entry that the log ever had: it distinguishes a log that lost its first ledgers
from a young one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import pyarrow as pa

from millrace.base.errors import (
    ChannelNotFound,
    EntryTooLarge,
    InvalidArgument,
    LogCorrupted,
    LogFenced,
    LogUnavailable,
    PositionTruncated,
)
from millrace.log.pulsar.admin import PulsarAdmin
from millrace.log.pulsar.reader import QUEUE_MESSAGES, PulsarReader, PulsarReaderPool
from millrace.log.pulsar.settings import PulsarSettings
from millrace.log.pulsar.writer import BATCH_BITS, BATCH_MASK, LostId, PulsarWriter
from millrace.message.ids import EARLIEST, LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogDescription, LogEntries

SUBSCRIPTION: Final = "millrace"
BEGIN: Final = "begin"
FIRST: Final = "first"
_EPOCH: Final = "pulsar.topic.epoch"
_GUESSED_MESSAGE_BYTES: Final = 64 << 10
_MEAN_WEIGHT: Final = 0.2


@dataclass(frozen=True, slots=True)
class _Extent:
    """The brokers' description of a topic: its beginning, and its ledgers with their number of entries, in order."""

    begin: LogId
    first: LogId | None
    ledgers: dict[int, int]
    bytes: int

    @property
    def earliest(self) -> LogId:
        """The earliest readable position: `begin`, unless the brokers lost entries there."""
        oldest = LogId(next(iter(self.ledgers), 0), 0)
        if self.begin.ledger == 0:
            return self.begin if self.first is None or self.first >= oldest else oldest
        return max(self.begin, oldest)


class PulsarChannel:
    """The log of one topic, shared by its handles. Thread-safe."""

    def __init__(
        self, client: Callable[[], Any], admin: PulsarAdmin, settings: PulsarSettings, pchannel: str, topic: str
    ) -> None:
        self._client = client
        self._admin = admin
        self._settings = settings
        self.pchannel = pchannel
        self.topic = topic
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._truncating = threading.Lock()
        self._writer: PulsarWriter | None = None
        self._epoch = ""
        self._newborn = False
        self._begin = EARLIEST
        self._mean = 0.0
        self._why_closed = ""
        self._cursors = PulsarReaderPool(lambda position: PulsarReader(client(), settings, topic, position, self))

    # --- writing ------------------------------------------------------------------------------------------------------

    def append(self, plain: list[bytes]) -> list[LogId]:
        """Append values returned by :meth:`validated`, at least one. See :meth:`millrace.log.protocol.Log.append`."""
        found = self.writer().append(plain)
        if LostId in set(map(type, found)):
            found = [
                self._looked_up(each, value) if isinstance(each, LostId) else each
                for each, value in zip(found, plain, strict=True)
            ]
        ids = cast("list[LogId]", found)
        if self._newborn:
            self._set({FIRST: str(LogId(ids[0].ledger, 0))})
            self._newborn = False
        self._observe(sum(map(len, plain)), len(plain))
        return ids

    def writer(self) -> PulsarWriter:
        """Return the writer; create one if there is none or the last one failed.

        Raises LogFenced if a newer writer took over.
        """
        with self._opening:
            writer = self._writer
            if writer is not None and writer.failed is None:
                return writer
            self.check_alive(None)
            if writer is not None:
                if isinstance(writer.failed, LogFenced):
                    raise writer.failed
                writer.close()
                # Reopening the topic after a failure would fence a newer writer: check the epoch first.
                if self._properties().get(_EPOCH, "") != self._epoch:
                    raise LogFenced(
                        f"a newer writer took the log {self.pchannel!r} over while this one could not reach the"
                        " brokers. "
                        "Only if this host is to write again, open the log again: that fences the other one"
                    )
                self._writer = None
            return self._new_writer()

    def refresh_writer(self) -> None:
        """After a newer writer fenced this one, let the next append take over again: the log was reopened here."""
        with self._opening:
            if self._writer is not None and isinstance(self._writer.failed, LogFenced):
                self._writer.close()
                self._writer = None

    def _new_writer(self) -> PulsarWriter:
        writer = PulsarWriter(self._client(), self._settings, self.topic)
        try:
            properties = self._properties()
            self._epoch = properties.get(_EPOCH, "")
            end = self._end(self._extent(properties))
        except BaseException:
            writer.close()
            raise
        writer.begin_at(end)
        self._newborn = end == EARLIEST and FIRST not in properties
        self._writer = writer
        return writer

    def _looked_up(self, place: LostId, value: bytes) -> LogId:
        """Find the id of a message that the broker acknowledged without one."""
        skip, position = place.skip, place.after
        while True:
            run = self.read(position, max_bytes=1 << 20, timeout=0.0)
            if not run.batch.num_rows:
                break
            if skip < run.batch.num_rows:
                if run.batch.column("value")[skip].as_py() != value:
                    break
                return LogId(run.batch.column("ledger")[skip].as_py(), run.batch.column("entry")[skip].as_py())
            skip -= run.batch.num_rows
            position = run.next
        raise LogUnavailable(
            f"an append to {self.pchannel!r} is in the log, but its id was lost and is not found after"
            f" {place.after}: query the log by the producer's sequence"
        )

    def validated(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> list[bytes]:
        """Return the values of an append as a list.

        Raises InvalidArgument, EntryTooLarge.
        """
        if isinstance(values, pa.Array):
            if values.null_count:
                raise InvalidArgument("a log entry cannot be null")
            plain: list[bytes] = values.to_pylist()
        else:
            plain = list(values)
        largest = max(map(len, plain), default=0)
        if largest > self._settings.max_entry_bytes:
            raise EntryTooLarge(
                f"an entry of {largest} bytes is larger than the log takes ({self._settings.max_entry_bytes}): split"
                " it, or "
                "raise pulsar.max_entry_bytes and the brokers' maxMessageSize"
            )
        return plain

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, position: LogId, *, end: LogId | None = None, max_bytes: int, timeout: float) -> LogEntries:
        """See :meth:`millrace.log.protocol.Log.read`.

        Raises LogCorrupted if the brokers lost entries in between.
        """
        self.check_alive(position)
        if end is not None and position >= end:
            return LogEntries(_NOTHING, position)
        cursor = self._cursors.take(position)
        try:
            run = cursor.read(end=end, max_bytes=max_bytes, timeout=timeout)
        except BaseException:
            cursor.close()
            raise
        rows = run.batch.num_rows
        if rows:
            self._observe(run.batch.column("value").nbytes, rows)
        if cursor.queue * self.message_bytes() > 4 * self._settings.prefetch_bytes and cursor.queue > QUEUE_MESSAGES[0]:
            cursor.close()  # messages have grown: its prefetch queue would be too large
        else:
            self._cursors.give_back(cursor)
        return run

    def check_alive(self, position: LogId | None) -> None:
        """Raise LogUnavailable if the log is closed here, PositionTruncated if `position` was truncated."""
        if self._why_closed:
            raise LogUnavailable(self._why_closed)
        if position is not None and position < self._begin:
            raise self._truncated(position, self._begin)

    def check_start(self, position: LogId) -> None:
        """Raise if a reader cannot start at `position`: like `check_alive`, but asks the brokers."""
        earliest = self._extent(self._properties()).earliest
        self._moved(earliest)
        if position < earliest:
            raise self._truncated(position, earliest)

    def check_jump(self, after: LogId, found: LogId) -> None:
        """Raise if the log holds, or held, an entry between position `after` and entry `found` of another ledger."""
        extent = self._extent(self._properties())
        ledgers, wanted = extent.ledgers, after.entry >> BATCH_BITS
        if after < extent.earliest:
            raise self._truncated(after, extent.earliest)
        skipped = [number for number, entries in ledgers.items() if after.ledger < number < found.ledger and entries]
        unread = ledgers.get(after.ledger, 0) > wanted + (1 if after.entry & BATCH_MASK else 0)
        if skipped or unread or found.entry:
            raise LogCorrupted(
                f"the log {self.pchannel!r} continues at {found} after {after}: the brokers lost entries in between,"
                " or they belong to Pulsar transactions (docs/pulsar.md). Restore the ledger, or read from a later"
                " position"
            )

    def message_bytes(self) -> float:
        """Return the recent mean size of a message; a guess if none was seen."""
        return max(1.0, self._mean or _GUESSED_MESSAGE_BYTES)

    def _observe(self, size: int, messages: int) -> None:
        mean = size / messages
        self._mean = mean if not self._mean else self._mean + _MEAN_WEIGHT * (mean - self._mean)

    # --- position and size --------------------------------------------------------------------------------------------

    def truncate(self, position: LogId) -> int:
        """See :meth:`millrace.log.protocol.Log.truncate`. Pulsar deletes whole ledgers, never the current one."""
        with self._truncating:
            self.check_alive(None)
            extent = self._extent(self._properties())
            if position <= extent.earliest:
                self._moved(extent.earliest)
                return 0
            end = self._end(extent)
            if position > end:
                raise InvalidArgument(f"cannot truncate {self.pchannel!r} at {position}: the log ends at {end}")
            self._set({BEGIN: str(position)})
            self._moved(position)
            self._admin.reset_cursor(self.topic, SUBSCRIPTION, position.ledger, position.entry >> BATCH_BITS)
            self._admin.trim(self.topic)
            return max(0, extent.bytes - self._extent(self._properties()).bytes)

    def describe(self) -> LogDescription:
        """See :meth:`millrace.log.protocol.Log.describe`. ``bytes`` counts what the brokers still hold."""
        self.check_alive(None)
        extent = self._extent(self._properties())
        self._moved(extent.earliest)
        return LogDescription(begin=extent.earliest, end=self._end(extent), bytes=extent.bytes)

    def close(self, why: str) -> None:
        """Release all resources; later calls raise LogUnavailable with `why`. Idempotent."""
        self._why_closed = self._why_closed or why
        self._cursors.close()
        with self._opening:
            if self._writer is not None:
                self._writer.close()

    def _moved(self, begin: LogId) -> None:
        """Record a new beginning and close idle readers before it."""
        with self._lock:
            moved = begin > self._begin
            self._begin = max(begin, self._begin)
        if moved:
            self._cursors.close_before(begin)

    def _end(self, extent: _Extent) -> LogId:
        last = self._admin.last_message_id(self.topic)
        if last is None:
            raise self._missing()
        if last["entryId"] < 0:
            return extent.begin
        entry = (last["entryId"] << BATCH_BITS) + max(0, last["batchIndex"]) + 1
        return max(extent.begin, LogId(last["ledgerId"], entry))

    def _extent(self, properties: dict[str, str]) -> _Extent:
        stats = self._admin.internal_stats(self.topic)
        if stats is None:
            raise self._missing()
        ledgers = {int(each["ledgerId"]): int(each["entries"]) for each in stats["ledgers"]}
        if ledgers:  # the current ledger is listed without entries
            ledgers[max(ledgers)] = int(stats["currentLedgerEntries"])
        return _Extent(
            begin=LogId.parse(properties[BEGIN]) if BEGIN in properties else EARLIEST,
            first=LogId.parse(properties[FIRST]) if FIRST in properties else None,
            ledgers=dict(sorted(ledgers.items())),
            bytes=int(stats["totalSize"]),
        )

    def _properties(self) -> dict[str, str]:
        properties = self._admin.properties(self.topic)
        if properties is None:
            raise self._missing()
        return properties

    def _set(self, values: dict[str, str]) -> None:
        if not self._admin.set_properties(self.topic, values):
            raise self._missing()

    def _missing(self) -> ChannelNotFound:
        return ChannelNotFound(f"channel {self.pchannel!r} no longer exists: create it first")

    def _truncated(self, position: LogId, earliest: LogId) -> PositionTruncated:
        return PositionTruncated(
            f"{position} of {self.pchannel!r} was truncated: the earliest position is {earliest}", earliest=earliest
        )


_NOTHING: Final = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in ENTRY_SCHEMA], schema=ENTRY_SCHEMA)
