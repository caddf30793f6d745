"""What a batch of rows costs the Kafka sink while its messages are in flight, counted on a broker in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.flows.batch import Batch
from millrace.flows.records import Action, Record
from millrace.flows.sinks.kafka.sink import KafkaSink
from tests.flows.brokers_in_process import brokers

ROWS = 500


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[KafkaSink]:
    # Nothing is sent before the flush at the end of a batch.
    options: dict[str, Any] = {"linger.ms": 30_000}
    with brokers() as found:
        made = KafkaSink.of_rows(tmp_path, "rows", found.address, options=options)
        made.open()
        yield made
        made.close()


def test_rows_are_sent_while_later_ones_are_made_and_nothing_holds_what_is_sent(sink: KafkaSink) -> None:
    """A batch that is made as a whole first leaves the client idle, and 25 % more CPU goes to the garbage collector."""
    seen: list[tuple[int, int]] = []

    def parts() -> Iterator[pa.RecordBatch]:
        for first in range(0, 3 * ROWS, ROWS):
            held = sum(type(each) in (Action, Record) for each in gc.get_objects())  # isinstance would ask proxies
            seen.append((len(sink._producer), held))
            yield pa.record_batch({"id": pa.array(range(first, first + ROWS))})

    gc.collect()
    assert sink.write(Batch.of_rows("query", 0, parts())).acknowledged == 3 * ROWS
    assert [sent for sent, _ in seen] == [0, ROWS, 2 * ROWS]
    assert all(held - seen[0][1] <= 2 for _, held in seen), "the row in hand alone"
