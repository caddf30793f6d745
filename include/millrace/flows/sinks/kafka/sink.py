"""The Kafka sink: an idempotent producer, so that one attempt neither loses, duplicates nor reorders messages.

``at least once``: a batch is written when the brokers have acknowledged each message; a repeated batch is sent again.
The headers identify each message, so that a reader can drop repeats: effectively once.

- A document's key is its id. Its header ``millrace.position`` is the source's position.
- A row's value is JSON, its key the text of a column. Its headers are ``millrace-stream`` (created with the sink's
  memory), ``millrace-batch`` and ``millrace-row``. A reader that stores the greatest (batch, row) of a stream and
  partition drops the repeats. For that, a repeated row must go to its previous partition, so a row without a key is
  assigned by its number in the batch, where Kafka would choose randomly. Both hold while the topic's number of
  partitions does not change.

A topic that is compacted by key ends with the same documents even without such a reader.

``exactly once``: a batch is a transaction, which commits the lane's position with it, and documents that the topic has
already are left out (millrace.flows.sinks.kafka.transactions). It holds for readers of committed messages. A batch that
moves no position (a redrive, a source that can stop only at the end of a range) is sent without a transaction, at least
once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, TypeAlias

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from pydantic import ValidationError

from millrace.base.errors import BatchRefused, InvalidArgument, SinkBusy, SinkRefused
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.conversion import documents_of
from millrace.flows.debezium.model import FORMAT
from millrace.flows.debezium.writing import EventWriter, columns_of
from millrace.flows.guarantee import Guarantee, require_guarantee
from millrace.flows.kafka.brokers import checked_metadata, client_settings
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.records import BINARY, TASK_PUT, Action, Failure, Record
from millrace.flows.sinks.kafka.model import KafkaSink as Declared
from millrace.flows.sinks.kafka.transactions import MAX_FAILURES, Transactions
from millrace.flows.sinks.memory import Folder, name_in
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.sink import Verdicts, require_some

POSITION: Final = "millrace.position"
STEP: Final = "kafka"
Headers: TypeAlias = list[tuple[str, str | bytes | None]]
_ANY: Final = -1
"""The partition of a message whose partition its key or Kafka decides."""
_KIND: Final = 24
"""The most characters of a failure's kind that a transaction stores."""
SECONDS: Final = 60.0
"""Longest wait for a message's acknowledgement."""
_OWN_FAULT: Final = frozenset(
    {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG_SIZE}
)
_REFUSED: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
    }
)


