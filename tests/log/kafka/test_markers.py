"""Transactions of others in a PChannel's topic.

Their records are entries, whatever became of them, and their markers are none.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from millrace.base.errors import LogCorrupted, PositionTruncated
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.log.kafka.admin import BatchInfo
from millrace.log.kafka.markers import TransactionMarkers
from millrace.log.kafka.service import Kafka, KafkaLog, open_location
from millrace.log.kafka.settings import KafkaPartition
from millrace.message.ids import EARLIEST, LogId
from millrace.node.append.host import AppendHost
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import run_ingest
from millrace.node.range_loop.schedule import START
from millrace.tables.wal.table import WalTable
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState
from tests import running_brokers
from tests.conformance.backends import deployment_name
from tests.conformance.reading import read_all
from tests.node.log_samples import accepted, opening
from tests.node.schedules import log_schedule

DEADLINE = 30.0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Kafka]:
    with open_location(f"{running_brokers.kafka().address}/{deployment_name(tmp_path)}", {}) as service:
        service.create("p")
        yield service


@pytest.fixture
def log(service: Kafka) -> KafkaLog:
    return service.open("p")


class Foreign:
    """A producer of somebody's that writes to the log's topic by transactions."""

    def __init__(self, service: Kafka, name: str = "other") -> None:
        self._log = service.open("p")
        self._topic = service.settings.partition_of("p").topic
        self._producer = Producer(
            {"bootstrap.servers": service.settings.brokers, "transactional.id": f"{self._topic}-{name}"}
        )
        self._producer.init_transactions(DEADLINE)

    def write(self, values: Sequence[bytes], *, commit: bool | None) -> None:
        """One transaction; `commit` None leaves it open. Returns when what it leaves is in the topic."""
        end = self._log.end().entry
        self._producer.begin_transaction()
        for value in values:
            self._producer.produce(self._topic, value, partition=0)
        assert self._producer.flush(DEADLINE) == 0
        if commit is not None:
            (self._producer.commit_transaction if commit else self._producer.abort_transaction)(DEADLINE)
        _wait_for_end(self._log, end + len(values) + (commit is not None))


def _wait_for_end(log: KafkaLog, end: int) -> None:
    until = time.monotonic() + DEADLINE
    while log.end().entry < end:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_records_are_entries_whatever_became_of_their_transaction_and_the_markers_are_none(
    service: Kafka, log: KafkaLog
) -> None:
    foreign = Foreign(service)
    log.append([b"a"])
    foreign.write([b"b", b"c"], commit=True)
    log.append([b"d"])
    foreign.write([b"e"], commit=False)
    Foreign(service, "another").write([b"f"], commit=None)
    assert log.append([b"g"]) == [LogId(0, 8)], "an open transaction holds nobody back"
    wanted = [(0, b"a"), (1, b"b"), (2, b"c"), (4, b"d"), (5, b"e"), (7, b"f"), (8, b"g")]
    assert read_all(log) == [(LogId(0, offset), value) for offset, value in wanted]
    report = log.verify()
    assert (report.first_bad, report.entries) == (None, 7)


@pytest.mark.slow
def test_every_reader_passes_over_the_same_markers_from_every_position_to_every_end(
    service: Kafka, log: KafkaLog
) -> None:
    foreign, dice = Foreign(service), random.Random(5)
    written: list[tuple[LogId, bytes]] = []
    for number in range(8):
        values = [b"%d-%d" % (number, each) for each in range(dice.randrange(1, 4))]
        end = log.end().entry
        if dice.random() < 0.7:
            foreign.write(values, commit=dice.random() < 0.5)
        else:
            log.append(values)
        written += [(LogId(0, end + place), value) for place, value in enumerate(values)]
    foreign.write([b"last"], commit=True)
    written.append((LogId(0, log.end().entry - 2), b"last"))
    end = log.end().entry
    for start in range(end + 1):
        assert read_all(log, LogId(0, start), max_bytes=70) == [each for each in written if each[0].entry >= start]
        for stop in range(start, end + 2, 3):
            inside = [each for each in written if start <= each[0].entry < stop]
            assert read_all(log, LogId(0, start), end=LogId(0, stop)) == inside
    with open_location(f"{service.settings.brokers}/{service.settings.prefix}", {}) as another:
        assert read_all(another.open("p"), max_bytes=70) == written


def test_markers_at_the_end_are_passed_over_at_once_and_a_reader_waits_behind_them(
    service: Kafka, log: KafkaLog
) -> None:
    log.append([b"a"])
    Foreign(service).write([b"b"], commit=True)
    begun = time.monotonic()
    run = log.read(LogId(0, 2), timeout=0.5)
    assert (run.batch.num_rows, run.next) == (0, LogId(0, 3))
    assert 0.5 <= time.monotonic() - begun < service.settings.deadline / 2
    begun = time.monotonic()
    run = log.read(LogId(0, 2), end=LogId(0, 3), timeout=DEADLINE)
    assert (run.batch.num_rows, run.next) == (0, LogId(0, 3)), "nothing else can come in front of that end"
    assert time.monotonic() - begun < service.settings.deadline / 2
    log.append([b"c"])
    assert read_all(log, LogId(0, 2)) == [(LogId(0, 3), b"c")]


def test_a_log_is_truncated_in_front_of_a_marker_and_behind_it(service: Kafka, log: KafkaLog) -> None:
    foreign = Foreign(service)
    foreign.write([b"a"], commit=True)
    foreign.write([b"b"], commit=False)
    log.append([b"c"])
    log.truncate(LogId(0, 1))
    assert log.describe().begin == LogId(0, 1)
    assert read_all(log, LogId(0, 1)) == [(LogId(0, 2), b"b"), (LogId(0, 4), b"c")]
    log.truncate(LogId(0, 4))
    assert read_all(log, LogId(0, 4)) == [(LogId(0, 4), b"c")]
    with pytest.raises(PositionTruncated):
        log.read(LogId(0, 3))


@pytest.mark.slow
def test_the_hosts_judge_the_entries_and_wait_for_no_marker(service: Kafka, log: KafkaLog, tmp_path: Path) -> None:
    foreign = Foreign(service)
    log.append([opening()])
    foreign.write([accepted(), b"no entry"], commit=True)
    foreign.write([accepted()], commit=False)
    path = Path(WalTable.create(tmp_path / "wal").uri)
    planner = log_schedule(service, WalTable.open(path), parked=tmp_path / "parked")
    [plan] = planner.plan(planner.next_offset(START))
    report = run_ingest(plan, log=log, table=path)
    assert report.failure is None
    assert (report.totals.messages, report.totals.rejections, report.position) == (3, 1, LogId(0, 5))
    WalCommitter(WalTable.open(path)).commit([report])
    assert planner.next_offset(START) == START, "the marker at the end is no work"
    with AppendHost(service, ChannelState.new) as host:
        follower = host._follower("p")
        follower.reach_end(timeout=DEADLINE)
        assert follower.log_end() == follower.state.position == LogId(0, 6)
        committed = WalTable.open(path).position("p").state
        assert committed is not None
        again = Chain().process(committed, log.read(committed.position)).state
        assert again.to_bytes() == follower.state.to_bytes(), "both hosts come to the same state"
        foreign.write([accepted()], commit=True)
        assert host.append("p", accepted()).results()[0].message_id.log_id == LogId(0, 8)


@pytest.mark.slow
def test_what_is_missing_and_was_no_marker_is_an_error_and_never_skipped(tmp_path: Path) -> None:
    with KafkaBroker(
        tmp_path / "broker", settings=Settings(), properties={"log.cleaner.backoff.ms": "100"}
    ).start() as broker:
        service = open_location(f"{broker.address}/t", {})
        service.create("p")
        log, topic = service.open("p"), service.settings.topic("p")
        Foreign(service).write([b"before"], commit=True)
        _alter(broker, topic, {
            "cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.001",
            "max.compaction.lag.ms": "100",
        })  # fmt: skip
        other = Producer({"bootstrap.servers": broker.address})
        until = time.monotonic() + DEADLINE
        while (found := _offsets(log)) is not None:
            assert time.monotonic() < until, f"nothing was compacted: {found}"
            other.produce(topic, value=b"v", key=b"same", partition=0)
            other.flush(DEADLINE)
            time.sleep(0.2)
        with pytest.raises(LogCorrupted, match="compacted"):
            read_all(log)
        report = log.verify()
        assert report.first_bad is not None
        service.close()


def _offsets(log: KafkaLog) -> list[int] | None:
    """The entries of a log; None where records are missing."""
    try:
        return [position.entry for position, _ in read_all(log)]
    except LogCorrupted:
        return None


def _alter(broker: KafkaBroker, topic: str, configs: dict[str, str]) -> None:
    admin = AdminClient({"bootstrap.servers": broker.address})
    entries = [ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in configs.items()]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin.incremental_alter_configs([resource])[resource].result(DEADLINE)


# --- what is known of them --------------------------------------------------------------------------------------------


def test_a_marker_is_asked_for_once_and_one_that_is_forgotten_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.log.kafka.markers._MOST", 4)
    asked: list[int] = []

    def look(offset: int) -> list[BatchInfo]:
        asked.append(offset)
        return [BatchInfo(each, each, each % 2 == 1) for each in range(offset, min(offset + 6, 40))]

    markers = TransactionMarkers(KafkaPartition("t"), look)
    markers.require_markers(1, 2)
    markers.require_markers(3, 4)
    markers.require_markers(5, 6)
    assert asked == [1], "what came with the first is not asked for again"
    assert [markers.skip_known(offset) for offset in range(7)] == [0, 2, 2, 4, 4, 6, 6]
    for offset in range(7, 21, 2):
        markers.require_markers(offset, offset + 1)
    markers.require_markers(1, 2)
    assert asked == [1, 7, 13, 19, 1]
    assert len(markers._starts) == len(markers._stops) == 4


def test_a_run_of_markers_is_proven_piece_by_piece_and_only_as_far_as_it_goes() -> None:
    batches = [BatchInfo(0, 3, False), *(BatchInfo(each, each, True) for each in range(4, 9)), BatchInfo(9, 9, False)]
    markers = TransactionMarkers(
        KafkaPartition("t"), lambda offset: [each for each in batches if each.last >= offset][:2]
    )
    markers.require_markers(4, 9)
    assert markers.skip_known(4) == 9
    with pytest.raises(LogCorrupted, match="offset 9"):
        markers.require_markers(4, 10)
    with pytest.raises(LogCorrupted, match="offset 3"):
        markers.require_markers(3, 5)
    assert EARLIEST.entry <= markers.skip_known(0) == 0


def test_what_was_known_of_a_log_that_ends_before_it_is_forgotten() -> None:
    markers = TransactionMarkers(KafkaPartition("t"), lambda offset: [BatchInfo(4, 4, True)])
    markers.require_markers(4, 5)
    markers.forget_beyond(5)
    assert markers.skip_known(4) == 5
    markers.forget_beyond(4)
    assert markers.skip_known(4) == 4, "the log was made again: another record may stand there"
