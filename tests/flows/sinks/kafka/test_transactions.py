"""Documents of a lane in a topic, in transactions, on a real broker: a reader of committed messages sees each once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millrace.base.errors import BatchRefused, SinkBusy
from millrace.base.failpoint import VARIABLE
from millrace.base.package import ROOT
from millrace.flows.batch import Batch
from millrace.flows.guarantee import Guarantee
from millrace.flows.records import Action, Record
from millrace.flows.sinks.kafka.model import KafkaSink as Declared
from millrace.flows.sinks.kafka.sink import KafkaSink
from millrace.flows.sinks.kafka.transactions import Transactions
from tests import running_brokers

LARGEST = 4_000


@pytest.fixture
def topic() -> str:
    name = f"x-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": running_brokers.kafka().address})
    made = NewTopic(name, 3, 1, config={"max.message.bytes": str(LARGEST)})
    admin.create_topics([made])[name].result(30)
    return name


def sink(topic: str, address: str = "") -> KafkaSink:
    declared = Declared(
        bootstrap=(address or running_brokers.kafka().address,), topic=topic, transactional=True, compression="none"
    )
    return KafkaSink(declared, flow=topic, guarantee="exactly once")


def lane(start: int, end: int, name: str = "in-0", *, generation: int = 0, large: Sequence[int] = ()) -> Batch:
    documents = [
        Action(Record("in", 0, n, b"", b"", 0), f"k{n % 7}", b"x" * 9_000 if n in large else str(n).encode(), n)
        for n in range(start, end)
    ]
    return Batch(name, start, end, documents=documents, generation=generation)


def found(topic: str, isolation: str = "read_committed") -> Counter[int]:
    consumer = Consumer(
        {
            "bootstrap.servers": running_brokers.kafka().address,
            "group.id": "look",
            "enable.partition.eof": True,
            "isolation.level": isolation,
        }
    )
    seen: Counter[int] = Counter()
    try:
        for partition in range(3):
            consumer.assign([TopicPartition(topic, partition, 0)])
            while (message := consumer.poll(30)) is not None and message.error() is None:
                seen[int(message.value() or b"")] += 1
            assert message is not None, "the partition's end"
    finally:
        consumer.close()
    return seen


def test_a_range_that_is_repeated_in_other_cuts_is_there_once(topic: str) -> None:
    for first, middle, last in ((0, 10, 30), (0, 25, 40), (10, 40, 41)):
        to = sink(topic)
        assert to.write(lane(first, middle)).acknowledged == middle - first
        assert to.write(lane(middle, last)).acknowledged == last - middle
        assert to.standing(["in-0", "other-0"]) == {"in-0": last}
        to.close()
    assert found(topic) == Counter(range(41))


def test_a_former_owner_is_fenced_and_other_lanes_go_on(topic: str) -> None:
    former, owner = sink(topic), sink(topic)
    former.write(lane(0, 10))
    former.write(lane(100, 110, "in-1"))
    owner.write(lane(10, 20))
    with pytest.raises(SinkBusy, match="taken it over"):
        former.write(lane(10, 15))
    former.write(lane(110, 120, "in-1"))
    assert former.write(lane(10, 25)).repeated == 10, "it may own the lane again"
    for each in (former, owner):
        each.close()
    assert found(topic) == Counter([*range(25), *range(100, 120)])


class LostErrors:
    """A client whose calls lose the exception that they raise, as confluent_kafka's do now and then."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def flush(self, seconds: float) -> int:
        with suppress(KafkaException, SystemError):
            self._producer.flush(seconds)
        raise SystemError("returned NULL without setting an exception")


def test_a_former_owner_is_fenced_where_the_client_loses_its_error(topic: str) -> None:
    former, owner = sink(topic), sink(topic)
    former.write(lane(0, 10))
    owner.write(lane(10, 20))
    former._lanes["in-0"].producer = LostErrors(former._lanes["in-0"].producer)  # type: ignore[assignment]
    with pytest.raises(SinkBusy, match="taken it over"):
        former.write(lane(10, 15))
    for each in (former, owner):
        each.close()


