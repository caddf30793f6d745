"""The writing side of one partition of a Kafka topic: an idempotent producer, whose acknowledgements become log ids.

- Values of one append are adjacent in the producer's queue, and so in the topic, unless another process appends at
  the same time.
- The client resends what was in flight when a connection broke, at most `attempts` times; the broker drops duplicates
  by the producer's sequence. An append that is not acknowledged within the deadline fails and leaves a prefix of its
  values in the topic: the producer is purged from the queue's end, before anything else can be sent through it, and
  replaced.
- The queue is bounded in bytes: more waits for room, within the deadline.
- A delivery report for each value costs more than sending it, so reports are requested only for some, including the
  first and the last. Offsets are consecutive unless another client wrote at the same time; in that case the values in
  between are looked up in the topic.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from millrace.base.deadline import Deadline
from millrace.base.errors import ChannelNotFound, EntryTooLarge, InvalidSettings, LogUnavailable, MillraceError
from millrace.log.kafka.settings import BATCH_BYTES, OVERHEAD_BYTES, KafkaPartition, KafkaSettings

_log = logging.getLogger(__name__)

_QUEUED_MESSAGES: Final = 500_000
_POLL: Final = 0.1
_PIECE: Final = 1024
"""Values queued per call at most. Between two calls the reports of earlier values are checked."""
_PIECE_BYTES: Final = 4 << 20
_REPORT_BYTES: Final = 64 << 10
"""One report is requested per this many bytes of values."""
_ROOM_PAUSE: Final = 0.02
_REFUSED: Final = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,
)
_FOLLOWS: Final = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._FATAL)
"""Codes of values that failed because others did."""
_LAST_REPORTS: Final = 2.0
"""Longest wait in seconds for the reports of a discarded producer: they come at once."""


class _Batch:
    """The values of one append in flight."""

    __slots__ = ("asked", "bytes", "done", "errors", "offsets", "report")

    def __init__(self, values: Sequence[bytes], every: int, finished: Callable[[], None]) -> None:
        """Request reports of the first value, the last, and one per `every` bytes."""
        sizes = np.fromiter(map(len, values), np.int64, len(values))
        ends = sizes.cumsum()
        self.bytes = int(ends[-1])
        due = ends // every != (ends - sizes) // every if every else np.ones(len(values), np.bool_)
        due[[0, -1]] = True
        self.asked: list[int] = np.flatnonzero(due).tolist()
        self.offsets: list[int | None] = []
        """Offsets of the values in `asked`, in the order of the reports. Meaningless if there are `errors`."""
        self.errors: list[KafkaError] = []
        self.done = False

        def report(error: KafkaError | None, message: Message) -> None:
            # Runs in the polling thread, so it does little. The message is a copy of the value and is freed at once.
            offsets.append(message.offset())
            if error is not None:
                errors.append(error)
            if len(offsets) == expected:
                self.done = True
                finished()

        offsets, errors, expected = self.offsets, self.errors, len(self.asked)
        self.report = report

    def records(self, start: int, values: Sequence[bytes]) -> list[dict[str, Any]]:
        """Return the client's records for `values`; the first is value `start` of the append."""
        records: list[dict[str, Any]] = [{"value": value} for value in values]
        first, last = bisect_left(self.asked, start), bisect_left(self.asked, start + len(values))
        for index in self.asked[first:last]:
            records[index - start]["callback"] = self.report
        return records

    def places(self) -> list[int] | None:
        """Return the offsets of the reported values; None unless all were delivered, in order."""
        if self.errors or not self.done:
            return None
        # No valid offset: the broker had the message already and no longer knows its offset.
        offsets = [-1 if place is None else place for place in self.offsets]
        spans = zip(pairwise(self.asked), pairwise(offsets), strict=True)
        ordered = offsets[0] >= 0 and all(high - low >= last - first for (first, last), (low, high) in spans)
        return offsets if ordered else None


