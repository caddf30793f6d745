"""Topics for a worker: their partitions, where these begin and end, and the records of a range."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition, Uuid
from confluent_kafka.admin import AdminClient

from millrace.base.errors import (
    ChannelNotFound,
    InvalidSettings,
    LogRegressed,
    LogUnavailable,
    MillraceError,
    PositionTruncated,
)
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.kafka.brokers import admin_settings, checked_metadata, client_settings
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.records import Record
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.source import Ends, LaneReader, Limits, Source, task_of

_AT_ONCE: Final = 100
"""The most records of one call of the client. It limits only their number; each may have any size."""
_GUESS: Final = 1 << 20
"""Assumed bytes of a record, before any was read."""
_QUEUED_KIB: Final = 16 << 10
"""The most KiB that the client prefetches."""
_ID_SECONDS: Final = 5.0
_NO_ID: Final = str(Uuid(0, 0))
_REFUSED: Final = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,
    }
)

logger: Final = logging.getLogger("millrace.pipelines.kafka")
logger.setLevel(logging.CRITICAL)  # failures are raised with their reason


def error_of(error: KafkaError, what: str) -> MillraceError:
    """Translate a client's error into a MillraceError."""
    if error.code() in _REFUSED:
        return InvalidSettings(f"{what}: the brokers refuse it: {error.str()}")
    if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION):
        return ChannelNotFound(f"{what}: there is no such topic or partition: create it")
    return LogUnavailable(f"{what}: {error.str()}")


def consumer_of(source: KafkaSource, group: str, **more: Any) -> Consumer:
    """Return a consumer with manual assignment and manual commits."""
    return Consumer(
        {
            **client_settings(source),
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 100,
            "reconnect.backoff.max.ms": 2_000,
            **more,
        },
        logger=logger,
    )


def topic_ids(cluster: KafkaCluster, topics: Sequence[str]) -> dict[str, str]:
    """Return the ids of `topics`, as far as the brokers report them."""
    admin = AdminClient(dict(admin_settings(cluster)), logger=logger)
    found = {}
    seconds = min(_ID_SECONDS, cluster.socket_timeout_ms / 1000)
    try:
        for topic, described in admin.describe_topics(TopicCollection(list(topics)), request_timeout=seconds).items():
            found[topic] = str(described.result(timeout=2 * seconds).topic_id)
    except (KafkaException, TimeoutError) as error:
        logger.debug("the brokers report no ids of topics: %s", error)
    return {topic: each for topic, each in found.items() if each != _NO_ID}


