"""What a micro-batch is planned from: the table and the logs, never Spark's memory."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import ChannelNotFound, LogUnavailable
from millrace.base.settings import Settings
from millrace.log.rocksmq.service import RocksMQ, RocksMQLog
from millrace.message.ids import LogId
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import IngestPlan, run_ingest
from millrace.node.ingest.planner import MAX_RANGES, LogPlanner
from millrace.node.range_loop.failure import RangeFailure
from millrace.node.range_loop.parking import Parked, park, parked_names, read_parked, unpark
from millrace.node.range_loop.schedule import START, BatchOffset, RangeSchedule, StallBackoff
from millrace.tables.wal.reader import FOLLOWED_SECONDS, follow, is_followed
from millrace.tables.wal.table import WalTable
from tests.node.log_samples import accepted, opening, poison, rejected, tick


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Node:
    """A log, a table and a planner over them; `work` does what Spark would."""

    def __init__(self, folder: Path) -> None:
        self.service = RocksMQ(folder / "log")
        for name in ("p0", "p1"):
            self.service.create(name)
        self.path = Path(WalTable.create(folder / "wal").uri)
        self.parked = folder / "parked"
        self.clock = Clock()
        self.logs = LogPlanner(lambda: self.service, WalTable.open(self.path), parked=self.parked, clock=self.clock)
        self.planner = self.schedule(self.logs)
        self.committer = WalCommitter(WalTable.open(self.path))

    def schedule(self, logs: LogPlanner) -> RangeSchedule[IngestPlan]:
        stalls = StallBackoff(clock=self.clock, sleep=self.clock.sleep)
        return RangeSchedule(logs, parked=self.parked, stalls=stalls)

    def another_planner(self) -> RangeSchedule[IngestPlan]:
        return self.schedule(LogPlanner(lambda: self.service, WalTable.open(self.path), parked=self.parked))

    def ends(self) -> dict[str, str]:
        return self.planner.seen()["ends"]

    def append(self, pchannel: str, *entries: bytes) -> list[LogId]:
        return self.service.open(pchannel).append(entries)

    def work(self, offset: BatchOffset) -> dict[str, int]:
        """Run and commit the micro-batch up to `offset`; rows by PChannel."""
        plans = self.planner.plan(offset)
        reports = [run_ingest(plan, log=self.service.open(plan.base.pchannel), table=self.path) for plan in plans]
        self.committer.commit(reports)
        return {report.pchannel: report.totals.digest.rows for report in reports}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path)
    yield found
    found.planner.close()
    found.service.close()


def test_an_empty_log_plans_nothing(node: Node) -> None:
    assert node.planner.next_offset(START) == START


def test_new_entries_make_an_offset_that_names_how_far_to_go(node: Node) -> None:
    ids = node.append("p0", opening(), accepted())
    offset = node.planner.next_offset(START, max_bytes=1000)
    assert offset == {"batch": 1, "max_bytes": 1000, "ends": {"p0": str(ids[-1].following())}}
    assert node.work(offset) == {"p0": 2}
    assert node.planner.next_offset(offset) == offset


def test_a_range_that_was_read_ahead_says_how_small_it_is(node: Node) -> None:
    node.append("p0", opening(), accepted())
    node.append("p1", opening(), bytes(100 << 10))
    offset = node.planner.next_offset(START, max_bytes=1 << 30)
    small, large = node.planner.plan(offset)
    assert 0 < small.bytes < 1000
    assert large.bytes == 1 << 30, "not known"
    [again] = node.another_planner().plan({**offset, "ends": {"p0": offset["ends"]["p0"]}})
    assert again.bytes == 1 << 30, "a planner that did not look"
    node.work({**offset, "ends": {"p0": offset["ends"]["p0"]}})
    node.append("p0", accepted())
    following = node.planner.next_offset({**offset, "ends": {}}, max_bytes=1 << 30)
    later = next(each for each in node.planner.plan(following) if each.channel == "p0")
    assert 0 < later.bytes < small.bytes


@pytest.fixture
def patient(node: Node) -> Iterator[tuple[Node, RangeSchedule[IngestPlan], list[bool]]]:
    """A node whose few rows wait 2 s, and whether a reader follows the table."""
    node.append("p0", opening())
    node.append("p1", opening())
    node.work(node.planner.next_offset(START))
    followed = [False]
    logs = LogPlanner(
        lambda: node.service,
        WalTable.open(node.path),
        parked=node.parked,
        linger=2.0,
        is_followed=lambda: followed[0],
        clock=node.clock,
    )
    planner = node.schedule(logs)
    yield node, planner, followed
    planner.close()


Patient = tuple[Node, RangeSchedule[IngestPlan], list[bool]]


def test_few_rows_wait_for_more_and_take_along_what_has_waited_as_well(patient: Patient) -> None:
    node, planner, _ = patient
    node.append("p0", rejected())
    assert planner.next_offset(START) == START
    node.clock.sleep(1.2)
    node.append("p1", rejected())
    assert planner.next_offset(START) == START
    node.clock.sleep(0.9)
    assert planner.next_offset(START)["ends"].keys() == {"p0"}, "p1 has not waited half as long"
    node.clock.sleep(0.2)
    assert planner.next_offset(START)["ends"].keys() == {"p0", "p1"}


@pytest.mark.parametrize("entries", [[tick()], [accepted()], [rejected(bytes(100_000))]], ids=["tick", "flush", "much"])
def test_what_somebody_waits_for_and_much_do_not_wait(patient: Patient, entries: list[bytes]) -> None:
    node, planner, _ = patient
    node.append("p0", rejected())
    assert planner.next_offset(START) == START
    node.append("p0", *entries)
    assert planner.next_offset(START)["ends"].keys() == {"p0"}


def test_rows_do_not_wait_while_the_table_is_followed(patient: Patient) -> None:
    node, planner, followed = patient
    node.append("p0", rejected())
    assert planner.next_offset(START) == START
    followed[0] = True
    assert planner.next_offset(START)["ends"].keys() == {"p0"}


def test_a_micro_batch_is_bounded_and_takes_first_what_somebody_waits_for(node: Node) -> None:
    names = [f"q{number}" for number in range(MAX_RANGES + 8)]
    for name in names:
        node.service.create(name)
        node.append(name, opening())
        node.clock.sleep(0.01)
        node.planner.next_offset(START)
    node.append("p1", opening())
    node.clock.sleep(1.1)
    first = node.planner.next_offset(START)
    assert len(first["ends"]) == MAX_RANGES
    node.work(first)
    second = node.planner.next_offset(first)
    assert len(second["ends"]) == 9
    assert {*first["ends"], *second["ends"]} == {*names, "p1"}


def test_what_waits_is_read_once(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    node, planner, _ = patient
    reads: list[LogId] = []
    read = RocksMQLog.read

    def counted(log: RocksMQLog, position: LogId, **options: Any) -> object:
        reads.append(position)
        return read(log, position, **options)

    monkeypatch.setattr(RocksMQLog, "read", counted)
    for _ in range(5):
        node.append("p0", rejected())
        for _ in range(10):
            assert planner.next_offset(START) == START
    assert len(reads) == len(set(reads)) == 5


def test_an_idle_poll_looks_at_the_ends_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.append("p0", opening())
    node.append("p1", opening())
    offset = node.planner.next_offset(START)
    node.work(offset)
    assert node.planner.next_offset(offset) == offset
    monkeypatch.setattr(LogPlanner, "_bases", None)
    for _ in range(3):
        assert node.planner.next_offset(offset) == offset
    monkeypatch.undo()
    node.append("p1", accepted())
    assert node.planner.next_offset(offset)["ends"].keys() == {"p1"}


def test_a_follower_of_the_table_is_seen_for_a_while(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    assert not is_followed(settings)
    follow(settings)
    assert is_followed(settings)
    long_ago = time.time() - FOLLOWED_SECONDS - 1
    os.utime(settings.wal_readers_path, (long_ago, long_ago))
    assert not is_followed(settings)
    follow(settings)
    assert is_followed(settings)


def test_a_reader_without_the_right_to_write_follows_in_silence(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    settings.data_dir.mkdir()
    settings.run_path.write_text("no folder")
    follow(settings)
    assert not is_followed(settings)


def test_where_the_logs_ended_is_kept_for_who_asks_after_it(node: Node) -> None:
    assert node.ends() == {}
    (first,) = node.append("p0", opening())
    node.planner.next_offset(START)
    assert node.ends()["p0"] == str(first.following())
    (last,) = node.append("p0", accepted())
    assert node.ends()["p0"] == str(first.following())
    node.planner.next_offset(START)
    assert node.ends()["p0"] == str(last.following())
    assert set(node.ends()) == {"p0", "p1"}


def test_ticks_that_become_no_rows_plan_nothing_and_are_not_read_twice(node: Node) -> None:
    node.append("p0", opening(), tick())
    offset = node.planner.next_offset(START)
    node.work(offset)
    reads: list[LogId] = []
    log = node.logs._log("p0")
    read = log.read

    def counted(position: LogId, **options: object) -> object:
        reads.append(position)
        return read(position, **options)  # type: ignore[arg-type]

    log.read = counted  # type: ignore[method-assign, assignment]
    for _ in range(5):
        node.append("p0", tick())
        assert node.planner.next_offset(offset) == offset
    assert len(reads) == len(set(reads)) == 5
    node.append("p0", accepted())
    assert node.planner.next_offset(offset)["batch"] == 2


def test_a_lost_spark_checkpoint_costs_nothing(node: Node) -> None:
    node.append("p0", opening(), accepted())
    node.work(node.planner.next_offset(START))
    assert node.planner.next_offset(START) == START
    node.append("p0", accepted())
    assert node.work(node.planner.next_offset(START)) == {"p0": 1}


def test_a_batch_that_spark_runs_again_plans_nothing_that_is_committed(node: Node) -> None:
    node.append("p0", opening(), accepted())
    offset = node.planner.next_offset(START)
    node.work(offset)
    assert node.planner.plan(offset) == []
    assert node.work(offset) == {}


def test_an_offset_beyond_the_position_is_only_a_hint(node: Node) -> None:
    """Spark believes the batch was done, but another committer fenced it: the rows are planned again."""
    node.append("p0", opening(), accepted())
    offset = node.planner.next_offset(START)
    node.clock.now += 1
    again = node.planner.next_offset(offset)
    assert again["batch"] == offset["batch"] + 1, "an offset that differs is what makes Spark run"
    assert again["ends"] == offset["ends"]
    assert node.work(again) == {"p0": 2}


def test_ranges_of_one_batch_come_from_one_version_of_the_table(node: Node) -> None:
    node.append("p0", opening(), accepted())
    node.append("p1", opening(), accepted())
    plans = node.planner.plan(node.planner.next_offset(START))
    assert {plan.base.pchannel for plan in plans} == {"p0", "p1"}
    assert len({plan.base.version for plan in plans}) == 1


def test_a_parked_pchannel_is_left_out_until_it_is_unparked(node: Node) -> None:
    for name in ("p0", "p1"):
        node.append(name, opening())
    before = node.planner.next_offset(START)
    park(node.parked, Parked.of("p0", RangeFailure("BROKEN", "no way on", False, LogId(0, 7))))
    assert [plan.base.pchannel for plan in node.planner.plan(before)] == ["p1"], "parked since it was planned"
    assert set(node.planner.next_offset(START)["ends"]) <= {"p1"}
    (found,) = read_parked(node.parked)
    assert (found.pchannel, found.code, found.position) == ("p0", "BROKEN", LogId(0, 7))
    assert "millrace unpark p0" in str(found.error())
    unpark(node.parked, "p0")
    assert parked_names(node.parked) == frozenset()
    node.clock.now += 10
    assert "p0" in node.planner.next_offset(START)["ends"]
    with pytest.raises(ChannelNotFound):
        unpark(node.parked, "p0")


@pytest.mark.slow
def test_a_pchannel_that_does_not_move_is_planned_later_and_later(node: Node) -> None:
    node.append("p0", opening(), accepted())
    planned = []
    offset = START
    for step in range(600):
        node.clock.now = step * 0.1
        if (found := node.planner.next_offset(offset)) != offset:
            planned.append(node.clock.now)
            offset = found
    pauses = [later - earlier for earlier, later in itertools.pairwise(planned)]
    assert pauses[:6] == sorted(pauses[:6])
    assert 4.9 < min(pauses[6:]) <= max(pauses[6:]) < 7.7, "the longest pause, and half of it at most for jitter"
    node.work(offset)
    node.append("p0", accepted())
    assert node.planner.next_offset(offset) != offset, "it moved: no pause is left"


def test_an_entry_that_the_peek_cannot_process_is_left_to_a_task(node: Node) -> None:
    node.append("p0", opening())
    offset = node.planner.next_offset(START)
    node.work(offset)
    node.append("p0", poison())
    assert node.planner.next_offset(offset) != offset


def test_an_old_batch_that_spark_runs_again_is_no_log_that_lost_its_tail(node: Node) -> None:
    node.append("p0", opening(), accepted())
    first = node.planner.next_offset(START)
    node.work(first)
    node.append("p0", accepted())
    node.work(node.planner.next_offset(first))
    assert node.planner.plan(first) == []


def test_a_log_that_ends_before_what_is_committed_is_planned_so_that_a_task_says_so(node: Node) -> None:
    ids = node.append("p0", opening(), accepted())
    offset = node.planner.next_offset(START)
    node.work(offset)
    node.service.drop("p0")
    node.service.create("p0")  # the broker came back without what it had acknowledged
    planner = node.another_planner()
    found = planner.next_offset(offset)
    assert found["ends"] == {"p0": str(node.service.open("p0").describe().end)}
    (plan,) = planner.plan(found)
    assert plan.base.position == ids[-1].following() > plan.end
    failure = run_ingest(plan, log=node.service.open("p0"), table=node.path).failure
    assert failure is not None
    assert failure.code == "LOG_REGRESSED"


def test_a_log_that_cannot_be_reached_is_nothing_to_do(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.append("p0", opening())

    def gone() -> list[str]:
        raise LogUnavailable("the server is restarting")

    monkeypatch.setattr(node.service, "names", gone)
    assert node.planner.next_offset(START) == START


def test_a_bounded_run_ends_where_the_logs_stood_and_waits_out_what_does_not_move(node: Node) -> None:
    node.append("p0", opening(), accepted())
    node.planner.fix_target()
    node.append("p0", accepted())
    node.append("p1", opening())
    offset = node.planner.next_offset(START)
    assert node.work(offset) == {"p0": 2}
    assert node.planner.next_offset(offset) == offset
    bounded = node.another_planner()
    bounded.fix_target()
    offset, batches = START, 0
    while (found := bounded.next_offset(offset)) != offset:  # nothing is committed: it gives up in the end
        offset, batches = found, batches + 1
    assert 2 <= batches <= 20
