"""The Kafka sink: an idempotent producer, so that one attempt neither loses, doubles nor reorders records.

A topic keeps every record, so a repeated range appends its records again, with the same key and the same header
``millrace.position``. The header is the source's position, by which readers recognise duplicates. A compacted topic
ends in the same documents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer

from millrace.base.errors import SinkBusy, SinkRefused
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.kafka.brokers import client_settings, looked_at
from millrace.flows.records import TASK_PUT, Action, Failure
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.models import KafkaSink as Declared
from millrace.flows.sinks.sink import Verdicts, require_some

POSITION: Final = "millrace.position"
STEP: Final = "kafka"
_DELIVERY_MS: Final = 60_000
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
    """Documents of one task into one topic."""

    def __init__(
        self, declared: Declared, *, flush_items: int, flush_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._declared = declared
        self._clock = clock
        self._producer = Producer(
            {
                **client_settings(declared),
                "acks": "all",
                "enable.idempotence": True,
                "compression.type": declared.compression,
                "linger.ms": 5,
                "batch.size": 1 << 20,
                "message.max.bytes": 64 << 20,
                "delivery.timeout.ms": _DELIVERY_MS,
                "queue.buffering.max.messages": max(flush_items, 100_000),
                "queue.buffering.max.kbytes": max(flush_bytes >> 10, 65_536),
            },
            logger=_quiet(),
        )

    def check(self, schema: pa.Schema, /) -> None:
        """As millrace.flows.sinks.sink.Sink says."""

    def open(self) -> None:
        """As millrace.flows.sinks.sink.Sink says."""
        wait = self._declared.socket_timeout_ms / 1000
        try:
            told = looked_at(self._producer.list_topics(self._declared.topic, timeout=wait))
        except KafkaException as error:
            raise SinkBusy(f"Kafka does not answer: {error.args[0]}", retry_after=1.0) from None
        topic = told.topics.get(self._declared.topic)
        if topic is None or topic.error is not None:
            raise SinkRefused(f"there is no topic {self._declared.topic}: make it")

    def standing(self, lanes: Sequence[str], /) -> Mapping[str, int]:
        """Return nothing: a topic keeps repeats, and their headers tell a reader so."""
        return {}

    def write(self, batch: Batch, /) -> Verdicts:
        """As millrace.flows.sinks.sink.Sink says."""
        actions = batch.documents or ()
        written = Verdicts(bulks=1 if actions else 0)
        trouble: list[KafkaError] = []

        def told(action: Action) -> Callable[[KafkaError | None, Any], None]:
            def delivered(error: KafkaError | None, _: Any) -> None:
                if error is None:
                    written.acknowledged += 1
                elif error.code() in _OWN_FAULT:
                    written.failures.append(_failure(action, error))
                else:
                    trouble.append(error)

            return delivered

        for action in actions:
            self._produce(action, told(action), written)
        left = self._producer.flush(_DELIVERY_MS / 1000 + 5)
        if left or trouble:
            error = trouble[0] if trouble else None
            said = error.str() if error is not None else f"{left} records got no answer"
            if error is not None and error.code() in _REFUSED:
                raise SinkRefused(f"topic {self._declared.topic}: {said}")
            raise SinkBusy(f"topic {self._declared.topic}: {said}", retry_after=1.0)
        require_some(written, written.failures, f"topic {self._declared.topic}")
        return written

    def _produce(self, action: Action, told: Callable[[KafkaError | None, Any], None], written: Verdicts) -> None:
        deadline = self._clock() + _DELIVERY_MS / 1000
        position: list[tuple[str, str | bytes | None]] = [(POSITION, action.record.position.encode())]
        while True:
            try:
                self._producer.produce(
                    self._declared.topic, action.body, action.id.encode(), headers=position, on_delivery=told
                )
            except BufferError:
                if self._clock() > deadline:
                    raise SinkBusy(f"topic {self._declared.topic}: the brokers take nothing", retry_after=1.0) from None
                self._producer.poll(0.1)
            except KafkaException as error:
                if error.args[0].code() not in _OWN_FAULT:
                    raise SinkBusy(f"topic {self._declared.topic}: {error.args[0].str()}", retry_after=1.0) from None
                written.failures.append(_failure(action, error.args[0]))
                return
            else:
                self._producer.poll(0)
                return

    def close(self) -> None:
        """Idempotent."""
        self._producer.purge()
        self._producer.flush(1.0)


def _failure(action: Action, error: KafkaError) -> Failure:
    return Failure(action.record, TASK_PUT, STEP, str(error.name()), error.str())


def _quiet() -> Any:
    import logging

    logger = logging.getLogger("millrace.pipelines.kafka")
    logger.setLevel(logging.CRITICAL)  # what fails is raised, with its reason
    return logger


def made(declared: Declared, settings: Settings, *, flow: str, flush: Flush) -> KafkaSink:
    """The sink that flow `flow` declares."""
    return KafkaSink(declared, flush_items=flush.items, flush_bytes=int(flush.mib * (1 << 20)))