class KafkaSink:
    """Writes the batches of one lane to one topic."""

    def __init__(
        self,
        declared: Declared,
        *,
        memory: Folder | None = None,
        key: str | None = None,
        guarantee: Guarantee = "at least once",
        flush: Flush = Flush(),  # noqa: B008 - frozen
        options: Mapping[str, str] | None = None,
        flow: str = "",
        events: EventWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For rows, `memory` is the sink's folder, and `key` the column with a message's key.

        `flow` is the name of documents' lanes, for transactions. `events` encodes documents as change events. `options`
        are passed to confluent-kafka's producer. Raises InvalidArgument for a guarantee that Kafka does not offer.
        """
        require_guarantee(guarantee, "kafka")
        self._declared = declared
        self._topic = f"topic {declared.topic}"
        self._key = key
        self._stream = b"" if memory is None else name_in(memory, "kafka-stream.json").encode()
        self._clock = clock
        self._partitions = 0
        self._events = events
        self._flow = self._stream.decode() if memory is not None else flow
        self._transactional = guarantee == "exactly once"
        self._lanes: dict[str, Transactions] = {}
        self._settings: dict[str, Any] = {
            **client_settings(declared),
            "acks": "all",
            "enable.idempotence": True,
            "compression.type": declared.compression,
            "linger.ms": 5,
            "delivery.report.only.error": True,
            "batch.size": 1 << 20,
            "message.max.bytes": 64 << 20,
            "delivery.timeout.ms": int(SECONDS * 1000),
            "queue.buffering.max.messages": max(flush.items, 100_000),
            "queue.buffering.max.kbytes": max(int(flush.mib * 1024), 65_536),
            **(options or {}),
        }
        self._producer = Producer(self._settings, logger=_quiet())

    @classmethod
    def of_rows(
        cls,
        memory: Folder,
        topic: str,
        cluster: KafkaCluster | str,
        *,
        key: str | None = None,
        guarantee: Guarantee = "at least once",
        options: Mapping[str, str] | None = None,
    ) -> Self:
        """Return a sink of rows into `topic` of `cluster`, or of brokers (host:port, separated by commas).

        Raises InvalidArgument.
        """
        try:
            if isinstance(cluster, str):
                cluster = KafkaCluster(bootstrap=tuple(each.strip() for each in cluster.split(",")))
            reached = {name: getattr(cluster, name) for name in KafkaCluster.model_fields}
            declared = Declared(**reached, topic=topic, compression="none")
        except ValidationError as error:
            raise InvalidArgument(f"the topic {topic!r} at {cluster!r}: {error.errors()[0]['msg']}") from None
        return cls(declared, memory=memory, key=key, guarantee=guarantee, options=options)

    def check(self, schema: pa.Schema, /) -> None:
        """Raise InvalidArgument for rows without the key's column."""
        if self._key is not None and self._key not in schema.names:
            raise InvalidArgument(f"the rows have no column {self._key!r}, which is the messages' key")

    def open(self) -> None:
        """Connect and find the topic. Raises SinkBusy, SinkRefused."""
        wait = self._declared.socket_timeout_ms / 1000
        try:
            metadata = checked_metadata(self._producer.list_topics(self._declared.topic, timeout=wait))
        except KafkaException as error:
            raise SinkBusy(f"Kafka does not answer: {error.args[0]}", retry_after=1.0) from None
        topic = metadata.topics.get(self._declared.topic)
        if topic is None or topic.error is not None:
            raise SinkRefused(f"there is no topic {self._declared.topic}: create it")
        self._partitions = len(topic.partitions)
        if self._events is not None:
            self._events.open()

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return the committed positions of transactions, for the lanes that this sink owns."""
        found = {name: self._lanes[name].position for name in lanes if name in self._lanes}
        return {name: position for name, position in found.items() if position}

    def write(self, batch: Batch, /) -> Verdicts:
        """Write a batch. Raises SinkBusy, SinkRefused, BatchRefused."""
        if not self._partitions:
            self.open()
        if self._transactional and batch.end > batch.start:
            return self._write_lane(batch)
        documents, failures = self._messages(self._documents(batch))
        # A delete's event has a tombstone: their acknowledgements cannot be told apart.
        taken: set[int] | None = set() if self._events is None and batch.documents is not None else None
        verdicts = self._sent(self._producer, batch, documents, taken=taken)
        if verdicts.failures and verdicts.acknowledged + len(verdicts.failures) > 1:
            # A refused message also fails the others in its request.
            first = verdicts.failures[0]
            raise BatchRefused(
                f"{self._topic} refused {len(verdicts.failures)} documents, the first of them"
                f" {first.record.position}: {first.kind}: {first.reason}",
                taken=taken or (),
            )
        verdicts.failures += failures
        require_some(verdicts, verdicts.failures, self._topic)
        hit("sink.sent")
        return verdicts

    def close(self) -> None:
        """Discard unacknowledged messages: their batch is not written. Idempotent."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        self._producer.purge()
        self._producer.flush(1.0)

    # --- transactions ------------------------------------------------------------------------------------------------

    def _write_lane(self, batch: Batch) -> Verdicts:
        try:
            return self._once(self._lane(batch), batch)
        except BaseException as error:
            # The next attempt takes over the lane and reads its position.
            lane = self._lanes.pop(batch.lane, None)
            if lane is not None:
                said = lane.abandon()
                if isinstance(error, KafkaException):
                    raise lane.whole(error.args[0]) from None
                if isinstance(error, SystemError) and said is not None:
                    raise lane.whole(said) from None
            raise

    def _lane(self, batch: Batch) -> Transactions:
        known = self._lanes.get(batch.lane)
        if known is not None and known.generation == batch.generation:
            return known
        if known is not None:
            self._lanes.pop(batch.lane).close()
        self._lanes[batch.lane] = Transactions(
            self._settings,
            client_settings(self._declared),
            self._declared.topic,
            name=f"millrace-{self._flow}-{batch.lane}",
            generation=batch.generation,
            logger=_quiet(),
        )
        return self._lanes[batch.lane]

    def _once(self, lane: Transactions, batch: Batch) -> Verdicts:
        if batch.documents is None and batch.end <= lane.position:
            places = sorted(lane.failures) if batch.end == lane.position else ()
            records = (Record(batch.lane, batch.start, place, None, None, -1) for place in places)
            return Verdicts(again=True, failures=[_refused_earlier(each, lane.failures) for each in records])
        verdicts, of_rows = Verdicts(), batch.documents is None
        documents: Sequence[Action] = ()
        failures: list[Failure] = []
        if of_rows:
            batch = replace(batch, rows=list(batch.rows or ()))  # each attempt reads the rows
        else:
            documents = list(self._documents(batch))
            before = [each for each in documents if each.record.offset < lane.position]
            codes = lane.failures
            refused = [each for each in before if each.record.offset in codes]
            verdicts.failures = [_refused_earlier(each.record, codes) for each in refused]
            verdicts.acknowledged = verdicts.repeated = len(before) - len(refused)
            documents = [each for each in documents if each.record.offset >= lane.position]
            if not documents:
                return verdicts
            messages, failures = self._messages(documents)
            documents = list(messages)
        if len(failures) > MAX_FAILURES:
            raise SinkRefused(
                f"{self._topic}: {len(failures)} documents of one batch cannot become events, the last of them"
                f" {failures[-1].record.position}: {failures[-1].reason}"
            )
        alone: set[str] = set()
        gone: set[str] = set()
        while True:
            lane.begin()
            messages = self._documents(batch) if of_rows else documents
            left = (each for each in messages if each.record.position not in gone) if gone else messages
            sent = self._sent(lane.producer, batch, left, alone)
            if not sent.failures:
                break
            # A refusal aborts the transaction. A message that is too large also fails others in its request, so each of
            # them is sent alone next, and is at fault if it is refused then.
            # The client does not recover reliably from a refusal within a transaction, so the lane gets a new client.
            lane.close()
            self._lanes.pop(batch.lane, None)
            lane = self._lane(batch)
            wrong = {each.record.position for each in sent.failures}
            judged = [each for each in sent.failures if each.record.position in alone]
            alone |= wrong
            failures += judged
            gone |= {each.record.position for each in judged}
            _require_few(self._topic, {each.record.offset: each.kind for each in failures})
        # Rows' numbers belong to one batch, which is written as a whole.
        earlier = {} if of_rows else lane.failures
        stored = {place: kind for place, kind in earlier.items() if place >= batch.since}
        stored |= {each.record.offset: each.kind[:_KIND] for each in (*batch.aside, *failures)}
        _require_few(self._topic, stored)
        hit("sink.produced")
        lane.commit(max(batch.end, lane.position), stored)
        hit("sink.sent")
        verdicts.bulks = 1
        verdicts.acknowledged += sent.acknowledged
        verdicts.failures += failures
        return verdicts

    # --- messages ----------------------------------------------------------------------------------------------------

    def _messages(self, documents: Iterable[Action]) -> tuple[Iterable[Action], list[Failure]]:
        """Return the messages of `documents`, and a failure for each one that cannot become an event."""
        return (documents, []) if self._events is None else self._events.encoded(documents)

    def _documents(self, batch: Batch) -> Iterable[Action]:
        if batch.documents is not None:
            return batch.documents
        return documents_of(batch, key=() if self._key is None else (self._key,))

    def _sent(
        self,
        producer: Producer,
        batch: Batch,
        documents: Iterable[Action],
        alone: Set[str] = frozenset(),
        taken: set[int] | None = None,
    ) -> Verdicts:
        """Send `documents` of `batch` in order and wait for all acknowledgements. Raises SinkBusy, SinkRefused.

        A document is sent before the next one is created, so that the client sends while rows become JSON.

        `taken` gets the positions of acknowledged documents.

        Within a transaction, a refusal ends it, so nothing more is sent. Documents at the positions `alone` are sent in
        their own requests.
        """
        answers = _Answers(batch, taken, events=self._events is not None)
        verdicts, within, of_rows = answers.verdicts, producer is not self._producer, batch.documents is None
        row_answered, answered = answers.of_row, answers.of_document
        stream, number = ("millrace-stream", self._stream), ("millrace-batch", str(batch.start))
        for action in documents:
            record = action.record
            # No reference holds a row's document while its message is in flight: the garbage collector would visit it.
            on_delivery = partial(row_answered, record.offset) if of_rows else partial(answered, action)
            by_itself = bool(alone) and record.position in alone
            if by_itself:
                _flush(producer)
            key, partition = record.key, _ANY
            if of_rows:
                headers: Headers = [stream, number, ("millrace-row", str(record.offset))]
                if key is None:
                    partition = record.offset % self._partitions
            else:
                key, headers = action.id.encode(), [(POSITION, record.position.encode())]
                if self._events is not None:
                    headers += [each for each in record.headers if each[0] == BINARY]
            # Counted as acknowledged until the client reports otherwise, since it reports only failures.
            verdicts.acknowledged += self._events is None or action.body is not None
            if taken is not None:
                taken.add(record.offset)
            refused = self._produce(producer, action.body, key, headers, partition, on_delivery)
            if refused is not None and not (within and verdicts.failures):
                if refused.code() not in _OWN_FAULT:
                    raise SinkBusy(f"{self._topic}: {refused.str()}", retry_after=1.0)
                answered(action, refused)
            if by_itself:
                _flush(producer)
            if within and verdicts.failures:
                break
        left = _flush(producer)
        trouble = answers.trouble
        if left or (trouble and not (within and verdicts.failures)):
            error = trouble[0] if trouble else None
            said = error.str() if error is not None else f"{left} records were not acknowledged"
            if error is not None and error.code() in _REFUSED:
                raise SinkRefused(f"{self._topic}: {said}")
            # Without all acknowledgements it is unknown which messages were written.
            raise SinkBusy(f"{self._topic}: {said}", retry_after=1.0, taken=(not left and taken) or ())
        return verdicts

    def _produce(
        self,
        producer: Producer,
        body: bytes | None,
        key: bytes | None,
        headers: Headers,
        partition: int,
        on_delivery: Callable[[KafkaError | None, Message], None],
    ) -> KafkaError | None:
        """Pass a message to the client. Return its refusal, if any. Raises SinkBusy if its queue stays full."""
        deadline: float | None = None
        while True:
            try:
                producer.produce(self._declared.topic, body, key, partition, on_delivery=on_delivery, headers=headers)
            except BufferError:
                now = self._clock()
                deadline = now + SECONDS if deadline is None else deadline
                if now > deadline:
                    raise SinkBusy(f"{self._topic}: the brokers accept nothing", retry_after=1.0) from None
                producer.poll(0.1)
            except KafkaException as error:
                refused: KafkaError = error.args[0]
                if refused.code() == KafkaError._STATE:
                    _flush(producer)  # an earlier refusal ended the transaction: wait until it is reported
                return refused
            else:
                producer.poll(0)
                return None


def _flush(producer: Producer) -> int:
    """Wait for the acknowledgement of all messages. Return the number of messages without one.

    Raises KafkaException; after a fatal error also SystemError, since the client then reports deliveries with its
    exception set.
    """
    return int(producer.flush(SECONDS + 5))


class _Answers:
    """Moves failures from the acknowledged count and from `taken`."""

    def __init__(self, batch: Batch, taken: set[int] | None, *, events: bool) -> None:
        self._batch, self._events, self._taken = batch, events, taken
        self.verdicts = Verdicts(bulks=1)
        self.trouble: list[KafkaError] = []
        """Failures that are not the message's fault."""

    def of_document(self, action: Action, error: KafkaError | None, _: Message | None = None) -> None:
        if error is None:
            return
        # The tombstone after a delete's event does not count as a document.
        self.verdicts.acknowledged -= not self._events or action.body is not None
        if self._taken is not None:
            self._taken.discard(action.record.offset)
        if error.code() in _OWN_FAULT:
            self.verdicts.failures.append(_failure(action, error))
        else:
            self.trouble.append(error)

    def of_row(self, number: int, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            record = Record(self._batch.lane, self._batch.start, number, message.key(), message.value(), -1)
            self.of_document(Action(record, "", record.value, None), error)


def _require_few(topic: str, refused: Mapping[int, str]) -> None:
    if len(refused) > MAX_FAILURES:
        last = max(refused)
        raise SinkRefused(
            f"{topic} refused {len(refused)} documents of one range, the last of them at {last}: {refused[last]}"
        )


def _refused_earlier(record: Record, kinds: Mapping[int, str]) -> Failure:
    return Failure(record, TASK_PUT, STEP, kinds[record.offset], "an earlier attempt refused it")


def _failure(action: Action, error: KafkaError) -> Failure:
    return Failure(action.record, TASK_PUT, STEP, str(error.name()), error.str())


def _quiet() -> Any:
    import logging

    logger = logging.getLogger("millrace.pipelines.kafka")
    logger.setLevel(logging.CRITICAL)  # failures are raised with their reason
    return logger


def made(declared: Declared, settings: Settings, *, flow: str, flush: Flush) -> KafkaSink:
    """Return the sink that `flow` declares."""
    guarantee: Guarantee = "exactly once" if declared.transactional else "at least once"
    events = None
    if declared.format == FORMAT:
        events = EventWriter(declared.debezium, lambda: columns_of(settings, declared.debezium.collection))
    return KafkaSink(declared, flush=flush, flow=flow, guarantee=guarantee, events=events)
