"""A lane's transactions into a topic: each commits the messages of a batch together with the lane's position.

The position is an offset that the transaction commits for a consumer group of the lane (sendOffsetsToTransaction), on
partition 0 of the output topic, as in Kafka's own consume-and-produce loops. So a reader of committed messages
(``isolation.level=read_committed``) sees a batch and its position, or neither, and the next owner of the lane reads its
position. Transactional id and group have the lane's name. A producer begins by taking over the id, which aborts the
transaction that a former owner left open, and fences the former owner.

The brokers forget the offsets of a group that commits nothing for ``offsets.retention.minutes`` (7 days). Then only the
runner's own position remains, which is as recent unless the worker was killed between the two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from millrace.base.errors import SinkBusy, SinkRefused

MAX_FAILURES: Final = 100
"""The most documents of one batch that may be too large. Their positions are stored with the lane's, in 4 KiB."""
SECONDS: Final = 30.0
"""Longest wait for a transaction's coordinator."""
_FENCED: Final = frozenset(
    {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED, KafkaError.FENCED_INSTANCE_ID}
)
_MOVING: Final = frozenset(
    {KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS}
)
"""Errors while a group's coordinator is being found."""
_REFUSED: Final = frozenset(
    {
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.UNSUPPORTED_VERSION,
        KafkaError._UNSUPPORTED_FEATURE,
    }
)


class Transactions:
    """The transactions of a lane that this process owns until another process begins."""

    def __init__(
        self,
        producer: Mapping[str, Any],
        client: Mapping[str, Any],
        topic: str,
        *,
        name: str,
        generation: int = 0,
        logger: Any = None,
    ) -> None:
        """Take over the lane `name`. `producer` and `client` are settings of a producer and of any client.

        Raises SinkBusy, SinkRefused.
        """
        self.generation = generation
        self.position = 0
        """The position after the last committed batch."""
        self.failures: dict[int, str] = {}
        """By position, the code of that batch's documents that the topic refused."""
        self._name, self._place = name, TopicPartition(topic, 0)
        self.producer = Producer({**producer, "transactional.id": name}, logger=logger)
        self._group = Consumer({**client, "group.id": name, "enable.auto.commit": False}, logger=logger)
        try:
            self.producer.init_transactions(SECONDS)
            found = self._committed()
        except KafkaException as error:
            self.close()
            raise self.whole(error.args[0]) from None
        if found.offset >= 0:
            stored = json.loads(found.metadata or "{}")
            if stored.get("generation", 0) > generation:
                self.close()
                raise SinkBusy(f"lane {name}: its position was set by hand in the meantime", retry_after=1.0)
            if stored.get("generation", 0) == generation:
                self.position = found.offset
                self.failures = {int(place): code for place, code in stored.get("failures", {}).items()}

    def _committed(self) -> TopicPartition:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                (found,) = self._group.committed([self._place], timeout=SECONDS)
                if found.error is not None:
                    raise KafkaException(found.error)
            except KafkaException as error:
                if error.args[0].code() not in _MOVING or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return found

    def begin(self) -> None:
        """Begin a transaction."""
        self.producer.begin_transaction()

    def commit(self, position: int, failures: Mapping[int, str]) -> None:
        """Commit the produced messages, and `position` with the positions of refused documents."""
        stored = json.dumps({"generation": self.generation, "failures": failures}, separators=(",", ":"))
        offset = TopicPartition(self._place.topic, 0, position, stored)
        self.producer.send_offsets_to_transaction([offset], self._group.consumer_group_metadata(), SECONDS)
        self.producer.commit_transaction(SECONDS)
        self.position, self.failures = position, dict(failures)

    def abandon(self) -> KafkaError | None:
        """Abort the transaction and close. Return the error that ended the client for good, if there was one."""
        fatal = None
        try:
            self.producer.purge()
            self.producer.abort_transaction(SECONDS)
        except KafkaException as error:
            fatal = error.args[0] if error.args[0].fatal() else None
        except (RuntimeError, SystemError):
            pass
        self.close()
        return fatal

    def whole(self, error: KafkaError) -> SinkBusy | SinkRefused:
        """Return `error` as an error of the whole sink."""
        if error.code() in _REFUSED:
            return SinkRefused(f"transactions of {self._name}: {error.str()}")
        words = "another worker has taken it over" if error.code() in _FENCED else error.str()
        return SinkBusy(f"transactions of {self._name}: {words}", retry_after=1.0)

    def close(self) -> None:
        """Close, leaving an open transaction to the next owner. Idempotent."""
        self.producer.purge()
        with suppress(KafkaException, RuntimeError, SystemError):
            self.producer.flush(1.0)
        with suppress(KafkaException, RuntimeError):
            self._group.close()
