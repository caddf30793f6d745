"""Records that are large, and many.

Who reads them holds a few at a time, whatever their number, the worker as well as who looks at them.
"""

from __future__ import annotations

from pathlib import Path

from confluent_kafka import Producer

from millrace.flows.errors.listing import SHOWN_BYTES, error_page
from millrace.flows.errors.selection import EVERYTHING, PREFIX
from millrace.flows.errors.topic import ensure_topic
from millrace.flows.range_host.newest import _MOST_BYTES, newest_records
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.kafka.topics import Reader
from tests.flows.range_host.flights import Flights

LARGE, COUNT = 900_000, 250


def test_what_is_read_is_bounded_in_bytes(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1)
    ensure_topic(flights.pipeline)
    producer = Producer({"bootstrap.servers": flights.kafka.address, "compression.type": "lz4"})
    for topic in (flights.id, flights.pipeline.errors_topic):
        for number in range(2000 + COUNT):
            value = b'{"flight": 1}' if number < 2000 else b"%d" % (number % 10) * LARGE
            headers = [
                (f"{PREFIX}connector.name", flights.id.encode())
            ]  # of an error topic, others' records are not shown
            producer.produce(topic, value, b"k", partition=0, headers=headers)
            producer.poll(0)
        assert producer.flush(120) == 0
    source = flights.pipeline.source
    assert isinstance(source, KafkaSource)
    reader = Reader(source, "look", flights.id, 0)
    place, most = 0, 0
    try:
        while place < 2000 + COUNT:
            records, place = reader.read(place, 2000 + COUNT, items=10_000, size=4 << 20, seconds=3.0)
            most = max(most, sum(len(each.value or b"") for each in records))
    finally:
        reader.close()
    # They grow all at once in the midst of a call; behind it each range has as many as fit, and one.
    assert most <= (4 << 20) + 101 * LARGE, f"{most >> 20} MiB at once of {COUNT * LARGE >> 20}"
    newest = newest_records(flights.pipeline, 100)
    assert 1 < len(newest) < 100
    assert sum(len(each.value or b"") for each in newest) <= _MOST_BYTES
    assert newest[-1].offset == 2000 + COUNT - 1
    page = error_page(flights.settings, flights.pipeline, EVERYTHING, limit=200)
    assert len(page.errors) == 200
    assert {each.value_bytes for each in page.errors} == {LARGE}
    assert all(len(each.value or "") <= SHOWN_BYTES for each in page.errors)
