"""A Kafka topic as a sink: a row is a message, its value JSON, its key a column's value as text.

``at least once``: a batch counts as taken once the broker has acknowledged each message; a repeated one is sent again.
The headers identify each message (``millrace-stream``, created with the sink's folder; ``millrace-batch``;
``millrace-row``), so that a consumer that stores the greatest (batch, row) of a stream and partition can drop repeats:
effectively once. For that, a repeated row must go to its previous partition, so one without a key is assigned by its
number in the batch, where Kafka would draw one. Both hold while the topic keeps its number of partitions. A topic that
is compacted by key needs no such consumer. Kafka's transactions are not used: they do not tell a killed sink whether
its last one was committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, LogUnavailable
from millrace.base.failpoint import hit
from millrace.streams.sinks.guarantee import Guarantee, require_guarantee
from millrace.streams.sinks.sink import Taken, name_in

OFFERED: Final[tuple[Guarantee, ...]] = ("at least once",)
SECONDS: Final = 120.0
"""For which a batch's acknowledgements are waited for."""


class KafkaSink:
    """Sends micro-batches to a topic."""

    def __init__(
        self,
        folder: Path,
        topic: str,
        bootstrap: str,
        *,
        key: str | None = None,
        guarantee: Guarantee = "at least once",
        options: Mapping[str, str] | None = None,
    ) -> None:
        """`key` is the column with a message's key; `options` go to confluent-kafka's producer (security, say)."""
        require_guarantee(guarantee, OFFERED)
        from confluent_kafka import Producer

        self._topic = topic
        self._key = key
        self._stream = name_in(folder, "kafka-stream.json")
        given = {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 5,
            **(options or {}),
        }
        self._producer = Producer(given)
        self._partitions = 0

    def check(self, schema: pa.Schema) -> None:
        """Raises InvalidArgument for rows without the key's column."""
        if self._key is not None and self._key not in schema.names:
            raise InvalidArgument(f"the rows have no column {self._key!r}, which is the messages' key")

    def write(self, batch_id: int, batches: Iterable[pa.RecordBatch]) -> Taken:
        """Send a micro-batch.

        Raises LogUnavailable if not all of it is acknowledged in time, InvalidArgument for rows without the key's
        column.
        """
        refused: list[str] = []

        def answered(error: Any, message: Any) -> None:
            if error is not None:
                refused.append(str(error))

        end = Deadline.after(SECONDS)
        rows = 0
        for batch in batches:
            self.check(batch.schema)
            for row in batch.to_pylist():
                key = None if self._key is None or row[self._key] is None else str(row[self._key])
                self._send(json.dumps(row, default=str), key, batch_id, rows, answered, end)
                rows += 1
        left = self._producer.flush(max(0.0, end.remaining()))
        if left or refused:
            raise LogUnavailable(
                f"{left + len(refused)} of {rows} messages to the topic {self._topic!r} were not acknowledged"
                f" ({refused[0] if refused else 'in time'}): the batch is sent again"
            )
        hit("sink.sent")
        return Taken(rows)

    def _send(self, value: str, key: str | None, batch_id: int, row: int, answered: Any, end: Deadline) -> None:
        options: dict[str, Any] = {} if key is not None else {"partition": row % self._partition_count()}
        headers: dict[str, str | bytes | None] = {
            "millrace-stream": self._stream,
            "millrace-batch": str(batch_id),
            "millrace-row": str(row),
        }
        while True:
            try:
                self._producer.produce(
                    self._topic, value=value, key=key, headers=headers, on_delivery=answered, **options
                )
            except BufferError:
                self._producer.poll(0.1)
                if end.remaining() <= 0:
                    raise LogUnavailable(f"the topic {self._topic!r} takes nothing: the batch is sent again") from None
            else:
                self._producer.poll(0)
                return

    def _partition_count(self) -> int:
        """Of the topic. Raises LogUnavailable where the broker does not say it."""
        if not self._partitions:
            from confluent_kafka import KafkaException

            try:
                found = self._producer.list_topics(self._topic, timeout=10.0).topics[self._topic]
            except KafkaException as error:
                raise LogUnavailable(f"the broker does not answer ({error}): the batch is sent again") from error
            if found.error is not None:
                raise LogUnavailable(
                    f"the topic {self._topic!r} cannot be written to ({found.error}): create it, or see to its rights"
                )
            self._partitions = len(found.partitions)
        return self._partitions

    def close(self) -> None:
        """Give up what was not acknowledged: its batch is not taken. Idempotent."""
        self._producer.purge()
        self._producer.flush(1.0)
