"""Kafka as the log: a PChannel is a topic with one partition, or a partition of one topic, on your brokers
(docs/brokers.md).

A LogId is (0, offset); an entry is a record's value; its stamp is the broker's (LogAppendTime). Any Kafka client
reads and writes the same wire form. Appends, reads and topic metadata go through confluent-kafka, administration
through kafka-python.

- Durable means acknowledged by all in-sync replicas (acks=all, idempotent). Kafka leaves fsync to the operating
  system: a cluster can lose acknowledged records if all replicas lose power at once. Such a log ends early and raises
  LogRegressed (millrace.node.ingest.planner).
- Topics are created so that only truncation removes records (retention.ms=-1, retention.bytes=-1,
  cleanup.policy=delete); a topic with other settings is refused. Truncation is DeleteRecords: it moves the beginning
  at once, and the brokers free whole segments later.
- An entry is a record of a committed transaction, an aborted one, or none. A transaction marker is no entry, and
  every reader skips it. Markers exist only if another client writes to the topic with transactions.
- A consumer group's position is its committed offset, which brokers delete after offsets.retention.minutes without a
  move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import (
    ChannelExists,
    ChannelNotFound,
    EntryTooLarge,
    InvalidArgument,
    InvalidSettings,
    LogUnavailable,
    PositionTruncated,
)
from millrace.log.group_leases import LeasesInProcess
from millrace.log.kafka.markers import OffsetOutOfRange, TransactionMarkers
from millrace.log.kafka.reader import KafkaReaderPool, RecordRun, create_consumer, wait_for_brokers, watermarks
from millrace.log.kafka.settings import BATCH_BYTES, OVERHEAD_BYTES, KafkaPartition, KafkaSettings
from millrace.log.kafka.topics import partition_counts, read_topic_configs
from millrace.log.kafka.writer import KafkaWriter
from millrace.log.protocol import LogHandle, verify_by_reading
from millrace.message.ids import EARLIEST, LogId, LogIds
from millrace.message.log_entries import ENTRY_SCHEMA, LogDescription, LogEntries
from millrace.rpc.append_pipeline import as_values

if TYPE_CHECKING:
    from millrace.log.kafka.admin import KafkaAdmin
    from millrace.message.log_entries import VerifyReport

_POLL: Final = 0.05
"""Seconds between two checks of a state that changes without a call."""
_LOOK_UP_BYTES: Final = 4 << 20
_SIZE_SECONDS: Final = 2.0
_MARKERS: Final = 4
"""Offsets at a log's end that are searched for the newest entry: a transaction ends with a marker."""
"""Time for which a partition's size is cached: a planner asks ten times a second where logs end, but not for that."""


