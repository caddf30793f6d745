"""The error topic: the record as it came, with Kafka Connect's headers that say where it failed and why.

A header that is there already (of an earlier failure, elsewhere) is never written over. What is produced is acknowledged by all
in-sync replicas before the offsets move; a range that is repeated may bring its failures again, with the same origin in the headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from millrace.base.errors import SinkBusy, SinkRefused
from millrace.pipelines.model.pipeline import Pipeline
from millrace.pipelines.records import Failure, Record
from millrace.pipelines.worker.topics import logger

PREFIX: Final = "__connect.errors."
MAX_BYTES: Final = 64 << 20
_SECONDS: Final = 60.0


def headers_of(failure: Failure, *, pipeline: str, task: str) -> dict[str, bytes]:
    """Kafka Connect's, by name (DeadLetterQueueReporter); the stack trace is what led to it in words, ours has no Java."""
    record = failure.record
    return {
        f"{PREFIX}topic": record.topic.encode(),
        f"{PREFIX}partition": str(record.partition).encode(),
        f"{PREFIX}offset": str(record.offset).encode(),
        f"{PREFIX}connector.name": pipeline.encode(),
        f"{PREFIX}task.id": task.encode(),
        f"{PREFIX}stage": failure.stage.encode(),
        f"{PREFIX}class.name": failure.step.encode(),
        f"{PREFIX}exception.class.name": failure.kind.encode(),
        f"{PREFIX}exception.message": failure.reason.encode(),
        f"{PREFIX}exception.stacktrace": f"{failure.stage} {failure.step}: {failure.kind}: {failure.reason}".encode(),
    }


def origin_of(record: Record) -> Record | None:
    """The record that failed, of one of the error topic: as it came, at its first place. None where the headers say no place."""
    told = {name: value for name, value in record.headers if name.startswith(PREFIX)}
    try:
        topic = (told[f"{PREFIX}topic"] or b"").decode()
        partition, offset = (int(told[f"{PREFIX}{name}"] or b"") for name in ("partition", "offset"))
    except (KeyError, ValueError):
        return None
    kept = [(name, value) for name, value in record.headers if not name.startswith(PREFIX)]
    return Record(topic, partition, offset, record.key, record.value, record.timestamp, kept)


class ErrorTopic:
    """A task's way into it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline.id
        self._topic = pipeline.errors_topic
        self._producer = Producer(
            {
                **pipeline.errors_cluster.client_settings(),
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 5,
                "message.max.bytes": MAX_BYTES,
                "delivery.timeout.ms": int(_SECONDS * 1000),
            },
            logger=logger,
        )

    def put(self, failures: Sequence[Failure], *, task: str) -> None:
        """Produce them, acknowledged. Raises SinkBusy, SinkRefused: nothing may move then."""
        trouble: list[KafkaError] = []

        def told(error: KafkaError | None, _: Any) -> None:
            if error is not None:
                trouble.append(error)

        for failure in failures:
            record = failure.record
            headers: list[tuple[str, str | bytes | None]] = list(record.headers)
            known = {name for name, _ in record.headers}
            made = headers_of(failure, pipeline=self._pipeline, task=task)
            headers += [(name, value) for name, value in made.items() if name not in known]
            try:
                while True:
                    try:
                        self._producer.produce(
                            self._topic,
                            record.value,
                            record.key,
                            headers=headers,
                            timestamp=max(record.timestamp, 0),
                            on_delivery=told,
                        )
                        break
                    except BufferError:
                        self._producer.poll(0.1)
            except KafkaException as error:
                trouble.append(error.args[0])
            self._producer.poll(0)
        left = self._producer.flush(_SECONDS + 5)
        if trouble or left:
            said = trouble[0].str() if trouble else f"{left} records got no answer"
            if trouble and trouble[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                raise SinkRefused(f"there is no error topic {self._topic}: make it, or say errors.create")
            raise SinkBusy(f"error topic {self._topic}: {said}", retry_after=1.0)

    def close(self) -> None:
        """Idempotent."""
        self._producer.purge()
        self._producer.flush(1.0)


def ensure_topic(pipeline: Pipeline, *, partitions: int = 1, wait: float = 30.0) -> None:
    """Make the error topic where it is not there and may be made. Raises SinkBusy, SinkRefused."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient(dict(pipeline.errors_cluster.client_settings()), logger=logger)
    topic = pipeline.errors_topic
    try:
        known = admin.list_topics(topic, timeout=wait).topics.get(topic)
        if known is not None and known.error is None:
            return
        if not pipeline.errors.create:
            raise SinkRefused(f"there is no error topic {topic}: make it, or say errors.create")
        admin.create_topics([NewTopic(topic, partitions, -1)], request_timeout=wait)[topic].result(timeout=wait)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return
        raise SinkBusy(f"error topic {topic}: {error.args[0].str()}", retry_after=1.0) from None
