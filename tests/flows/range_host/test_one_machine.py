"""A flow that one worker reads runs on one machine of a cluster, and on another one after that is lost."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from millrace.base.errors import LogUnavailable, PipelineBusy, StreamBusy
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.definition import FlowCommitter, FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.range_host.offsets import require_no_members
from millrace.flows.range_host.positions import positions_of
from millrace.flows.range_host.skipped import skip_record
from millrace.flows.range_host.supervision import want
from millrace.flows.range_host.task import Work
from millrace.flows.sinks.delta.sink import OUTPUTS
from millrace.flows.sources.division import LeasedMember, members
from millrace.flows.sources.kafka import topics
from millrace.meta.sql import SqlStore
from millrace.node.range_loop.schedule import START, RangeSchedule
from millrace.pipelines.declaration import pipeline_of
from millrace.storage.table import open_table
from tests.flows.brokers_in_process import Brokers, brokers
from tests.waiting import until

SECONDS = 10.0


@pytest.fixture(scope="module")
def kafka() -> Iterator[Brokers]:
    with brokers() as found:
        found.send("p.errors", [])
        found.producer.list_topics("p.errors", timeout=20)  # which makes it
        yield found


@pytest.fixture(autouse=True, scope="module")
def without_topic_ids() -> Iterator[None]:
    """Brokers of this process know none, and asking each time takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topics, "topic_ids", lambda *_, **__: {})
        yield


def machine(folder: Path, name: str) -> Settings:
    """A machine that shares the tables and the meta store with the others, and no folder."""
    return Settings(
        data_dir=folder / name,
        tables=str(folder / "tables"),
        meta_store=f"sqlite:///{folder}/meta.db",
        session_seconds=SECONDS,
    )


def flow(kafka: Brokers, topic: str, **more: Any) -> Flow:
    source = {"kind": "kafka", "topics": [topic], "bootstrap": [kafka.address], "offset_reset": "earliest"}
    flush = {"items": 1, "seconds": 0.01, "mib": 1}
    return pipeline_of(
        {
            "id": "p",
            "source": source,
            "sink": {"kind": "delta", "table": "out"},
            "flush": flush,
            "errors": {"create": False},
            **more,
        }
    )


def documents(settings: Settings) -> Counter[str]:
    table = open_table(settings.table_uri(f"{OUTPUTS}/out"))
    found = (
        []
        if table is None
        else [row["id"] for each in table.actions().to_pylist() for row in table.read(each["path"]).to_pylist()]
    )
    return Counter(found)


def commits(settings: Settings) -> int:
    return sum(each.commits for each in positions_of(settings, "p").values())


