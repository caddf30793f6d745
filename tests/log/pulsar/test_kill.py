"""SIGKILL of the broker in the middle of appends and reads.

What was acknowledged is there once, in order, where it was said.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.errors import LogFenced, LogUnavailable
from millrace.base.settings import Settings
from millrace.brokers.pulsar import PulsarBroker
from millrace.log.protocol import Log
from millrace.log.pulsar.service import PulsarService
from millrace.log.pulsar.settings import PulsarSettings
from millrace.log.pulsar.writer import LostId, PulsarWriter
from millrace.message.ids import EARLIEST, LogId
from tests.conformance.reading import read_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DEADLINE = 120.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[PulsarBroker]:
    with PulsarBroker(tmp_path / "pulsar", settings=Settings()) as broker:
        yield broker


def opened(broker: PulsarBroker, **options: object) -> PulsarService:
    return PulsarService(PulsarSettings.of(f"{broker.address}/millrace/log", {"admin": broker.admin_url} | options))


class Appender(threading.Thread):
    """Appends numbered batches until it is told to stop; knows which were acknowledged, and with which ids."""

    def __init__(self, log: Log, name: int) -> None:
        super().__init__(daemon=True)
        self.log, self.label = log, name
        self.stopping = threading.Event()
        self.acknowledged: list[tuple[LogId, bytes]] = []
        self.attempted: list[list[bytes]] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            batch = [b"%d.%d.%d" % (self.label, len(self.attempted), index) for index in range(50)]
            self.attempted.append(batch)
            try:
                self.acknowledged += zip(self.log.append(batch), batch, strict=True)
            except LogUnavailable:
                continue  # in the log up to any of its values: never sent again under this number


class Follower(threading.Thread):
    """Follows the log over everything that happens to the broker."""

    def __init__(self, log: Log) -> None:
        super().__init__(daemon=True)
        self.log = log
        self.stopping = threading.Event()
        self.seen: list[tuple[LogId, bytes]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        position = EARLIEST
        while not self.stopping.is_set():
            try:
                run = self.log.read(position, timeout=0.5, max_bytes=10_000)
            except LogUnavailable:
                continue
            except BaseException as error:
                self.error = error
                return
            for row in run.batch.to_pylist():
                self.seen.append((LogId(row["ledger"], row["entry"]), row["value"]))
            position = run.next


@pytest.mark.parametrize("seed", [1, 2])
def test_acknowledged_appends_survive_a_broker_that_is_killed_again_and_again(broker: PulsarBroker, seed: int) -> None:
    dice = random.Random(seed)
    with opened(broker) as service:
        service.create("p")
        log = service.open("p")
        threads = [*(Appender(log, name) for name in range(2)), Follower(log)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            time.sleep(dice.uniform(0.5, 2.0))  # the moment of the kill, not a wait
            broker.kill()
            broker.start()
        appenders, follower = threads[:2], threads[2]
        before = [len(appender.acknowledged) for appender in appenders]
        end = time.monotonic() + DEADLINE
        while any(len(each.acknowledged) <= count for each, count in zip(appenders, before, strict=True)):
            assert time.monotonic() < end, "no append was acknowledged after the restart"
            threading.Event().wait(0.05)
        for thread in threads[:2]:
            thread.stopping.set()
            thread.join(DEADLINE)
        entries = read_all(log)
        while len(follower.seen) < len(entries) and follower.is_alive():
            assert time.monotonic() < end
            threading.Event().wait(0.05)
        follower.stopping.set()
        follower.join(DEADLINE)
    assert follower.error is None
    assert follower.seen == entries
    where = dict(entries)
    assert len(set(where.values())) == len(entries), "something is there twice"
    for appender in appenders:
        assert len(appender.acknowledged) > 0
        assert [where.get(entry_id) for entry_id, _ in appender.acknowledged] == [v for _, v in appender.acknowledged]
        mine = [value for _, value in entries if value.startswith(b"%d." % appender.label)]
        present = set(mine)
        kept = [[value for value in batch if value in present] for batch in appender.attempted]
        assert mine == [value for batch in kept for value in batch], "the order of an appender's batches"
        assert all(part == batch[: len(part)] for part, batch in zip(kept, appender.attempted, strict=True)), "a hole"


def test_a_writer_that_was_fenced_while_the_broker_was_away_stays_fenced(broker: PulsarBroker) -> None:
    with opened(broker, send_timeout=5.0) as old, opened(broker) as new:
        old.create("p")
        first, second = old.open("p"), new.open("p")
        ids = first.append([b"a"])
        ids += second.append([b"b"])
        broker.kill()
        broker.start()
        end = time.monotonic() + DEADLINE
        while True:
            try:
                ids += second.append([b"c"])
                break
            except LogUnavailable:
                assert time.monotonic() < end
        for _ in range(2):
            with pytest.raises((LogFenced, LogUnavailable)):
                first.append([b"never"])
        with pytest.raises(LogFenced):
            first.append([b"never"])
        ids += second.append([b"d"])
        assert read_all(second) == list(zip(ids, [b"a", b"b", b"c", b"d"], strict=True))


def test_appends_while_the_broker_is_away_fail_by_the_deadline_and_work_again_afterwards(broker: PulsarBroker) -> None:
    with opened(broker, send_timeout=2.0, operation_timeout=3) as service:
        service.create("p")
        log = service.open("p")
        ids = log.append([b"a"])
        broker.kill()
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(LogUnavailable):
                log.append([b"lost"])
        assert time.monotonic() - begun < 30
        broker.start()
        end = time.monotonic() + DEADLINE
        while True:
            try:
                ids += log.append([b"b"])
                break
            except LogUnavailable:
                assert time.monotonic() < end
        entries = [entry for entry in read_all(log) if entry[1] != b"lost"]
        assert entries == list(zip(ids, [b"a", b"b"], strict=True))


def test_a_message_that_the_broker_acknowledged_without_its_id_is_found(broker: PulsarBroker) -> None:
    with opened(broker) as service:
        service.create("p")
        log = service.open("p")
        ids = log.append([b"%d" % number for number in range(10)])
        core = service._channels["p"]
        assert isinstance(core._writer, PulsarWriter)
        for number in range(1, 10):
            for behind in range(number):
                place = LostId(ids[behind].following(), number - behind - 1)
                assert core._looked_up(place, b"%d" % number) == ids[number]
        with pytest.raises(LogUnavailable):
            core._looked_up(LostId(ids[3].following(), 0), b"other bytes")
