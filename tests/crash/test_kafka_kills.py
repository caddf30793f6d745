"""SIGKILL of a Kafka broker under load.

What it acknowledged is there once and in order; a tail that it lost is LogRegressed.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.log.registry import open_service
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestReport, run_ingest
from millrace.node.range_loop.schedule import START
from millrace.tables.wal.table import WalTable
from tests.conformance.reading import read_all
from tests.crash.kafka_rig import Appender, Follower, wait_for
from tests.node.log_samples import accepted, opening, tick
from tests.node.schedules import log_schedule

DEADLINE = 120.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path / "kafka", settings=Settings()).start() as broker:
        yield broker


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_broker_that_is_killed_while_it_is_appended_to_and_read_loses_and_doubles_nothing(
    broker: KafkaBroker, seed: int
) -> None:
    dice = random.Random(seed)
    with open_service(broker.url + "?deadline=60") as service:
        service.create("p")
        appenders = [Appender(service, "p", number) for number in range(3)]
        followers = [Follower(service, "p", max_bytes=size) for size in (2_000, 1 << 20)]
        for thread in (*appenders, *followers):
            thread.start()
        for _ in range(3):
            wait_for(appenders, 50, deadline=DEADLINE)
            threading.Event().wait(dice.random() / 2)  # the moment is what the seed chooses
            broker.kill()
            broker.start()
        wait_for(appenders, 50, deadline=DEADLINE)
        for appender in appenders:
            appender.stop(deadline=DEADLINE)
        log = service.open("p")
        end = log.describe().end
        entries = read_all(log)
        assert [follower.finish(end, deadline=DEADLINE) for follower in followers] == [entries] * 2
    stored = dict(entries)
    assert len(stored) == len(entries)
    for appender in appenders:
        assert {entry_id: stored[entry_id] for entry_id, _ in appender.acknowledged} == dict(appender.acknowledged)
        assert appender.acknowledged == sorted(appender.acknowledged)
    # Nothing twice; and of an append that failed a prefix, in order.
    values = [value for _, value in entries]
    assert len(set(values)) == len(values)
    told = {value for appender in appenders for _, value in appender.acknowledged}
    for batch in (batch for appender in appenders for batch in appender.ambiguous):
        kept = [value for value in batch if value in set(values)]
        assert kept == batch[: len(kept)]
        told |= set(kept)
    assert told == set(values)


class Node:
    """A table and a planner over the log of a broker; `work` does what Spark would."""

    def __init__(self, broker: KafkaBroker, folder: Path) -> None:
        self.service = open_service(broker.url)
        self.path = Path(WalTable.create(folder / "wal").uri)
        self.planner = log_schedule(self.service, WalTable.open(self.path), parked=folder / "parked")

    def work(self) -> list[IngestReport]:
        """Run the next micro-batch; its reports."""
        plans = self.planner.plan(self.planner.next_offset(START))
        return [run_ingest(plan, log=self.service.open(plan.base.pchannel), table=self.path) for plan in plans]

    def commit(self, reports: list[IngestReport]) -> None:
        WalCommitter(WalTable.open(self.path)).commit(reports)

    def close(self) -> None:
        self.planner.close()
        self.service.close()


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, True], ids=["it ends early", "it goes on with other entries"])
def test_a_broker_that_lost_a_tail_which_the_wal_has_is_an_error_and_never_silence(
    broker: KafkaBroker, tmp_path: Path, goes_on: bool
) -> None:
    node = Node(broker, tmp_path)
    node.service.create("p0")
    node.service.open("p0").append([opening(), accepted()])
    # What the disk holds of it now is all that it will have of it after the power is back.
    broker.stop()
    shutil.copytree(broker.data / "logs", tmp_path / "kept")
    broker.start()
    node.service.open("p0").append([accepted(), accepted()])
    reports = node.work()  # once: what is planned again before it was committed waits for a while
    assert [report.failure for report in reports] == [None]
    node.commit(reports)
    node.close()
    broker.kill()
    shutil.rmtree(broker.data / "logs")
    shutil.copytree(tmp_path / "kept", broker.data / "logs")
    broker.start()
    node = Node(broker, tmp_path)
    if goes_on:
        node.service.open("p0").append([accepted(), tick(), accepted()])
    failures = [report.failure for report in node.work()]
    node.close()
    assert [(failure.code, failure.retriable) for failure in failures if failure is not None] == [
        ("LOG_REGRESSED", False)
    ]