class Hand:
    """A clock that the test moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing sleeps here")


@dataclass
class Stepped:
    """The worker of one machine, step by step. It renews its lease when the test says so."""

    settings: Settings
    flow: Flow
    clock: Hand

    def __post_init__(self) -> None:
        self.run = FlowRun(self.settings, self.flow)
        self.store = SqlStore(self.settings.meta_store, self.clock.monotonic)
        self.member = LeasedMember(
            self.store, self.clock, flow="p", instance=str(self.settings.data_dir), seconds=SECONDS, alone=True
        )
        self.member._keeper.close()
        self.member.session_seconds = 0.05  # after which it claims back a lane, by the system's clock
        self.run._members.append(self.member)
        self.run.prepare()
        self.schedule: RangeSchedule[Work] = RangeSchedule(self.run.planner())
        self.committer: FlowCommitter = self.run.committer(None)
        self.work: list[Work] = []

    def plan(self) -> None:
        following = self.schedule.next_offset(START)
        self.work = [] if following == START else self.schedule.plan(following)

    def commit(self) -> None:
        work, self.work = self.work, []
        self.committer.commit([self.run.run(each) for each in work])

    def close(self) -> None:
        self.schedule.close()
        self.committer.close()
        self.run.stop_tasks()
        self.run.leave()


STEPS = st.lists(
    st.tuples(st.sampled_from(["renew", "plan", "commit", "send", "pass"]), st.integers(0, 1)), min_size=8, max_size=40
)


def test_a_range_of_a_machine_that_was_suspended_is_fenced(kafka: Brokers, tmp_path: Path) -> None:
    kafka.send("suspended", [(b"%d" % each, b"{}", []) for each in range(3)])
    clock = Hand()
    first, second = (Stepped(machine(tmp_path, name), flow(kafka, "suspended"), clock) for name in ("a", "b"))
    try:
        first.member._key.step()
        first.plan()
        assert len(first.work) == 1, "it has a range in work, and is suspended"
        assert not second.member.held
        while not second.member.held:
            clock.now += 1.0
            second.member._key.step()
        assert not first.member.held
        second.plan()
        first.commit()
        assert sum(each.records_in for each in positions_of(first.settings, "p").values()) == 0
        while second.work:
            second.commit()
            second.member._key.step()
            second.plan()
        assert sum(each.records_in for each in positions_of(first.settings, "p").values()) == 3
        assert sorted(documents(first.settings).values()) == [1, 1, 1]
    finally:
        first.close()
        second.close()


def test_one_driver_of_spark_runs_a_flow_and_one_that_was_suspended_commits_nothing(
    kafka: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka.send("drivers", [(b"%d" % each, b"{}", []) for each in range(3)])
    declared = flow(kafka, "drivers", deployment="airflow")
    settings = [replace(machine(tmp_path, name), session_seconds=1.0) for name in ("a", "b")]
    first, second = (FlowRun(each, declared, on_spark=True) for each in settings)
    committers: list[FlowCommitter] = []
    try:
        first.prepare()
        committers.append(first.committer(None))
        with pytest.raises(StreamBusy, match="'p' runs in another process"):
            second.prepare()
        with pytest.raises(PipelineBusy, match="has workers with a lease"):
            require_no_members(settings[1], declared)
        schedule: RangeSchedule[Work] = RangeSchedule(first.planner())
        work = schedule.plan(schedule.next_offset(START))
        schedule.close()
        done = [first.run(each) for each in work]
        (member,) = first._members
        assert isinstance(member, LeasedMember)
        member._keeper.close()  # it is suspended
        second.prepare()
        with pytest.raises(StreamBusy, match="start it again") as lost:
            committers[0].commit(done)
        assert lost.value.retriable, "Airflow starts it again"
        monkeypatch.setattr(FlowRun, "require_held", lambda _: None)  # it looked just before its lease ended
        assert len(committers[0].commit(done).fenced) == 1
        assert sum(each.records_in for each in positions_of(settings[1], "p").values()) == 0
    finally:
        for each in committers:
            each.close()
        for driver in (first, second):
            driver.stop_tasks()
            driver.end()
    require_no_members(settings[0], declared)


@pytest.mark.slow
@pytest.mark.timeout(600)
@examples(
    deadline=None,
    max_examples=8,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(steps=STEPS, number=st.integers(0, 1 << 40))
def test_a_machine_that_was_cut_off_commits_nothing_after_another_took_over(
    kafka: Brokers, steps: list[tuple[str, int]], number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, topic, clock = tmp_path_factory.mktemp("machines"), f"in{number}-{len(steps)}", Hand()
    kafka.send(topic, [(b"%d" % each, b"{}", []) for each in range(4)])
    sent = 4
    workers = [Stepped(machine(folder, name), flow(kafka, topic), clock) for name in ("a", "b")]
    try:
        for step, who in steps:
            worker = workers[who]
            if step == "renew":
                worker.member._key.step()
            elif step == "send":
                kafka.send(topic, [(b"%d" % sent, b"{}", [])])
                sent += 1
            elif step == "pass":
                for _ in range(5):
                    clock.now += SECONDS / 10
                    workers[who].store.list("")
            else:
                getattr(worker, step)()
            assert sum(each.member.held for each in workers) <= 1
        last = workers[0]

        def through() -> bool:
            clock.now += 1.0  # whoever watches a lease ends it
            last.member._key.step()
            last.plan()
            last.commit()
            return sum(each.position for each in positions_of(last.settings, "p").values()) == sent

        until(through, "one of them ends it", seconds=60)
        counted = sum(each.records_in for each in positions_of(last.settings, "p").values())
        assert counted == sent
        found = documents(last.settings)
        assert len(found) == sum(found.values()) == sent
    finally:
        for each in workers:
            each.close()


def test_what_was_decided_about_a_flow_holds_on_the_machine_that_continues_it(kafka: Brokers, tmp_path: Path) -> None:
    first, second = machine(tmp_path, "a"), machine(tmp_path, "b")
    kafka.send("decided", [(b"%d" % each, b"{}", []) for each in range(5)])
    declared = flow(kafka, "decided")
    run(FlowRun(first, declared), stop=threading.Event(), until_end=True)
    kafka.send("decided", [(b"%d" % each, b"{}", []) for each in range(5, 10)])
    skip_record(first, "p", "decided-0", 7)
    want(first, "p", paused=True)
    shutil.rmtree(first.data_dir)
    stop, reached = threading.Event(), positions_of(second, "p")
    commits_before = commits(second)
    worker = threading.Thread(target=run, args=(FlowRun(second, declared),), kwargs={"stop": stop})
    worker.start()
    waiting = FlowRun(first, declared)
    try:
        with SqlStore(first.meta_store, time.monotonic) as store:
            until(lambda: members(store, "p"), "the second machine has the lease", seconds=30)
        with pytest.raises(LogUnavailable, match="held the lease"):
            waiting.wait_alone(threading.Event(), seconds=1.0)
        with pytest.raises(PipelineBusy, match="has workers with a lease"):
            require_no_members(first, declared)
        until(lambda: commits(second) > commits_before, "it has claimed its lanes", seconds=30)
        read = {task: each.position for task, each in positions_of(second, "p").items()}
        assert read == {task: each.position for task, each in reached.items()}, "it is still paused"
        want(first, "p", paused=False)

        def all_in() -> bool:
            return sum(each.records_in for each in positions_of(second, "p").values()) == 10

        until(all_in, "the second machine goes on", seconds=30)
    finally:
        stop.set()
        worker.join(30)
    assert sum(each.records_error for each in positions_of(second, "p").values()) == 1
    assert len(documents(second)) == 9
    assert set(documents(second).values()) == {1}
    require_no_members(first, declared)
