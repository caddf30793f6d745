"""The reading side of one partition of a Kafka topic: consumers with an assigned position, pooled for sequential reads.

A consumer fetches ahead of its reader. A read that continues where an earlier one ended finds that consumer in the
pool; any other position gets a new consumer, which costs some milliseconds (moving an existing one would first wait
for its fetch in flight, half a second). Consumers join no group and commit nothing.

Every record is read, whatever the outcome of its writer's transaction: the entries at a position do not depend on a
later commit, and an open transaction does not block a reader. Skipped offsets are proven to be markers
(millrace.log.kafka.markers); otherwise reading fails.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import ChannelNotFound, InvalidSettings, LogUnavailable
from millrace.log.kafka.markers import OffsetOutOfRange, TransactionMarkers
from millrace.log.kafka.settings import BATCH_BYTES, OVERHEAD_BYTES, KafkaPartition, KafkaSettings
from millrace.message.log_entries import ENTRY_OVERHEAD_BYTES

_log = logging.getLogger(__name__)

_IDLE: Final = 2
"""Idle consumers kept per partition."""
_MOST: Final = 4096
"""Messages taken from the client at once."""
_LULL: Final = 0.5
"""Seconds to wait for records that the brokers have and this host has not received, before a run is returned
as it is.
"""
_POLL: Final = 0.1
_FETCH_BYTES: Final = 50 << 20

NOT_FOUND_CODES: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)
"""Error codes for a partition that does not exist."""
_MOVED: Final = (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET, KafkaError._NO_OFFSET)
REFUSED_CODES: Final = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,
)
"""Error codes for denied access; retries would fail as well."""


class RecordRun(NamedTuple):
    """Consecutive entries and the offset after them; no entries if only markers came."""

    offsets: Sequence[int]
    values: list[bytes]
    stamps: list[int]
    next: int


def create_consumer(settings: KafkaSettings, **more: Any) -> Consumer:
    """Create a consumer that joins no group; `more` overrides its properties.

    Raises InvalidSettings.
    """
    limit = max(settings.max_entry_bytes, BATCH_BYTES) + OVERHEAD_BYTES
    try:
        return Consumer(
            {
                **settings.rdkafka(),
                "group.id": f"{settings.prefix}._reader",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_uncommitted",
                "check.crcs": True,
                # Small answers: one is parsed while the next is in flight. A larger batch still comes whole.
                "fetch.message.max.bytes": 1 << 20,
                "fetch.max.bytes": _FETCH_BYTES,
                "receive.message.max.bytes": _FETCH_BYTES + limit,
                "queued.max.messages.kbytes": max(1, settings.prefetch_bytes >> 10),
                # A reader with a full queue fetches again soon, not after a second.
                "fetch.queue.backoff.ms": 5,
                "fetch.error.backoff.ms": 100,
                **more,
            },
            logger=_log,
        )
    except KafkaException as error:
        raise InvalidSettings(f"Kafka's client refuses its settings: {error.args[0].str()}") from error


class _Reader:
    """One consumer at one position. Used by one thread at a time."""

    def __init__(
        self, settings: KafkaSettings, place: KafkaPartition, markers: TransactionMarkers, offset: int
    ) -> None:
        self._place = place
        self._markers = markers
        # The end-of-partition event reveals offsets before it that are no records.
        self._consumer = create_consumer(settings, **{"enable.partition.eof": True})
        self._consumer.assign([TopicPartition(*place, offset)])
        self.next = offset
        self._pending: list[Message] = []
        self._reached = offset
        """The client has delivered everything before this offset."""
        self._size = 256
        """Approximate size of an entry."""

    def run(self, *, stop: int | None, max_bytes: int, seconds: float) -> RecordRun | None:
        """Return the next entries, up to `stop` and about `max_bytes`; None if nothing came within `seconds`.

        Raises OffsetOutOfRange.
        """
        messages = self._pending
        self._pending = []
        if not messages and not self._fetch(messages, self.next, max_bytes, seconds):
            return self._cut(messages, stop, max_bytes)
        size = _weight(messages)
        lull = Deadline.after(_LULL)
        while size < max_bytes:
            taken: list[Message] = []
            following = _offset(messages[-1]) + 1
            if stop is not None and following >= stop:
                break
            if not self._fetch(taken, following, max_bytes - size, 0.0):
                # The client's cached high watermark, which each fetch updates.
                high = self._consumer.get_watermark_offsets(TopicPartition(*self._place), cached=True)[1]
                if max(following, self._reached) >= high or lull.expired():
                    break
                self._fetch(taken, max(following, self._reached), max_bytes - size, 0.01)
            messages += taken
            size += _weight(taken)
        return self._cut(messages, stop, max_bytes)

    def _cut(self, messages: list[Message], stop: int | None, max_bytes: int) -> RecordRun | None:
        """Return a run of `messages` up to `stop`; None if it would be empty.

        Raises LogCorrupted if records are missing.
        """
        first = self.next
        count = len(messages) if stop is None else bisect_left(messages, stop, key=_offset)
        ends = list(accumulate(len(message) + ENTRY_OVERHEAD_BYTES for message in messages[:count]))
        count = min(count, max(1, bisect_right(ends, max_bytes)))
        taken, self._pending = messages[:count], messages[count:]
        if not taken:
            reached = _offset(self._pending[0]) if self._pending else self._reached
            following = reached if stop is None else min(reached, stop)
            if following <= first:
                return None
            self._markers.require_markers(first, following)
            self.next = following
            return RecordRun((), [], [], following)
        self.next = _offset(taken[-1]) + 1
        offsets: Sequence[int] = range(first, self.next)
        # Offsets increase, so the last one shows whether one before it is missing.
        if len(offsets) != count:
            offsets = list(map(_offset, taken))
            for before, found in pairwise([first - 1, *offsets]):
                if found != before + 1:
                    self._markers.require_markers(before + 1, found)
        self._size = max(1, ends[count - 1] // count)
        stamps = [stamp for _, stamp in map(Message.timestamp, taken)]
        values: list[bytes | None] = list(map(Message.value, taken))
        if None in values:
            # A record of another client may have no value. It is an entry, equal to empty bytes.
            values = [b"" if value is None else value for value in values]
        return RecordRun(offsets, values, stamps, self.next)  # type: ignore[arg-type]

    def _fetch(self, messages: list[Message], following: int, max_bytes: int, seconds: float) -> bool:
        """Add the client's messages, waiting up to `seconds` for the first, or for the end to be reached beyond
        `following`.

        Raises OffsetOutOfRange, InvalidSettings.
        """
        wanted = max(1, min(_MOST, max_bytes // self._size + 1))
        good = self._sound(self._consumer.consume(wanted, 0.0))
        until = Deadline.after(seconds)
        while not good and self._reached <= following and not until.expired():
            one = self._consumer.poll(until.remaining(maximum=_POLL))
            if one is not None:
                good = self._sound([one, *self._consumer.consume(wanted, 0.0)])
        messages += good
        return bool(good)

    def _sound(self, found: list[Message]) -> list[Message]:
        """Return the records among the client's messages.

        Raises OffsetOutOfRange, InvalidSettings.
        """
        if not any(map(Message.error, found)):
            return found
        good = []
        for message in found:
            error = message.error()
            if error is None:
                good.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                self._reached = max(self._reached, _offset(message))
            else:
                self._complain(error)
        return good

    def _complain(self, error: KafkaError) -> None:
        """Raise the error for a client error; transient errors are left to the deadline."""
        if error.code() in _MOVED or error.code() in NOT_FOUND_CODES:
            self.next = -1
            raise OffsetOutOfRange
        if error.code() in REFUSED_CODES:
            self.next = -1
            raise InvalidSettings(f"the brokers deny reading {self._place}: {error.str()}")
        _log.info("reading %s: %s", self._place, error.str())

    def close(self) -> None:
        self._consumer.close()


def _offset(message: Message) -> int:
    return message.offset()  # type: ignore[return-value]  # a record that was read has one


def _weight(messages: list[Message]) -> int:
    return sum(map(len, messages)) + ENTRY_OVERHEAD_BYTES * len(messages)


class KafkaReaderPool:
    """The consumers of one partition. Thread-safe: each read has its own."""

    def __init__(self, settings: KafkaSettings, place: KafkaPartition, markers: TransactionMarkers) -> None:
        self._settings = settings
        self._place = place
        self._markers = markers
        self._lock = threading.Lock()
        self._idle: list[_Reader] = []
        self._closed = False

    @contextmanager
    def at(self, offset: int) -> Iterator[_Reader]:
        """Yield a consumer at `offset`, for one read."""
        reader = self._take(offset)
        try:
            yield reader
        except BaseException:
            reader.close()
            raise
        self._put_back(reader)

    def has_idle_at(self, offset: int) -> bool:
        """Return whether an idle consumer is at `offset`, perhaps with prefetched records."""
        with self._lock:
            return any(reader.next == offset for reader in self._idle)

    def close(self) -> None:
        """Close idle consumers; a running read closes its own. Idempotent."""
        with self._lock:
            self._closed = True
            resting, self._idle = self._idle, []
        for reader in resting:
            reader.close()

    def _take(self, offset: int) -> _Reader:
        with self._lock:
            if self._closed:
                raise LogUnavailable(f"the log {self._place} is closed: open it again")
            for place, reader in enumerate(self._idle):
                if reader.next == offset:
                    return self._idle.pop(place)
        return _Reader(self._settings, self._place, self._markers, offset)

    def _put_back(self, reader: _Reader) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(reader)
                reader = self._idle.pop(0) if len(self._idle) > _IDLE else None  # type: ignore[assignment]
        if reader is not None:
            reader.close()


def wait_for_brokers(settings: KafkaSettings, consumer: Consumer, complaints: list[KafkaError]) -> None:
    """Wait until the brokers answer and accept the login. `complaints`: errors that the consumer's error_cb received.

    Raises InvalidSettings if they refuse the login, LogUnavailable at the deadline.
    """
    deadline = Deadline.after(settings.deadline)
    while True:
        try:
            consumer.list_topics(f"{settings.prefix}._", timeout=deadline.remaining(minimum=0.1, maximum=1.0))
            return
        except KafkaException as error:
            consumer.poll(0)
            refused = next((each for each in complaints if each.code() in REFUSED_CODES), None)
            if refused is not None:
                raise InvalidSettings(
                    f"the brokers at {settings.brokers} refuse this client: {refused.str()}; check"
                    " MILLRACE_LOG_USERNAME,"
                    " MILLRACE_LOG_PASSWORD and the options of the log's URL"
                ) from error
            if deadline.expired():
                raise LogUnavailable(
                    f"no broker at {settings.brokers} answers within {settings.deadline:.0f} s: are they up? ({error})"
                ) from error


def watermarks(consumer: Any, place: KafkaPartition, seconds: float) -> tuple[int, int]:
    """Return the first offset of a partition and the one after its last, from the brokers.

    Raises ChannelNotFound, LogUnavailable.
    """
    deadline = Deadline.after(seconds)
    while True:
        left = deadline.remaining(minimum=0.1)
        try:
            found = consumer.get_watermark_offsets(TopicPartition(*place), timeout=left, cached=False)
            if found is not None:
                return int(found[0]), int(found[1])
            reason = "no answer"
        except KafkaException as raised:
            error: KafkaError = raised.args[0]
            if error.code() in REFUSED_CODES:
                raise InvalidSettings(f"the brokers deny reading {place}: {error.str()}") from raised
            if error.code() in NOT_FOUND_CODES and _is_missing(consumer, place, left):
                raise ChannelNotFound(f"{place} does not exist: create its channel first") from raised
            reason = error.str()
        if not deadline.pause(jittered(_POLL)):
            raise LogUnavailable(
                f"no answer about the ends of {place} within {seconds:.0f} s ({reason}): are the brokers up?"
            )


def _is_missing(consumer: Consumer, place: KafkaPartition, seconds: float) -> bool:
    """Return whether a partition certainly does not exist. A broker that just started briefly knows no topics."""
    try:
        found = consumer.list_topics(place.topic, timeout=seconds)
    except KafkaException:
        return False
    topic = found.topics.get(place.topic)
    if not found.brokers or topic is None:
        return False
    return place.partition not in topic.partitions if topic.error is None else topic.error.code() in NOT_FOUND_CODES
