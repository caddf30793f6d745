"""Kafka's brokers within this process, as librdkafka has them for tests: topics, records, positions of groups; no JVM.

They know no transactions' ends, no retention and no settings of topics: what needs those takes a real Kafka
(tests/running_brokers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from confluent_kafka import Consumer, Producer, TopicPartition

Headers = list[tuple[str, bytes]]


class Brokers:
    """One broker; a topic is there once it is looked at, with four partitions."""

    def __init__(self) -> None:
        self.producer = Producer(
            {"bootstrap.servers": "replaced", "test.mock.num.brokers": 1, "log_level": 0, "acks": "all"}
        )
        (broker,) = self.producer.list_topics(timeout=20).brokers.values()
        self.address = f"{broker.host}:{broker.port}"

    def send(
        self, topic: str, records: Iterable[tuple[bytes | None, bytes | None, Headers]], partition: int = 0
    ) -> None:
        """Key, value and headers of each, acknowledged."""
        wrong: list[object] = []
        for key, value, headers in records:
            self.producer.produce(
                topic,
                value,
                key,
                partition=partition,
                headers=headers,
                on_delivery=lambda error, _: wrong.append(error) if error is not None else None,
            )
        assert self.producer.flush(20) == 0
        assert not wrong

    def position(self, group: str, topic: str, partition: int = 0) -> int:
        """Where a group stands; below zero: nowhere."""
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": group})
        try:
            (found,) = consumer.committed([TopicPartition(topic, partition)], timeout=20)
            return int(found.offset)
        finally:
            consumer.close()


@contextmanager
def brokers() -> Iterator[Brokers]:
    """Those of one test; they end with it."""
    made = Brokers()
    try:
        yield made
    finally:
        made.producer.purge()
        made.producer.flush(1)
