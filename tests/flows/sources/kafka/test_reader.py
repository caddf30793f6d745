"""A partition is read whole, whatever gaps transactions and compaction have left in it."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.flows.sources.kafka import topics
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.kafka.topics import Reader

SOURCE = KafkaSource(bootstrap=("h:1",), topics=("in",))


class Message:
    def __init__(self, offset: int, error: KafkaError | None = None) -> None:
        self._offset, self._error = offset, error

    def topic(self) -> str:
        return "in"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def error(self) -> KafkaError | None:
        return self._error

    def key(self) -> bytes:
        return b"k"

    value = key

    def timestamp(self) -> tuple[int, int]:
        return 1, 0

    def headers(self) -> None:
        return None


class Partition:
    """As librdkafka's consumer of one partition, whose records lie at `offsets`: it goes on from what it gave last."""

    def __init__(self, offsets: list[int], high: int) -> None:
        self._offsets, self._high = offsets, high
        self._place = 0

    def assign(self, places: list[Any]) -> None:
        (place,) = places
        self._place = place.offset

    def consume(self, number: int, timeout: float) -> list[Message]:
        found = [Message(each) for each in self._offsets if each >= self._place][:number]
        if found:
            self._place = found[-1].offset() + 1
        if len(found) < number:
            self._place = self._high
            found.append(Message(self._high, KafkaError(KafkaError._PARTITION_EOF)))
        return found

    def close(self) -> None:
        pass


@settings(max_examples=200, deadline=None)
@given(data=st.data(), offsets=st.sets(st.integers(0, 40), max_size=25), items=st.integers(1, 7))
def test_ranges_one_after_another_give_each_record_once(data: st.DataObject, offsets: set[int], items: int) -> None:
    high = max(offsets, default=0) + 1 + data.draw(st.integers(0, 3))  # a transaction's end lies behind its records
    held = sorted(offsets)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(topics, "consumer_of", lambda *_, **__: Partition(held, high))
        reader = Reader(SOURCE, "g", "in", 0)
    found: list[int] = []
    place = 0
    while place < high:
        end = data.draw(
            st.integers(place + 1, high), label="end"
        )  # what was known of the partition when it was planned
        records, behind = reader.read(place, end, items=items, size=1 << 20, seconds=60)
        assert behind > place
        assert all(place <= each.offset < behind for each in records)
        found += [each.offset for each in records]
        place = behind
    assert found == held