def test_messages_that_are_too_large_fail_again_when_their_range_is_repeated(topic: str) -> None:
    for _ in range(2):
        to = sink(topic)
        done = to.write(lane(0, 30, large=(3, 17)))
        assert (done.acknowledged, sorted(each.record.offset for each in done.failures)) == (28, [3, 17])
        assert {each.kind for each in done.failures} == {"MSG_SIZE_TOO_LARGE"}
        to.close()
    assert found(topic) == Counter(set(range(30)) - {3, 17})


def test_a_position_that_was_set_by_hand_makes_an_older_one_worth_nothing(topic: str) -> None:
    to = sink(topic)
    to.write(lane(0, 10))
    assert to.write(lane(0, 10, generation=1)).repeated == 0
    with pytest.raises(SinkBusy, match="by hand"):
        to.write(lane(10, 20))
    assert to.write(lane(0, 20, generation=1)).repeated == 10
    to.close()
    assert found(topic) == Counter({n: 2 if n < 10 else 1 for n in range(20)})


def test_a_commit_that_fails_is_taken_back_and_the_batch_comes_again(topic: str) -> None:
    to = sink(topic)
    silent = patch.object(Transactions, "commit", side_effect=SinkBusy("no answer", retry_after=1.0))
    with silent, pytest.raises(SinkBusy):
        to.write(lane(0, 10))
    assert to.write(lane(0, 20)).acknowledged == 20
    to.close()
    assert found(topic) == Counter(range(20))
    assert found(topic, "read_uncommitted")[5] == 2


WRITES = """
import sys
from tests.flows.sinks.kafka.test_transactions import lane, sink
to = sink(*sys.argv[1:])
for start in range(0, 40, 10):
    to.write(lane(start, start + 10))
to.close()
"""


@pytest.mark.parametrize("point", ["sink.produced", pytest.param("sink.sent", marks=pytest.mark.slow)])
def test_a_process_that_dies_in_a_transaction_loses_and_doubles_nothing(topic: str, point: str) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    for failpoint, code in ((f"{point}@2", -9), (f"{point}@1", -9), ("", 0)):
        env = os.environ | {VARIABLE: failpoint, "PYTHONPATH": paths}
        assert (
            subprocess.run(
                [sys.executable, "-c", WRITES, topic, running_brokers.kafka().address], env=env, timeout=60, check=False
            ).returncode
            == code
        )
    assert found(topic) == Counter(range(40))


@pytest.mark.parametrize("transactional", [True, False])
def test_a_row_that_the_topic_refuses_is_known_by_its_number_key_and_value(
    topic: str, tmp_path: Path, transactional: bool
) -> None:
    guarantee: Guarantee = "exactly once" if transactional else "at least once"
    to = KafkaSink.of_rows(tmp_path, topic, running_brokers.kafka().address, key="k", guarantee=guarantee)
    rows = [{"k": f"k{n}", "x": "x" * 9_000 if n in (3, 8) else str(n)} for n in range(10)]

    def batch(*numbers: int) -> Batch:
        table = pa.Table.from_pylist([rows[n] for n in numbers]).to_batches()
        return replace(Batch.of_rows("query", 7, table), numbers=numbers)

    if transactional:
        done = to.write(batch(*range(10)))
        assert done.acknowledged == 8
    else:
        with pytest.raises(
            BatchRefused, match=r"refused \d+ documents, the first of them query-7-\d: MSG_SIZE_TOO_LARGE"
        ):
            to.write(batch(*range(10)))
        assert to.write(batch(*set(range(10)) - {3, 8})).acknowledged == 8
        done = to.write(batch(3))
        done.failures += to.write(batch(8)).failures
        assert done.acknowledged == 0
    to.close()
    assert [each.record for each in sorted(done.failures, key=lambda each: each.record.offset)] == [
        Record("query", 7, n, f"k{n}".encode(), json.dumps(rows[n]).encode(), -1) for n in (3, 8)
    ]
