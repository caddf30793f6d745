"""The error topic: the original record, with Kafka Connect's headers on where and why it failed.

Existing headers (from an earlier failure, another system, or forged) are never overwritten: new ones are appended, and
the last of a name counts. All in-sync replicas acknowledge the records before the offsets move. A repeated range may
produce its failures again, with the same origin in the headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from millrace.base.errors import SinkBusy, SinkRefused
from millrace.flows.declare.flow import Flow
from millrace.flows.errors.selection import PREFIX
from millrace.flows.kafka.brokers import client_settings
from millrace.flows.range_host import topic_admin
from millrace.flows.records import Failure, Record
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.kafka.topics import logger

MAX_BYTES: Final = 64 << 20
OMITTED: Final = "millrace.value.omitted"
"""The header of a record whose value and own headers were too large. The other headers name its original position."""
_SECONDS: Final = 60.0
_KEY: Final = 1024
_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE})


def headers_of(failure: Failure, *, flow: str, task: str) -> dict[str, bytes]:
    """Return Kafka Connect's headers (DeadLetterQueueReporter), with a description instead of a Java stack trace."""
    record = failure.record
    tried = {f"{PREFIX}attempts": str(failure.attempts).encode()} if failure.attempts > 1 else {}
    return {
        f"{PREFIX}topic": record.topic.encode(),
        f"{PREFIX}partition": str(record.partition).encode(),
        f"{PREFIX}offset": str(record.offset).encode(),
        f"{PREFIX}connector.name": flow.encode(),
        f"{PREFIX}task.id": task.encode(),
        f"{PREFIX}stage": failure.stage.encode(),
        f"{PREFIX}class.name": failure.step.encode(),
        f"{PREFIX}exception.class.name": failure.kind.encode(),
        f"{PREFIX}exception.message": failure.reason.encode(),
        f"{PREFIX}exception.stacktrace": f"{failure.stage} {failure.step}: {failure.kind}: {failure.reason}".encode(),
        **tried,
    }


def origin_of(record: Record) -> Record | None:
    """Return the failed record of a record of the error topic, with its first position.

    None if the headers name no position, or if its value was omitted.
    """
    origin = {name: value for name, value in record.headers if name.startswith(PREFIX)}  # the last of each name
    if OMITTED in dict(record.headers):
        return None
    try:
        topic = (origin[f"{PREFIX}topic"] or b"").decode()
        partition, offset = (int(origin[f"{PREFIX}{name}"] or b"") for name in ("partition", "offset"))
    except (KeyError, ValueError):
        return None
    own_headers = [(name, value) for name, value in record.headers if not name.startswith(PREFIX)]
    return Record(topic, partition, offset, record.key, record.value, record.timestamp, own_headers)


def is_of(record: Record, flow: str) -> bool:
    """Return whether a record of the error topic belongs to `flow`, since several flows may share the topic."""
    names = [value for name, value in record.headers if name == f"{PREFIX}connector.name"]
    return bool(names) and names[-1] == flow.encode()


def error_source(flow: Flow) -> KafkaSource:
    """Return the error topic as a source that reads all records, including those of aborted transactions."""
    cluster = flow.errors_cluster
    return KafkaSource(
        bootstrap=cluster.bootstrap,
        security=cluster.security,
        socket_timeout_ms=cluster.socket_timeout_ms,
        topics=(flow.errors_topic,),
        isolation="read_uncommitted",
    )


class ErrorTopic:
    """Writes a task's failures to the error topic."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow.name
        self._topic = flow.errors_topic
        self._producer = Producer(
            {
                **client_settings(flow.errors_cluster),
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 5,
                "message.max.bytes": MAX_BYTES,
                "delivery.timeout.ms": int(_SECONDS * 1000),
            },
            logger=logger,
        )

    def put(self, failures: Sequence[Failure], *, task: str) -> None:
        """Produce `failures`; returns when acknowledged.

        Raises SinkBusy, SinkRefused; the position must not move then.
        """
        trouble: list[KafkaError] = []
        too_large: list[Failure] = []
        for failure in failures:
            self._produce(failure, task, trouble, too_large)
        left = self._producer.flush(_SECONDS + 5)
        # An existing topic may allow smaller records than the source's. Send one by one, since one large record fails a
        # whole batch. Without its value, a record is still listed.
        for failure in too_large:
            alone: list[Failure] = []
            self._produce(failure, task, trouble, alone)
            left += self._producer.flush(_SECONDS + 5)
            if alone:
                self._produce(failure, task, trouble, None)
                left += self._producer.flush(_SECONDS + 5)
        if trouble or left:
            said = trouble[0].str() if trouble else f"{left} records were not acknowledged"
            if trouble and trouble[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise SinkRefused(f"there is no error topic {self._topic}: create it, or set errors.create")
            raise SinkBusy(f"error topic {self._topic}: {said}", retry_after=1.0)

    def _produce(self, failure: Failure, task: str, trouble: list[KafkaError], too_large: list[Failure] | None) -> None:
        """Pass a failure to the producer.

        Errors are added to `trouble`, too large ones to `too_large`; None omits the value.
        """

        def on_delivery(error: KafkaError | None, _: Any = None) -> None:
            if error is None:
                return
            if too_large is not None and error.code() in _TOO_LARGE:
                too_large.append(failure)
            else:
                trouble.append(error)

        record, whole = failure.record, too_large is not None
        made = headers_of(failure, flow=self._flow, task=task)
        headers: list[tuple[str, str | bytes | None]] = list(record.headers) if whole else [(OMITTED, b"true")]
        headers += made.items()
        value, key = (record.value, record.key) if whole else (None, (record.key or b"")[:_KEY])
        try:
            while True:
                try:
                    self._producer.produce(
                        self._topic,
                        value,
                        key,
                        headers=headers,
                        timestamp=max(record.timestamp, 0),
                        on_delivery=on_delivery,
                    )
                    break
                except BufferError:
                    self._producer.poll(0.1)
        except KafkaException as error:
            on_delivery(error.args[0])
        self._producer.poll(0)

    def close(self) -> None:
        """Idempotent."""
        self._producer.purge()
        self._producer.flush(1.0)


def ensure_topic(flow: Flow) -> None:
    """Create the error topic if necessary and allowed. Raises LogUnavailable, InvalidSettings, SinkRefused."""
    topic = flow.errors_topic
    if topic in topic_admin.look(flow.errors_cluster).topics:
        return
    if not flow.errors.create:
        raise SinkRefused(f"there is no error topic {topic}: create it, or set errors.create")
    make_error_topic(flow)


def make_error_topic(flow: Flow) -> None:
    """Create the error topic so that it accepts any record of the source's topics, with the added headers."""
    topic_admin.make(flow.errors_cluster, [flow.errors_topic], settings={"max.message.bytes": str(MAX_BYTES)})
