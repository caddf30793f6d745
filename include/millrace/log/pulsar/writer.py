"""The writing side of one Pulsar topic: an exclusive producer, whose acknowledgements become log ids.

- Exclusive with fencing: a newer writer of the topic, in any process, takes over at once, and this one then always
  raises LogFenced. The broker stores the epoch with the topic, so it survives restarts.
- The client resends what was in flight when a connection broke; the broker drops duplicates by the producer's name
  and sequence (deduplication is a policy of the namespace). A dropped duplicate is acknowledged without an id. Since
  nobody else writes, it is the next message in the log, and :class:`LostId` records after which position.
- After a failed append, a prefix of its values may be in the log, without a gap: sending stops long before the client
  could discard messages. A failed writer sends no more; the log creates a new one.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import _pulsar
import pulsar

from millrace.base.deadline import Deadline
from millrace.base.errors import ChannelNotFound, EntryTooLarge, LogFenced, LogUnavailable
from millrace.log.pulsar.settings import PulsarSettings
from millrace.message.ids import LogId

BATCH_BITS: Final = 20
"""Bits of a LogId's entry that hold the index in Pulsar's batch."""

BATCH_MASK: Final = (1 << BATCH_BITS) - 1

_MESSAGE_OVERHEAD: Final = 512
_CHUNK_MESSAGES: Final = 4096
_MARGIN: Final = 5.0
_OK: Final = _pulsar.Result.Ok
_FENCED: Final = (_pulsar.Result.ProducerFenced,)
_GONE: Final = (_pulsar.Result.TopicNotFound, _pulsar.Result.TopicTerminated)


def log_id_of(message_id: Any) -> LogId:
    """Return the LogId of a client's message id. A message outside of a batch has index 0."""
    return LogId(message_id.ledger_id(), message_id.entry_id() << BATCH_BITS | max(0, message_id.batch_index()))


class LostId(NamedTuple):
    """A message in the log whose id was lost: the one `skip` entries after position `after`."""

    after: LogId
    skip: int


class _Chunk:
    """Messages given to the client in one step, and their acknowledgements in order."""

    __slots__ = ("acks", "before", "callback", "done", "size", "started")

    def __init__(self, count: int, size: int, released: Callable[[_Chunk], None]) -> None:
        self.acks: list[tuple[Any, Any]] = []
        self.before = LostId(LogId(0, 0), 0)
        self.done = threading.Event()
        self.size = size
        self.started = time.monotonic()
        acks = self.acks

        def callback(result: Any, message_id: Any) -> None:
            # Runs on the client's thread for each message, so it does little; an exception would end the process.
            acks.append((result, message_id))
            if len(acks) == count:
                released(self)
                self.done.set()

        self.callback = callback

    def failed(self) -> bool:
        """Return whether one of its messages was refused or discarded. Valid once it is done."""
        return any(message_id.ledger_id() < 0 and result != _OK for result, message_id in self.acks)