class Topics(Source):
    """The partitions of a source, for repeated queries. One thread at a time."""

    def __init__(self, source: KafkaSource, group: str, *, metadata_seconds: float = 10.0) -> None:
        self._source, self._group = source, group
        self._consumer: Consumer | None = None
        self._metadata_seconds = metadata_seconds
        self._looked = 0.0
        self._partitions: list[tuple[str, int]] = []
        self._ids: dict[str, str] = {}
        self._described = -math.inf
        self._wait = min(source.socket_timeout_ms / 1000, 10.0)

    def partitions(self) -> list[tuple[str, int]]:
        """Return topic and partition of each task. Raises LogUnavailable, ChannelNotFound, InvalidSettings."""
        if not self._looked or time.monotonic() - self._looked > self._metadata_seconds:
            found = []
            for topic in self._source.topics or self._matching():
                metadata = self._ask(
                    f"topic {topic}",
                    lambda name=topic: checked_metadata(self._client().list_topics(name, timeout=self._wait)),
                )
                known = metadata.topics.get(topic)
                if known is None or known.error is not None:
                    raise (
                        ChannelNotFound(f"there is no topic {topic}: create it")
                        if known is None
                        else error_of(known.error, f"topic {topic}")
                    )
                if self._source.debezium.truncates == "apply" and len(known.partitions) > 1:
                    raise InvalidSettings(
                        f"topic {topic} has {len(known.partitions)} partitions, which cannot"
                        " order a truncation among the"
                        " other changes: set debezium.truncates to error or ignore, or use a topic of one partition"
                    )
                found += [(topic, partition) for partition in sorted(known.partitions)]
            self._partitions, self._looked = found, time.monotonic()
        return self._partitions

    def names(self) -> list[str]:
        """Return the names of the existing topics. Raises as `partitions`."""
        return sorted({topic for topic, _ in self.partitions()})

    def _matching(self) -> list[str]:
        metadata = self._ask("the topics", lambda: checked_metadata(self._client().list_topics(timeout=self._wait)))
        return sorted(topic for topic in metadata.topics if self._source.reads(topic))

    def ends(self) -> dict[str, Ends]:
        """Return the ends of each task. Raises as `partitions`."""
        found = {}
        for topic, partition in self.partitions():
            place = TopicPartition(topic, partition)
            low, high = self._ask(
                task_of(topic, partition),
                lambda where=place: self._client().get_watermark_offsets(where, timeout=self._wait),
            )
            found[task_of(topic, partition)] = Ends(low, high)
        return found

    def ids(self) -> dict[str, str]:
        """Return the id of each topic, by name.

        Empty if the brokers have none (Kafka before 2.8) or do not report them.
        """
        if time.monotonic() - self._described > self._metadata_seconds:
            self._described = time.monotonic()
            self._ids = topic_ids(self._source, self.names()) or self._ids
        return self._ids

    def at(self, milliseconds: int) -> dict[str, int]:
        """Return, for each task, the offset of the first record at or after that time, or the end."""
        ends = self.ends()
        places = [TopicPartition(topic, partition, milliseconds) for topic, partition in self.partitions()]
        found = self._ask("offsets of a moment", lambda: self._client().offsets_for_times(places, timeout=self._wait))
        offsets = {}
        for each in found:
            if each.error is not None:
                raise error_of(each.error, task_of(each.topic, each.partition))
            task = task_of(each.topic, each.partition)
            offsets[task] = each.offset if each.offset >= 0 else ends[task].high
        return offsets

    def mirror(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Commit (topic, partition, offset) to the consumer group, for other tools. Errors are ignored."""
        places = [TopicPartition(topic, partition, offset) for topic, partition, offset in offsets]
        if places:
            try:
                self._client().commit(offsets=places, asynchronous=True)
            except KafkaException as error:
                logger.warning("the consumer group's offsets were not updated: %s", error)

    def committed(self) -> dict[str, int]:
        """Return the consumer group's offsets, by task."""
        places = [TopicPartition(topic, partition) for topic, partition in self.partitions()]
        found = self._ask("the consumer group", lambda: self._client().committed(places, timeout=self._wait))
        return {
            task_of(each.topic, each.partition): each.offset
            for each in found
            if each.offset != OFFSET_INVALID and each.offset >= 0
        }

    def close(self) -> None:
        """Idempotent."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _client(self) -> Consumer:
        if self._consumer is None:
            self._consumer = consumer_of(self._source, self._group)
        return self._consumer

    def _ask(self, what: str, call: Any) -> Any:
        try:
            return call()
        except KafkaException as error:
            raise error_of(error.args[0], what) from None


class Reader(LaneReader):
    """The records of one partition, in order."""

    def __init__(self, source: KafkaSource, group: str, topic: str, partition: int) -> None:
        self._place = TopicPartition(topic, partition)
        self._what = task_of(topic, partition)
        self._poll = source.poll_timeout_ms / 1000
        self._patience = source.socket_timeout_ms / 1000
        # The client waits a second after its queue was full; a small queue would run empty in the meantime.
        ahead = {"queued.max.messages.kbytes": _QUEUED_KIB, "fetch.queue.backoff.ms": 10}
        self._consumer = consumer_of(source, group, **ahead)
        self._next: int | None = None
        self._size = _GUESS
        """Recent mean bytes of a record."""

    def read(self, start: int, end: int, *, items: int, size: int, seconds: float) -> tuple[list[Record], int]:
        """Return the records from offset `start` below `end`, and the next offset.

        At most about `items` records and `size` bytes, within `seconds`. Only one record, or a few if they grow
        suddenly, may exceed `size`. The next offset may be after a gap (compaction, or a transaction's end); it is
        greater than `start` if anything arrived. Raises LogUnavailable if nothing arrived; PositionTruncated or
        LogRegressed if `start` is outside the partition.
        """
        if self._next != start:
            self._consumer.assign([TopicPartition(self._place.topic, self._place.partition, start)])
            self._next = start
        found: list[Record] = []
        place, left = start, size
        begun = time.monotonic()
        while place < end and len(found) < items and left > 0:
            waited = time.monotonic() - begun
            if found and waited >= seconds:
                break
            if not found and waited >= self._patience:
                self._next = None
                raise LogUnavailable(f"{self._what}: no record at offset {start} within {self._patience:.0f} s")
            wanted = min(_AT_ONCE, items - len(found), end - place, 1 + left // self._size)
            before, had = left, len(found)
            for message in self._consumer.consume(wanted, timeout=self._poll if not found else min(self._poll, 0.05)):
                error = message.error()
                offset = int(message.offset() or 0)
                if error is None:
                    if offset >= end:
                        self._next = None  # the next range begins with it
                        return found, end
                    value = message.value()
                    found.append(_record(message, value))
                    left -= len(value or b"") + len(message.key() or b"") + 64
                    place = offset + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    place = max(place, offset)
                else:
                    self._next = None
                    self._raise(error, start)
            if len(found) > had:
                self._size = max(1, (before - left) // (len(found) - had), self._size // 8)
        if self._next is not None:
            self._next = place
        return found, place

    def batches(self, start: int, end: int, limits: Limits, /) -> Iterator[Batch]:
        """Yield one batch of the range."""
        records, after = self.read(start, end, items=limits.records, size=limits.size, seconds=limits.seconds)
        yield Batch(self._what, start, after, records=records)

    def close(self) -> None:
        """Idempotent."""
        self._consumer.close()

    def _raise(self, error: KafkaError, start: int) -> None:
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            low, high = self._consumer.get_watermark_offsets(self._place, timeout=self._patience)
            if start < low:
                raise PositionTruncated(
                    f"{self._what}: offset {start} was removed by retention; the earliest is {low}."
                    " Set the offset (docs/pipelines.md)",
                    earliest=(0, low),
                )
            raise LogRegressed(
                f"{self._what}: offset {start} is beyond the end {high}: the topic was created again, or lost records"
            )
        raise error_of(error, self._what)


def _record(message: Any, value: bytes | None) -> Record:
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.key(),
        value,
        message.timestamp()[1],
        message.headers() or (),
    )


def source_of(declared: KafkaSource, settings: Settings, *, group: str, standing: Mapping[str, int]) -> Topics:
    """Return the declared source."""
    return Topics(declared, group)


def reader_of(declared: KafkaSource, settings: Settings, *, group: str, topic: str, partition: int) -> Reader:
    """Return a reader of one lane of the declared source."""
    return Reader(declared, group, topic, partition)
