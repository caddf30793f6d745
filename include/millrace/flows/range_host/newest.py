"""The newest records of a flow's topics, to try its steps on them. Reading them changes no position."""

from __future__ import annotations

from typing import Final

from millrace.base.errors import InvalidArgument
from millrace.flows.declare.flow import Flow
from millrace.flows.records import Record
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.kafka.topics import Reader, Topics
from millrace.flows.sources.source import task_of

_BYTES: Final = 4 << 20
"""About the most bytes of records in one read."""
_MOST_BYTES: Final = 16 << 20
"""The most bytes of all records, except that the newest is always included."""


def newest_records(flow: Flow, count: int) -> list[Record]:
    """Return at most `count` records of all its partitions, the newest last; fewer if they are large.

    Raises LogUnavailable, ChannelNotFound, InvalidSettings (the brokers refuse), and InvalidArgument if its source is
    not a topic.
    """
    source, group = flow.source, f"{flow.consumer_group}-look"
    if not isinstance(source, KafkaSource):
        raise InvalidArgument(
            "only topics have newest records; for a collection, read some rows and pass them as documents"
        )
    topics, found = Topics(source, group), list[Record]()
    try:
        ends = topics.ends()
        for topic, partition in topics.partitions():
            low, high = ends[task_of(topic, partition)]
            low = max(low, high - count)
            if low < high:
                reader = Reader(source, group, topic, partition)
                try:
                    while low < high:
                        records, low = reader.read(low, high, items=count, size=_BYTES, seconds=1.0)
                        found = _newest(found + records, count)
                finally:
                    reader.close()
    finally:
        topics.close()
    return found


def _newest(records: list[Record], count: int) -> list[Record]:
    ordered = sorted(records, key=lambda record: (record.timestamp, record.offset))[-count:]
    left, selected = _MOST_BYTES, 0
    for record in reversed(ordered):
        left -= len(record.value or b"") + len(record.key or b"")
        if left < 0 and selected:
            break
        selected += 1
    return ordered[len(ordered) - selected :]
