"""The writing side of one Pulsar topic: an exclusive producer, whose acknowledgements become log ids.

- Exclusive with fencing: a newer writer of the topic, in whatever process, takes over at once, and this one then raises
  LogFenced for ever. The broker keeps the epoch with the topic, so a restart changes nothing about it.
- The client sends again by itself what was on its way when a connection broke; the broker drops what it has, by the
  producer's name and sequence (deduplication is a policy of the namespace). A message that was dropped so is acknowledged
  without an id; as nobody else writes, it is the next one in the log, and :class:`LostId` says behind which.
- A batch that fails may be in the log up to any of its values, in order, and never with a hole: sending stops long before
  the client could give up what it holds. What failed once sends no more; the log makes a new writer.
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
    """The LogId of the client's message id (a message outside of a batch has the index 0)."""
    return LogId(message_id.ledger_id(), message_id.entry_id() << BATCH_BITS | max(0, message_id.batch_index()))


class LostId(NamedTuple):
    """A message that is in the log, but whose id got lost: the one that comes `skip` entries after position `behind`."""

    after: LogId
    skip: int


class _Chunk:
    """Messages that were given to the client together, and their acknowledgements in order."""

    __slots__ = ("acks", "before", "callback", "done", "size", "started")

    def __init__(self, count: int, size: int, released: Callable[[_Chunk], None]) -> None:
        self.acks: list[tuple[Any, Any]] = []
        self.before = LostId(LogId(0, 0), 0)
        self.done = threading.Event()
        self.size = size
        self.started = time.monotonic()
        acks = self.acks

        def callback(result: Any, message_id: Any) -> None:
            # On the client's thread, once a message: as little as can be, and an exception would end the process.
            acks.append((result, message_id))
            if len(acks) == count:
                released(self)
                self.done.set()

        self.callback = callback

    def failed(self) -> bool:
        """Whether a message of it was refused or given up, once it is done."""
        return any(message_id.ledger_id() < 0 and result != _OK for result, message_id in self.acks)


class PulsarWriter:
    """An exclusive producer on one topic. Thread-safe; appends of several threads do not mix."""

    def __init__(self, client: Any, settings: PulsarSettings, topic: str) -> None:
        """Take the topic over; :meth:`begin_at` comes before the first append. Raises ChannelNotFound, LogUnavailable, LogFenced (another one took it at the same time)."""
        self._settings = settings
        self._topic = topic
        self._sending = threading.Lock()
        self._room = threading.Condition()
        self._in_flight = 0
        self._acknowledged = LostId(LogId(0, 0), 0)
        self.failed: LogUnavailable | LogFenced | ChannelNotFound | None = None
        """Why this writer sends no more."""
        try:
            self._producer = client.create_producer(
                settings.topic_url(topic),
                # A name of its own: deduplication must never take the messages of two writers for each other's.
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
        self._send: Any = self._producer._producer.send_async  # without the wrapper's checks: half the cost a message

    def begin_at(self, end: LogId) -> None:
        """Where the log ended when this writer took it over."""
        self._acknowledged = LostId(end, 0)

    def append(self, values: Sequence[bytes]) -> list[LogId | LostId]:
        """Append `values` in order, next to each other; the id of each, once all are durable.

        Raises what :attr:`failed` then holds: LogUnavailable (a prefix of the values may be in the log), LogFenced (likewise).
        """
        with self._sending:
            if self.failed is not None:
                raise self.failed
            chunks = list(self._sent(values))
        if self.failed is None:
            try:
                # Or the last batch waits for its delay. Not `flush_async`: it holds Python's lock while it takes the client's,
                # which a thread that calls us back holds the other way round.
                self._producer.flush()
            except pulsar.PulsarException:
                pass  # the acknowledgements say what became of it
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
        """The ids of a chunk's messages, up to the first that failed."""
        ledger, entry, following, made = 0, 0, 0, tuple.__new__
        for result, message_id in chunk.acks:
            index = message_id.batch_index()
            if index > 0 and index == following:  # the next one of the same batch, as nearly all are
                entry, following = entry + 1, index + 1
                ids.append(made(LogId, (ledger, entry)))
                continue
            ledger = message_id.ledger_id()
            # Without an id the next one of its batch has none either.
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
        """Give the topic up. Idempotent."""
        if self.failed is None:
            self.failed = LogUnavailable(f"the writer of {self._topic} is closed: open the log again")
        try:
            self._producer.close()
        except pulsar.PulsarException:
            pass  # there is nothing left to release

    def _sent(self, values: Sequence[bytes]) -> Iterator[_Chunk]:
        """Give the values to the client, chunk by chunk, while there is room; stops at a failure."""
        limit = self._settings.send_timeout / 2
        oldest: list[_Chunk] = []
        for first, last, size in _chunks(values, self._settings.pending_bytes // 4):
            while oldest and oldest[0].done.is_set():
                if oldest.pop(0).failed():
                    return
            # What the client holds longer than its timeout it gives up; nothing may be sent behind it then.
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
        """A chunk is acknowledged as a whole; chunks are so in the order in which they were sent."""
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
    """First, last (exclusive) and size of runs of about `most` bytes."""
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
            f"{doing} to {topic} was refused: a newer writer took the log over. Of what was on its way a prefix may be in "
            "the log. Only if this host is to write again, open the log again: that fences the other one"
        )
    if result in _GONE:
        return ChannelNotFound(f"{doing} to {topic} failed ({result.name}): there is no such log any more")
    return LogUnavailable(
        f"{doing} to {topic} failed ({result.name}): of what was on its way a prefix may be in the log; append again, with "
        "the producer's sequence"
    )


def to_log_error(
    error: BaseException, topic: str, doing: str
) -> LogUnavailable | LogFenced | ChannelNotFound | EntryTooLarge:
    """The log's error for one of the client's."""
    if isinstance(error, pulsar.TopicNotFound):
        return ChannelNotFound(f"{doing} of {topic} failed: there is no such log; create it first")
    if isinstance(error, pulsar.ProducerFenced | pulsar.ProducerBusy):
        return LogFenced(f"{doing} of {topic} failed: another writer took the log over at the same time ({error})")
    if isinstance(error, pulsar.MessageTooBig):
        return EntryTooLarge(f"{doing} of {topic}: the broker takes no entry of this size; see pulsar.max_entry_bytes")
    return LogUnavailable(f"{doing} of {topic} failed: {error}")
