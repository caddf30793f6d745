"""A topic of flights, a pipeline over it, and what somebody else finds in the index and in the error topic."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from opensearchpy import OpenSearch

from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.opensearch import OpenSearchServer
from millrace.pipelines.declaration import pipeline_of
from tests import running_brokers


class Flights:
    """One pipeline with topics and an index of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        kafka: KafkaBroker | None = None,
        opensearch: OpenSearchServer | None = None,
        partitions: int = 2,
        **more: Any,
    ) -> None:
        self.kafka = kafka or running_brokers.kafka()
        self.opensearch = opensearch or running_brokers.opensearch()
        self.settings = Settings(data_dir=folder / "data")
        self.id = f"f-{uuid.uuid4().hex[:8]}"
        self.admin = AdminClient({"bootstrap.servers": self.kafka.address})
        self.partitions = partitions
        self.admin.create_topics([NewTopic(self.id, partitions, 1)])[self.id].result(30)
        sink = {
            "kind": "opensearch", "hosts": [self.opensearch.url], "index_base": self.id, "create_index": True,
            "ids": "key",
            "backoff_ms": 50, "max_backoff_ms": 500, **more.pop("sink", {}),
        }  # fmt: skip
        source = {"kind": "kafka", "bootstrap": [self.kafka.address], "topics": [self.id], **more.pop("source", {})}
        self.declared = {
            "id": self.id,
            "source": source,
            "steps": [{"kind": "cast", "fields": {"flight": "int"}, "name": "number"}],
            "sink": sink,
            "resources": {"tasks": partitions},
            **more,
        }
        self.pipeline = pipeline_of(self.declared)
        self.producer = Producer(
            {"bootstrap.servers": self.kafka.address, "acks": "all", "enable.idempotence": True}, logger=_quiet()
        )
        self.sent: dict[str, tuple[int, int]] = {}
        """Key -> partition and offset of its newest record."""

    def send(self, records: Iterable[tuple[str, Any]]) -> None:
        """Keys with documents (or bytes, or None), acknowledged."""

        def told(error: Any, message: Any) -> None:
            assert error is None, error
            self.sent[message.key().decode()] = (message.partition(), message.offset())

        for key, value in records:
            given = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
            self.producer.produce(self.id, given, key, on_delivery=told)
            self.producer.poll(0)
        assert self.producer.flush(180) == 0  # a broker that was killed comes back late on a busy machine

    def index(self) -> dict[str, dict[str, Any]]:
        """Documents by id, each with its version."""
        client = OpenSearch(self.opensearch.url, timeout=60)
        client.indices.refresh(index=self.id)
        found: dict[str, dict[str, Any]] = {}
        after: Any = None
        while True:
            query: dict[str, Any] = {
                "size": 5000,
                "version": True,
                "sort": [{"_id": "asc"}],
                "query": {"match_all": {}},
            }
            if after is not None:
                query["search_after"] = after
            hits = client.search(index=self.id, body=query)["hits"]["hits"]
            if not hits:
                return found
            for hit in hits:
                found[hit["_id"]] = {**hit["_source"], "_version": hit["_version"]}
            after = hits[-1]["sort"]

    def errors(self) -> list[Any]:
        """Messages of the error topic."""
        topic = self.pipeline.errors_topic
        consumer = Consumer(
            {"bootstrap.servers": self.kafka.address, "group.id": "look", "enable.partition.eof": True}, logger=_quiet()
        )
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = []
        try:
            while (message := consumer.poll(20.0)) is not None and message.error() is None:
                found.append(message)
        finally:
            consumer.close()
        return found


def _quiet() -> Any:
    import logging

    logger = logging.getLogger("tests.kafka")
    logger.setLevel(logging.CRITICAL)
    return logger