class PulsarWriter:
    """An exclusive producer on one topic. Thread-safe; appends of several threads do not interleave."""

    def __init__(self, client: Any, settings: PulsarSettings, topic: str) -> None:
        """Take over the topic. Call :meth:`begin_at` before the first append.

        Raises ChannelNotFound, LogUnavailable, LogFenced (another writer took over at the same time).
        """
        self._settings = settings
        self._topic = topic
        self._sending = threading.Lock()
        self._room = threading.Condition()
        self._in_flight = 0
        self._acknowledged = LostId(LogId(0, 0), 0)
        self.failed: LogUnavailable | LogFenced | ChannelNotFound | None = None
        """Reason that this writer stopped sending."""
        try:
            self._producer = client.create_producer(
                settings.topic_url(topic),
                # A unique name: deduplication must never confuse the messages of two writers.
                producer_name=f"millrace-{uuid.uuid4().hex}",
                access_mode=_pulsar.ProducerAccessMode.ExclusiveWithFencing,
                send_timeout_millis=int(settings.send_timeout * 1000),
                max_pending_messages=0,  # bounded here, by bytes
                block_if_queue_full=True,
                batching_enabled=True,
                batching_max_messages=settings.batch_messages,
                batching_max_allowed_size_in_bytes=settings.batch_bytes,
                batching_max_publish_delay_ms=1,
            )
        except pulsar.PulsarException as error:
            raise to_log_error(error, topic, "opening a writer") from error
        self._send: Any = self._producer._producer.send_async  # without the wrapper's checks: half the cost per message

    def begin_at(self, end: LogId) -> None:
        """Set the end of the log at the takeover."""
        self._acknowledged = LostId(end, 0)

    def append(self, values: Sequence[bytes]) -> list[LogId | LostId]:
        """Append `values` in order and adjacent; return the id of each when all are durable.

        Raises the error in :attr:`failed`: LogUnavailable or LogFenced. A prefix of the values may be in the log.
        """
        with self._sending:
            if self.failed is not None:
                raise self.failed
            chunks = list(self._sent(values))
        if self.failed is None:
            try:
                # Otherwise the last batch waits for its delay. Not `flush_async`: it takes the
                # client's lock while it holds the
                # GIL, and a thread in a callback takes them in the opposite order.
                self._producer.flush()
            except pulsar.PulsarException:
                pass  # the acknowledgements have the result
        deadline = Deadline.after(self._settings.send_timeout + _MARGIN)
        ids: list[LogId | LostId] = []
        for chunk in chunks:
            if not deadline.wait(chunk.done):
                self._fail(_pulsar.Result.Timeout)
            self._collect(chunk, ids)
        if len(ids) < len(values):
            assert self.failed is not None
            raise self.failed
        return ids

    def _collect(self, chunk: _Chunk, ids: list[LogId | LostId]) -> None:
        """Add the ids of a chunk's messages, up to the first that failed."""
        ledger, entry, following, made = 0, 0, 0, tuple.__new__
        for result, message_id in chunk.acks:
            index = message_id.batch_index()
            if index > 0 and index == following:  # the common case: the next message of the same batch
                entry, following = entry + 1, index + 1
                ids.append(made(LogId, (ledger, entry)))
                continue
            ledger = message_id.ledger_id()
            # If this message has no id, later ones of its batch have none either.
            following = index + 1 if ledger >= 0 else -1
            if ledger >= 0:
                entry = message_id.entry_id() << BATCH_BITS | max(0, index)
                ids.append(LogId(ledger, entry))
                continue
            if result != _OK:
                self._fail(result)
                return
            last = ids[-1] if ids else None
            if last is None:
                ids.append(chunk.before)
            elif isinstance(last, LostId):
                ids.append(LostId(last.after, last.skip + 1))
            else:
                ids.append(LostId(last.following(), 0))

    def close(self) -> None:
        """Release the topic. Idempotent."""
        if self.failed is None:
            self.failed = LogUnavailable(f"the writer of {self._topic} is closed: open the log again")
        try:
            self._producer.close()
        except pulsar.PulsarException:
            pass  # nothing is left to release

    def _sent(self, values: Sequence[bytes]) -> Iterator[_Chunk]:
        """Send the values chunk by chunk while there is room; stop at a failure."""
        limit = self._settings.send_timeout / 2
        oldest: list[_Chunk] = []
        for first, last, size in _chunks(values, self._settings.pending_bytes // 4):
            while oldest and oldest[0].done.is_set():
                if oldest.pop(0).failed():
                    return
            # The client discards messages after its timeout; nothing may be sent after a discarded one.
            late = bool(oldest) and time.monotonic() - oldest[0].started > limit
            if late and not oldest[0].done.wait(limit + _MARGIN):
                self._fail(_pulsar.Result.Timeout)
            if self._has_failed():
                return
            self._wait_for_room(size)
            if self._has_failed():
                return
            chunk = _Chunk(last - first, size, self._released)
            send, builder, callback = self._send, _pulsar.MessageBuilder, chunk.callback
            for value in values[first:last]:
                send(builder().content(value).build(), callback)
            oldest.append(chunk)
            yield chunk

    def _has_failed(self) -> bool:
        return self.failed is not None

    def _wait_for_room(self, size: int) -> None:
        deadline = Deadline.after(self._settings.send_timeout + _MARGIN)
        with self._room:
            while self._in_flight and self._in_flight + size > self._settings.pending_bytes:
                if not deadline.wait(self._room):
                    self._fail(_pulsar.Result.Timeout)
                    return
            self._in_flight += size

    def _released(self, chunk: _Chunk) -> None:
        """Process a fully acknowledged chunk. Chunks are acknowledged in the order in which they were sent."""
        chunk.before = self._acknowledged
        for lost, (_, message_id) in enumerate(reversed(chunk.acks)):
            if message_id.ledger_id() >= 0:
                self._acknowledged = LostId(log_id_of(message_id).following(), lost)
                break
        else:
            self._acknowledged = LostId(chunk.before.after, chunk.before.skip + len(chunk.acks))
        with self._room:
            self._in_flight -= chunk.size
            self._room.notify_all()

    def _fail(self, result: Any) -> None:
        if self.failed is None:
            self.failed = _failure(result, self._topic, "an append")


def _chunks(values: Sequence[bytes], most: int) -> Iterator[tuple[int, int, int]]:
    """Yield first, last (exclusive) and size of slices of about `most` bytes."""
    first, size = 0, 0
    for place, value in enumerate(values):
        cost = len(value) + _MESSAGE_OVERHEAD
        if place > first and (size + cost > most or place - first >= _CHUNK_MESSAGES):
            yield first, place, size
            first, size = place, 0
        size += cost
    if first < len(values):
        yield first, len(values), size


def _failure(result: Any, topic: str, doing: str) -> LogUnavailable | LogFenced | ChannelNotFound:
    if result in _FENCED:
        return LogFenced(
            f"{doing} to {topic} was refused: a newer writer took over the log. A prefix of it may be in"
            " the log. Only if this host is to write again, open the log again: that fences the other one"
        )
    if result in _GONE:
        return ChannelNotFound(f"{doing} to {topic} failed ({result.name}): the log no longer exists")
    return LogUnavailable(
        f"{doing} to {topic} failed ({result.name}): a prefix of it may be in the log; append again with"
        " the producer's sequence"
    )


def to_log_error(
    error: BaseException, topic: str, doing: str
) -> LogUnavailable | LogFenced | ChannelNotFound | EntryTooLarge:
    """Return the log's error for a client error."""
    if isinstance(error, pulsar.TopicNotFound):
        return ChannelNotFound(f"{doing} of {topic} failed: the log does not exist; create it first")
    if isinstance(error, pulsar.ProducerFenced | pulsar.ProducerBusy):
        return LogFenced(f"{doing} of {topic} failed: another writer took over the log at the same time ({error})")
    if isinstance(error, pulsar.MessageTooBig):
        return EntryTooLarge(
            f"{doing} of {topic}: the broker refuses an entry of this size; see pulsar.max_entry_bytes"
        )
    return LogUnavailable(f"{doing} of {topic} failed: {error}")
