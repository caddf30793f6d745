"""What others write into a PChannel's topic: entries by their value alone, whatever keys and headers come with it."""

from __future__ import annotations

from pathlib import Path

from confluent_kafka import Producer

from millrace.log.kafka.service import open_location
from millrace.message.ids import EARLIEST
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState
from tests import running_brokers
from tests.conformance.backends import deployment_name
from tests.conformance.reading import read_all
from tests.node.log_samples import accepted, opening

DEADLINE = 30.0


def test_records_of_another_are_entries_by_their_value_alone_and_park_nothing(tmp_path: Path) -> None:
    address = running_brokers.kafka().address
    service = open_location(f"{address}/{deployment_name(tmp_path)}", {})
    service.create("p")
    log = service.open("p")
    topic = service.settings.partition_of("p").topic
    log.append([opening()])
    other = Producer({"bootstrap.servers": address})
    other.produce(topic, value=None, key=b"k", headers=[("h", b"v"), ("n", None)])
    other.produce(topic, value=b"", key=None)
    other.produce(topic, value=accepted(), key=b"k", headers=[("h", b"v")])
    assert other.flush(DEADLINE) == 0
    log.append([accepted()])
    found = [value for _, value in read_all(log)]
    assert found == [opening(), b"", b"", accepted(), accepted()]
    outcome = Chain().process(ChannelState.new("p"), log.read(EARLIEST))
    assert outcome.messages.num_rows == 3
    rejected = outcome.rejections.select(["entry", "reason"]).to_pylist()
    assert rejected == [{"entry": 1, "reason": "MALFORMED"}, {"entry": 2, "reason": "MALFORMED"}]
    service.close()