class _Partition:
    """One PChannel's partition in this process: its producer, its consumers, and its known beginning. Thread-safe."""

    def __init__(self, service: Kafka, pchannel: str) -> None:
        self.service = service
        self.pchannel = pchannel
        self.settings = service.settings
        self.place = service.settings.partition_of(pchannel)
        self._writer = KafkaWriter(service.settings, self.place, exists=self._exists, read=self._records)
        self._markers = TransactionMarkers(self.place, lambda offset: service.admin.batches(self.place, offset))
        self._readers = KafkaReaderPool(service.settings, self.place, self._markers)
        self._begin = 0
        """The known beginning; it only grows."""
        self._size = (0, 0.0)
        self.max_entry_bytes = self._checked()

    def _checked(self) -> int:
        """Return the largest entry that the topic accepts.

        Raises ChannelNotFound, InvalidSettings if the topic could lose entries.
        """
        try:
            found = self.service.configs(self.place)
        except ChannelNotFound:
            self.ends()  # distinguishes a missing topic, for which it raises, from a broker that just started
            found = self.service.configs(self.place)
        wanted = {name: value for name, value in self.settings.topic_configs().items() if name in _PROMISES}
        wrong = {name: found.get(name) for name, value in wanted.items() if found.get(name) != value}
        if wrong:
            raise InvalidSettings(
                f"topic {self.place.topic} is not a log: it must have "
                + ", ".join(f"{name}={wanted[name]} (it has {value})" for name, value in sorted(wrong.items()))
                + "; change it with kafka-configs --alter"
            )
        most = int(found["max.message.bytes"])
        if most < BATCH_BYTES + OVERHEAD_BYTES:
            raise InvalidSettings(
                f"topic {self.place.topic} has max.message.bytes={most}: it must be at least"
                f" {BATCH_BYTES + OVERHEAD_BYTES}"
            )
        return min(self.settings.max_entry_bytes, most - OVERHEAD_BYTES)

    def _exists(self) -> bool:
        try:
            self.ends()
        except ChannelNotFound:
            return False
        except LogUnavailable:
            pass  # it may exist
        return True

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> Sequence[LogId]:
        if isinstance(values, pa.LargeBinaryArray):
            if values.null_count:
                raise InvalidArgument("an append has a null among its values: entries are bytes")
            plain: Sequence[bytes] = values.to_pylist()
        else:
            plain = values
            if not all(map(bytes.__instancecheck__, plain)):
                as_values(plain)  # raises with the reason
        if not plain:
            return []
        largest = max(map(len, plain))
        if largest > self.max_entry_bytes:
            raise EntryTooLarge(
                f"an entry of {largest} bytes exceeds the log's limit of {self.max_entry_bytes}: split the batch, or"
                " raise"
                " max_entry_bytes on every host and the topic's max.message.bytes"
            )
        offsets = self._writer.append(plain)
        return LogIds(0, offsets) if isinstance(offsets, range) else [LogId(0, offset) for offset in offsets]

    def read(self, position: LogId, *, end: LogId | None, max_bytes: int, timeout: float) -> LogEntries:
        self._check_begin(position)
        if end is not None and position >= end:
            return _nothing(position)
        # The ledger is always 0: a position with a larger one is beyond the end.
        stop = None if end is None or end.ledger > 0 else end.entry
        offset = position.entry if position.ledger == 0 else (1 << 63) - 1
        waited_until = Deadline.after(timeout)
        deadline = waited_until.extended(self.settings.deadline)
        while True:
            offset = self._markers.skip_known(offset)
            if stop is not None and offset >= stop:
                return _nothing(LogId(0, stop))
            try:
                run = self._run(offset, stop, max_bytes, waited_until, deadline)
            except OffsetOutOfRange:
                # Truncated just now, or the topic was recreated: the ends that the brokers report decide.
                if deadline.expired():
                    raise LogUnavailable(
                        f"the log {self.pchannel} returns nothing at {position}, although its ends include it: retry"
                    ) from None
                continue
            if run is None:
                return _nothing(max(position, LogId(0, offset)) if position.ledger == 0 else position)
            if run.values:
                return _entries(run)
            offset = run.next  # markers alone: entries may follow

    def _records(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield the topic's records from one offset up to another, as far as it goes.

        Raises what `read` raises.
        """
        while start < stop:
            found = self.read(LogId(0, start), end=LogId(0, stop), max_bytes=_LOOK_UP_BYTES, timeout=0.0)
            if not found.batch.num_rows:
                return
            yield from zip(*(found.batch.column(name).to_pylist() for name in ("entry", "value")), strict=True)
            start = found.next.entry

    def _run(
        self, offset: int, stop: int | None, max_bytes: int, waited_until: Deadline, deadline: Deadline
    ) -> RecordRun | None:
        """Return the run at `offset`; None if there is nothing yet.

        Raises PositionTruncated, OffsetOutOfRange, LogUnavailable.
        """
        if self._readers.has_idle_at(offset):
            with self._readers.at(offset) as reader:
                run = reader.run(stop=stop, max_bytes=max_bytes, seconds=0.0)
            if run is not None:
                return run
        _, high = self.ends()
        self._check_begin(LogId(0, offset))
        while offset > high:
            if not waited_until.pause(_POLL):
                return None
            _, high = self.ends()
        with self._readers.at(offset) as reader:
            until = waited_until if offset >= high else deadline
            run = reader.run(stop=stop, max_bytes=max_bytes, seconds=until.remaining())
        if run is None and offset < high:
            raise LogUnavailable(
                f"the log {self.pchannel} returned no entries from {offset} on, although it has them, within"
                f" {self.settings.deadline:.0f} s: are the brokers up?"
            )
        return run

    def ends(self) -> tuple[int, int]:
        """Return the first offset and the one after the last."""
        low, high = self.service.watermarks(self.place)
        self._begin = max(self._begin, low)
        self._markers.forget_beyond(high)
        return low, high

    def truncate(self, position: LogId) -> int:
        low, high = self.ends()
        if position <= LogId(0, low):
            return 0
        if position > LogId(0, high):
            raise InvalidArgument(f"{position} is beyond the end of {self.pchannel}, 0:{high}")
        self.service.admin.delete_records(self.place, position.entry)
        self._begin = max(self._begin, position.entry)
        return 0  # the brokers free whole segments later

    def end(self) -> LogId:
        return LogId(0, self.ends()[1])

    def describe(self) -> LogDescription:
        low, high = self.ends()
        size, until = self._size
        if time.monotonic() >= until:
            size = self.service.admin.partition_size(self.place)
            self._size = (size, time.monotonic() + _SIZE_SECONDS)
        return LogDescription(LogId(0, low), LogId(0, high), size)

    def enforce_retention(self, *, allowed: LogId, retention_bytes: int, retention_ms: int) -> int:
        self._size = (0, 0.0)
        described = self.describe()
        first, last = described.begin.entry, described.end.entry
        target = first
        if retention_ms and last > first:
            age = self._newest_ms(first, last) - retention_ms
            target = max(target, self.service.offset_at(self.place, age, last)) if age > 0 else target
        if retention_bytes and described.bytes > retention_bytes and last > first:
            # The brokers report only the total size: assume equal entries.
            above = (described.bytes - retention_bytes) / described.bytes
            target = max(target, first + int(above * (last - first)))
        return self.truncate(min(LogId(0, target), allowed))

    def _newest_ms(self, first: int, last: int) -> int:
        """Return the stamp of the newest entry: log time, independent of this host's clock. 0 if the end has only
        markers.
        """
        start = LogId(0, max(first, last - _MARKERS))
        found = self.read(start, end=LogId(0, last), max_bytes=1 << 20, timeout=self.service.settings.deadline)
        return int(pc.max(found.batch["physical_ms"]).as_py() or 0)

    def close(self) -> None:
        self._writer.close()
        self._readers.close()

    def _check_begin(self, position: LogId) -> None:
        if position < LogId(0, self._begin):
            raise PositionTruncated(
                f"{position} of {self.pchannel} was truncated: the earliest position is 0:{self._begin}",
                earliest=(0, self._begin),
            )


_PROMISES: Final = ("cleanup.policy", "retention.ms", "retention.bytes", "message.timestamp.type")


class KafkaLog(LogHandle[_Partition]):
    """A handle on one PChannel (the Log protocol). Closing it leaves other handles of the PChannel open."""

    def append(self, values: Sequence[bytes] | pa.LargeBinaryArray) -> Sequence[LogId]:
        """See :meth:`millrace.log.protocol.Log.append`.

        After LogUnavailable a prefix of the values may be in the log.
        """
        return self._open().append(values)

    def enforce_retention(
        self, *, allowed: LogId, retention_bytes: int | None = None, retention_ms: int | None = None
    ) -> int:
        """Truncate entries beyond age or size, nothing from `allowed` on. The size is approximate, as if all entries
        were equal.
        """
        return self._open().enforce_retention(
            allowed=allowed, retention_bytes=retention_bytes or 0, retention_ms=retention_ms or 0
        )

    def end(self) -> LogId:
        """See :meth:`millrace.log.protocol.Log.end`: one request, where `describe` needs two."""
        return self._open().end()

    def verify(self) -> VerifyReport:
        """Read everything. The client verifies each batch's checksum, and this method that no offset is missing."""
        return verify_by_reading(self)

    def _open(self) -> _Partition:
        partition = super()._open()
        partition.service.check_open()
        return partition


class Kafka(LeasesInProcess, Closeable):
    """The logs of one deployment on a Kafka cluster (the LogService protocol). Thread-safe."""

    def __init__(self, settings: KafkaSettings) -> None:
        """Raises LogUnavailable if no broker answers, InvalidSettings if the client or the brokers refuse the
        settings.
        """
        self.settings = settings
        self._admin: KafkaAdmin | None = None
        self._lock = threading.Lock()
        self._partitions: dict[str, _Partition] = {}
        self._closed = False
        complaints: list[KafkaError] = []
        self._asking = create_consumer(settings, error_cb=complaints.append)
        try:
            wait_for_brokers(settings, self._asking, complaints)
        except BaseException:
            self.close()
            raise

    def create(self, pchannel: str) -> None:
        """See :meth:`millrace.log.protocol.LogService.create`."""
        self.check_open()
        place = self.settings.partition_of(pchannel)
        if not self.settings.is_shared(place):
            self.admin.create(place.topic)
            return
        found = partition_counts(self.settings, self._asking, place.topic).get(place.topic, 0)
        if not found:
            self.admin.create(place.topic, self.settings.partitions)
            return
        if found > place.partition:
            raise ChannelExists(f"partition {place} exists already")
        self.admin.add_partitions(place.topic, self.settings.partitions)

    def open(self, pchannel: str) -> KafkaLog:
        """Return a handle on an existing log.

        Raises ChannelNotFound, InvalidSettings if its topic could lose entries.
        """
        self.check_open()
        with self._lock:
            partition = self._partitions.get(pchannel)
        if partition is None:
            made = _Partition(self, pchannel)
            with self._lock:
                partition = self._partitions.setdefault(pchannel, made)
        return KafkaLog(partition)

    def names(self) -> list[str]:
        """See :meth:`millrace.log.protocol.LogService.names`."""
        self.check_open()
        topics = partition_counts(self.settings, self._asking)
        names = {name for topic in topics if (name := self.settings.decode_name(topic)) is not None}
        # A PChannel that the settings map to the shared topic has no topic of its own.
        names = {name for name in names if not self.settings.is_shared(self.settings.partition_of(name))}
        if self.settings.partitions and self.settings.prefix in topics:
            there = min(self.settings.partitions, topics[self.settings.prefix])
            names.update(map("dml_{}".format, range(there)))
        return sorted(names)

    def drop(self, pchannel: str) -> None:
        """See :meth:`millrace.log.protocol.LogService.drop`.

        Raises InvalidArgument for a partition of the shared topic.
        """
        self.check_open()
        place = self.settings.partition_of(pchannel)
        if self.settings.is_shared(place):
            self.watermarks(place)
            raise InvalidArgument(
                f"{pchannel} is partition {place}, and Kafka removes no partition: truncate it, or delete the topic"
                " with all"
                " its PChannels by Kafka's own tools"
            )
        with self._lock:
            partition = self._partitions.pop(pchannel, None)
        if partition is not None:
            partition.close()
        for group in self.groups():
            self.admin.delete_group(self.settings.group(group), place)
        self.admin.delete(place.topic)
        self._wait_until_gone(place)

    def _wait_until_gone(self, place: KafkaPartition) -> None:
        """Wait until the brokers know that a partition is deleted; the controller's answer does not wait for that.

        Until then they would accept and acknowledge appends to it.
        Raises LogUnavailable at the deadline.
        """
        until = Deadline.after(self.settings.deadline)
        while until.pause(_POLL):
            try:
                self.watermarks(place)
            except ChannelNotFound:
                return
        raise LogUnavailable(f"{place} is deleted, but its broker still has it: are the brokers up?")

    def groups(self) -> list[str]:
        """See :meth:`millrace.log.protocol.LogService.groups`."""
        self.check_open()
        return sorted(name for group in self.admin.groups() if (name := self.settings.decode_name(group)) is not None)

    def group_position(self, group: str, pchannel: str) -> LogId | None:
        """See :meth:`millrace.log.protocol.LogService.group_position`."""
        self._check_channel(pchannel)
        found = self.admin.committed_offset(self.settings.group(group), self.settings.partition_of(pchannel))
        return None if found is None else LogId(0, found)

    def move_group(self, group: str, pchannel: str, position: LogId) -> None:
        """See :meth:`millrace.log.protocol.LogService.move_group`."""
        if position.ledger or not 0 <= position.entry < 1 << 63:
            raise InvalidArgument(f"{position} is not a position of this log: its ledger is 0")
        self._check_channel(pchannel)
        self.admin.commit_offset(self.settings.group(group), self.settings.partition_of(pchannel), position.entry)

    def drop_group(self, group: str) -> None:
        """See :meth:`millrace.log.protocol.LogService.drop_group`."""
        self.check_open()
        self.admin.delete_group(self.settings.group(group))

    def close(self) -> None:
        """See :meth:`millrace.log.protocol.LogService.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            partitions, self._partitions = self._partitions, {}
            admin, self._admin = self._admin, None
        for partition in partitions.values():
            partition.close()
        self._asking.close()
        if admin is not None:
            admin.close()

    @property
    def admin(self) -> KafkaAdmin:
        """The administration client, created on first use. Raises LogUnavailable once the service is closed."""
        from millrace.log.kafka.admin import KafkaAdmin

        with self._lock:
            self.check_open()
            if self._admin is None:
                self._admin = KafkaAdmin(self.settings)
            return self._admin

    # --- for the partitions -------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise LogUnavailable if the service is closed."""
        if self._closed:
            raise LogUnavailable("this log service is closed: open it again")

    def configs(self, place: KafkaPartition) -> dict[str, str]:
        """Return the settings of a partition's topic.

        Raises ChannelNotFound, InvalidSettings if it has other partitions than the settings say.
        """
        self.check_open()
        return read_topic_configs(self.settings, self._asking, place)

    def watermarks(self, place: KafkaPartition) -> tuple[int, int]:
        """Return the ends of a partition."""
        self.check_open()
        return watermarks(self._asking, place, self.settings.deadline)

    def offset_at(self, place: KafkaPartition, milliseconds: int, end: int) -> int:
        """Return the first offset with a stamp at or after a time; `end` if there is none."""
        try:
            found = self._asking.offsets_for_times([TopicPartition(*place, milliseconds)], self.settings.deadline)[0]
        except KafkaException as error:
            raise LogUnavailable(f"cannot look up offsets of {place} by time: {error.args[0].str()}") from error
        return found.offset if found.offset >= 0 else end

    def _check_channel(self, pchannel: str) -> None:
        self.check_open()
        try:
            self.watermarks(self.settings.partition_of(pchannel))
        except ChannelNotFound:
            raise ChannelNotFound(f"channel {pchannel!r} does not exist: create it first") from None


def _nothing(position: LogId) -> LogEntries:
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in ENTRY_SCHEMA], schema=ENTRY_SCHEMA)
    return LogEntries(empty, max(position, EARLIEST))


def _entries(run: RecordRun) -> LogEntries:
    count = len(run.values)
    offsets = run.offsets
    columns = [
        np.zeros(count, dtype=np.int64),
        np.arange(offsets.start, offsets.stop) if isinstance(offsets, range) else np.array(offsets, dtype=np.int64),
        np.fromiter(run.stamps, dtype=np.int64, count=count),
    ]
    # From buffers: `pa.array` would import pandas, which takes longer than most reads.
    arrays = [pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(column)]) for column in columns]
    batch = pa.RecordBatch.from_arrays([*arrays, as_values(run.values)], schema=ENTRY_SCHEMA)
    return LogEntries(batch, LogId(0, run.next))


def open_location(location: str, settings: Mapping[str, object]) -> Kafka:
    """Open a log for the registry: ``host:port[,host:port...][/prefix]`` and the options of :class:`KafkaSettings`."""
    return Kafka(KafkaSettings.of(location, settings))