class KafkaWriter:
    """Appends to one partition. Thread-safe."""

    def __init__(
        self,
        settings: KafkaSettings,
        place: KafkaPartition,
        *,
        exists: Callable[[], bool],
        read: Callable[[int, int], Iterable[tuple[int, bytes]]],
    ) -> None:
        """`exists` tells whether the partition certainly exists; `read` yields its records between two offsets."""
        self._exists = exists
        self._read = read
        self._settings = settings
        self._place = place
        self._order = threading.Lock()
        """Lock held while an append's values are queued, and while a producer is replaced."""
        self._polling = threading.Lock()
        """Lock of the thread that polls the client. Two at once could deliver the reports of one append out of order.
        """
        self._changed = threading.Condition()
        self._producer: Producer | None = None
        self._doomed: Producer | None = None
        self._fatal: tuple[Producer, KafkaError] | None = None
        """The newest producer that stopped for good, and why."""
        self._closed = False
        self._beside = False
        """Somebody else has written between values of ours: a report for each is cheaper than to look them up."""

    def append(self, values: Sequence[bytes]) -> Sequence[int]:
        """Append `values` in order, at least one; return their offsets when the brokers have all of them.

        Raises LogUnavailable (a prefix may be in the log).
        Raises EntryTooLarge (likewise: the topic accepts less than the settings say).
        Raises ChannelNotFound, InvalidSettings (access denied).
        """
        deadline = Deadline.after(self._settings.deadline)
        batch = _Batch(values, 0 if self._beside else _REPORT_BYTES, self._notify)
        with self._order:
            if self._closed:
                raise LogUnavailable(f"the log {self._place} is closed: open it again")
            producer = self._producer = self._producer or self._make_producer()
            queued = self._queue(producer, values, batch, deadline)
            if not queued:
                self._give_up(producer)
        if queued and self._wait(producer, batch, deadline) and (places := batch.places()) is not None:
            return self._all_places(values, batch.asked, places)
        self._doomed = producer
        with self._order:
            self._give_up(producer)
        raise self._failure(producer, batch)

    def close(self) -> None:
        """Stop appending; appends in flight fail. Idempotent."""
        self._doomed = self._producer
        with self._order:
            self._closed = True
            if self._producer is not None:
                self._give_up(self._producer)

    def _make_producer(self) -> Producer:
        limit = max(self._settings.max_entry_bytes, BATCH_BYTES) + OVERHEAD_BYTES
        made: list[Producer] = []

        def failed(error: KafkaError) -> None:
            # A failed value may have no report, and later ones get none before they are purged.
            if error.fatal() and made:
                self._fatal = made[0], error
                self._doomed = made[0]

        try:
            producer = Producer(
                {
                    **self._settings.rdkafka(),
                    "error_cb": failed,
                    "acks": "all",
                    "enable.idempotence": True,
                    # An error that would leave a gap in a batch stops the producer instead.
                    "enable.gapless.guarantee": True,
                    "message.send.max.retries": self._settings.attempts,
                    "retry.backoff.ms": 100,
                    "retry.backoff.max.ms": 1000,
                    # Our own deadline purges everything at once; the client's would time messages out one by one.
                    "message.timeout.ms": 0,
                    # While one batch is in flight the next one fills, so no value has to linger.
                    "linger.ms": 0,
                    "batch.size": BATCH_BYTES,
                    "message.max.bytes": limit,
                    "queue.buffering.max.messages": _QUEUED_MESSAGES,
                    "queue.buffering.max.kbytes": max(1, (self._settings.queue_bytes + limit) >> 10),
                },
                logger=_log,
            )
        except KafkaException as error:
            raise InvalidSettings(f"Kafka's client refuses its settings: {error.args[0].str()}") from error
        made.append(producer)
        return producer

    def _queue(self, producer: Producer, values: Sequence[bytes], batch: _Batch, deadline: Deadline) -> bool:
        """Queue all values, waiting for room; False if that fails."""
        piece = max(1, min(_PIECE, len(values) * _PIECE_BYTES // max(1, batch.bytes)))
        for start in range(0, len(values), piece):
            self._serve(producer, 0)
            if batch.errors:
                return False  # send nothing after a missing value
            waiting = batch.records(start, values[start : start + piece])
            while True:
                taken = producer.produce_batch(self._place.topic, waiting, self._place.partition)
                if taken == len(waiting):
                    break
                # If one value finds no room, no later one is taken. Any other error ends the producer or leaves a gap.
                waiting = waiting[taken:]
                if any(each.pop("_error", None) != KafkaError._QUEUE_FULL for each in waiting):
                    return False
                if self._stopped(producer) or deadline.expired():
                    return False
                self._serve(producer, _ROOM_PAUSE)
        return not self._stopped(producer)

    def _wait(self, producer: Producer, batch: _Batch, deadline: Deadline) -> bool:
        """Wait for all acknowledgements; False at the deadline and at the first error.

        One of the waiting threads polls the client for all.
        """
        while not batch.done:
            left = deadline.remaining(maximum=_POLL)
            if not left or batch.errors or self._stopped(producer):
                return batch.done
            if self._polling.acquire(blocking=False):
                try:
                    # The polling thread continues until its own batch is done: handing over costs more than a poll.
                    while self._waits(producer, batch, deadline):
                        self._poll(producer, left)
                finally:
                    self._polling.release()
                    self._notify()
            else:
                with self._changed:
                    self._changed.wait_for(lambda: batch.done or not self._polling.locked(), left)
        return True

    def _serve(self, producer: Producer, seconds: float) -> None:
        """Poll the client for reports, or wait for room while another thread polls."""
        if self._polling.acquire(blocking=False):
            try:
                self._poll(producer, seconds)
            finally:
                self._polling.release()
                self._notify()
        elif seconds:
            time.sleep(seconds)

    def _poll(self, producer: Producer, seconds: float) -> int:
        """Poll the client; return the number of reports, or -1 if it has stopped permanently.

        The caller holds `_polling`.
        """
        try:
            return int(producer.poll(seconds))
        except KafkaException:  # each value's report, still to come, has the reason
            self._doomed = producer
            return -1

    def _waits(self, producer: Producer, batch: _Batch, deadline: Deadline) -> bool:
        return not (batch.done or batch.errors or self._stopped(producer)) and not deadline.expired()

    def _stopped(self, producer: Producer) -> bool:
        return self._doomed is producer

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _give_up(self, producer: Producer) -> None:
        """Discard a producer. The caller holds `_order`, so nothing is being queued."""
        self._doomed = producer
        if self._producer is producer:
            self._producer = None
        producer.purge()  # the queue first, then messages in flight, so that the brokers have a prefix
        until = Deadline.after(_LAST_REPORTS)
        with self._polling:  # a thread that holds it stops polling a discarded producer
            # The error may be known before the reports of the failed values.
            while len(producer) and not until.expired():
                self._poll(producer, _ROOM_PAUSE)
        self._notify()

    def _all_places(self, values: Sequence[bytes], asked: list[int], places: list[int]) -> Sequence[int]:
        """Return the offset of each value, given those of some.

        Raises LogUnavailable if one cannot be looked up.
        """
        if places[-1] - places[0] == len(values) - 1:
            return range(places[0], places[-1] + 1)
        self._beside = True
        found = places[:1]
        for (first, last), (low, high) in zip(pairwise(asked), pairwise(places), strict=True):
            if high - low == last - first:
                found += range(low + 1, high + 1)
            else:
                found += self._looked_up(values[first + 1 : last], low + 1, high)
                found.append(high)
        return found

    def _looked_up(self, values: Sequence[bytes], start: int, stop: int) -> list[int]:
        """Find the offsets of `values`, which the topic has in this order in a range of offsets, between records of
        others.

        Of several records with the same bytes, the first ones count.
        """
        found: list[int] = []
        try:
            for offset, value in self._read(start, stop):
                if len(found) < len(values) and value == values[len(found)]:
                    found.append(offset)
        except MillraceError as error:
            raise self._places_lost(start, stop) from error
        if len(found) < len(values):
            raise self._places_lost(start, stop)
        return found

    def _places_lost(self, start: int, stop: int) -> LogUnavailable:
        return LogUnavailable(
            f"an append to {self._place} is in the log, mixed with records of another client; which of the offsets"
            f" {start} to"
            f" {stop - 1} are its own cannot be determined: query the log by the producer's sequence"
        )

    def _failure(self, producer: Producer, batch: _Batch) -> MillraceError:
        error = next((each for each in batch.errors if each.code() not in _FOLLOWS), None)
        if error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return EntryTooLarge(
                f"topic {self._place.topic} refuses a batch of this size: raise its max.message.bytes, or lower"
                " max_entry_bytes"
            )
        unknown = error is not None and error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
        if unknown and not self._exists():
            return ChannelNotFound(f"there is no {self._place} any more: create its channel first")
        if error is not None and error.code() in _REFUSED:
            return InvalidSettings(f"the brokers refuse an append to {self._place}: {error.str()}")
        if error is not None:
            reason = f"Kafka says: {error.str()}"
        elif self._fatal is not None and self._fatal[0] is producer:
            reason = f"Kafka says: {self._fatal[1].str()}"
        elif batch.done and not batch.errors:
            reason = "the brokers no longer know the offsets"
        else:
            reason = f"no answer within {self._settings.deadline:.0f} s"
        return LogUnavailable(
            f"an append to {self._place} was not acknowledged ({reason}): a prefix of it may be in the"
            " log; append it again with the producer's sequence"
        )
