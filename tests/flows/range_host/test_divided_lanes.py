"""Several workers of one pipeline from a collection: leases divide its VChannels, and claims fence a former owner."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millrace.testing
from millrace.base.errors import PipelineInvalid
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.definition import FlowCommitter, FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.range_host.positions import (
    FORGOTTEN,
    Position,
    commit_positions,
    ensure_positions,
    positions_of,
    positions_uri,
    read_positions,
)
from millrace.flows.range_host.supervision import read_status
from millrace.flows.range_host.task import Work
from millrace.flows.sources.division import LeasedMember
from millrace.node.range_loop.schedule import START, RangeSchedule
from millrace.pipelines.declaration import pipeline_of
from millrace.runtime.child_processes import ChildProcess
from millrace.testing import Deployment
from tests.flows.brokers_in_process import Brokers, brokers
from tests.flows.range_host.test_kills import Worker
from tests.waiting import until

SCHEMA = {"id": "int64", "name": "string?"}
LANES = 4
ALL = {f"in-{place}" for place in range(LANES)}


@pytest.fixture
def kafka() -> Iterator[Brokers]:
    with brokers() as found:
        found.send("p.errors", [])
        found.producer.list_topics("p.errors", timeout=20)  # which makes it
        yield found


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path / "data", pchannels=2, session_seconds=2.0) as made:
        made.create_collection("in", SCHEMA, key="id", vchannels=LANES)
        made.create_collection("out", SCHEMA, key="id", vchannels=2)
        yield made


def declared(kafka: Brokers, **more: Any) -> dict[str, Any]:
    return {
        "id": "p",
        "source": {"kind": "collection", "collection": "in"},
        "sink": {"kind": "collection", "collection": "out"},
        "errors": {"create": False, "cluster": {"bootstrap": [kafka.address]}},
        "resources": {"workers": 2, "tasks": 4},
        **more,
    }


def rows(db: Deployment, name: str) -> dict[int, str]:
    return {row["id"]: row["name"] for row in db.collection(name).read().to_pylist()}


class Stepped:
    """One worker, step by step."""

    def __init__(self, settings: Settings, pipeline: Flow, number: int) -> None:
        self.run = FlowRun(settings, pipeline, number)
        self.run.prepare()
        self.schedule: RangeSchedule[Work] = RangeSchedule(self.run.planner())
        self.committer: FlowCommitter = self.run.committer(None)

    def plans(self) -> list[Work]:
        following = self.schedule.next_offset(START)
        return [] if following == START else self.schedule.plan(following)

    def commits(self, plans: list[Work]) -> tuple[set[str], set[str]]:
        """Run the ranges. The lanes whose ranges went in, and those that are another's, as the sink or table says."""
        done = [self.run.run(plan) for plan in plans]
        refused = [each for each in done if each.failure is not None]
        assert all("another worker has taken it over" in str(each.failure) for each in refused)
        found = self.committer.commit(done)
        return {each.channel for each in found.committed}, {each.channel for each in (*refused, *found.fenced)}

    def dies(self) -> None:
        """Without a word: its lease stays until its time is over."""
        [member] = self.run._members
        assert isinstance(member, LeasedMember)
        member._keeper.close()
        self.run._members.clear()
        self.close()

    def close(self) -> None:
        self.schedule.close()
        self.committer.close()
        self.run.stop_tasks()
        self.run.leave()


def planned(worker: Stepped, count: int) -> list[Work]:
    """The ranges that the worker would read, once it has so many lanes with work."""
    found: dict[str, Work] = {}

    def enough() -> bool:
        found.update((each.channel, each) for each in worker.plans())
        return len(found) == count

    until(enough, f"{count} lanes are the worker's", seconds=20)
    return list(found.values())


def test_lanes_are_shared_and_a_range_of_the_former_owner_is_fenced(db: Deployment, kafka: Brokers) -> None:
    pipeline = pipeline_of(declared(kafka))
    first, second = (Stepped(db.settings, pipeline, number) for number in range(2))
    source = db.collection("in")
    source.insert([{"id": number, "name": "a"} for number in range(100)])
    stale = planned(first, LANES)
    plans = planned(second, LANES // 2)
    theirs = {each.channel for each in plans}
    assert second.commits(plans) == (theirs, set())
    assert first.commits(stale) == (ALL - theirs, theirs), "what another claimed is not committed twice"
    assert sum(each.records_in for each in positions_of(db.settings, "p").values()) == 100
    source.upsert([{"id": number, "name": "b"} for number in range(100)])
    assert {each.channel for each in planned(first, LANES // 2)} == ALL - theirs
    first.dies()
    taken: set[str] = set()

    def all_taken() -> bool:
        # A lane whose sink the first worker had opened last is refused once, and then opened anew.
        taken.update(second.commits(second.plans())[0])
        return taken == ALL

    until(all_taken, "the second has all lanes after the lease", seconds=20)
    db.settle()
    assert rows(db, "out") == dict.fromkeys(range(100), "b")
    second.close()


def test_positions_of_one_lane_are_taken_over_by_all_vchannels(db: Deployment, kafka: Brokers) -> None:
    source = db.collection("in")
    source.insert([{"id": number, "name": "old"} for number in range(50)])
    table = ensure_positions(positions_uri(db.settings, "p"))
    read = db.current_tick(source.definition.pchannels)
    commit_positions(table, [(None, Position("in-0", read, 1, records_in=50))]).raise_if_fenced()
    source.insert([{"id": number, "name": "new"} for number in range(50, 92)])
    source.delete([90, 91])
    pipeline = pipeline_of(declared(kafka, resources={"workers": 1}))
    reached = run(FlowRun(db.settings, pipeline), stop=threading.Event(), until_end=True)
    assert set(reached) == ALL
    assert min(reached.values()) >= read
    db.settle()
    assert rows(db, "out") == dict.fromkeys(range(50, 90), "new"), "what was read is not read again"
    places = positions_of(db.settings, "p").values()
    assert sum(each.records_in for each in places) == 50 + 42 + 2
    assert sum(each.records_out for each in places) == 42 + 2, "a deleted row is deleted by its key"
    [status] = [task for task in read_status(db.settings, "p").tasks if task.task == "in-3"]
    assert status.lag == 0


def test_the_one_lane_of_named_channels_is_forgotten_when_another_has_its_position(
    db: Deployment, kafka: Brokers
) -> None:
    source = db.collection("in")
    source.insert([{"id": number, "name": "n"} for number in range(20)])
    table = ensure_positions(positions_uri(db.settings, "p"))
    read = db.current_tick(source.definition.pchannels)
    commit_positions(table, [(None, Position("in-0", read, 1))]).raise_if_fenced()
    channel = source.definition.vchannels[2]
    pipeline = pipeline_of(
        declared(kafka, resources={}, source={"kind": "collection", "collection": "in", "channels": [channel]})
    )
    FlowRun(db.settings, pipeline).prepare()
    assert {task: each.position for task, each in positions_of(db.settings, "p").items()} == {"in-2": read}
    table.refresh()
    assert read_positions(table)["in-0"].position == FORGOTTEN


def test_several_workers_of_a_collection_are_the_services_and_not_sparks(kafka: Brokers) -> None:
    assert pipeline_of(declared(kafka)).divided
    assert not pipeline_of(declared(kafka, resources={})).divided
    with pytest.raises(PipelineInvalid, match=r"resources\.workers"):
        pipeline_of(declared(kafka, deployment="airflow"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_of_a_collection_are_killed_stopped_and_join_and_every_row_is_there(
    db: Deployment, kafka: Brokers, tmp_path: Path
) -> None:
    """in = out by content at the end, with each key's newest row, whatever died meanwhile."""
    pipeline = declared(kafka, resources={"workers": 3, "tasks": 2}, flush={"items": 50, "seconds": 0.1, "mib": 1})
    made: list[Worker] = []

    class Declared:
        settings = db.settings

    Declared.declared = pipeline  # type: ignore[attr-defined]

    def begin(number: int, failpoint: str = "") -> ChildProcess:
        folder = tmp_path / f"w{len(made)}"
        folder.mkdir()
        made.append(Worker(folder, Declared()))  # type: ignore[arg-type] # as much of it as a worker asks
        return made[-1].start("--worker", str(number), failpoint=failpoint)

    dice, stop = random.Random(7), threading.Event()
    wanted: dict[int, str] = {}
    source = db.collection("in")

    def write() -> None:
        while not stop.is_set():
            keys = dice.sample(range(2000), 40)
            source.upsert([{"id": key, "name": f"n{len(wanted)}-{key}-{dice.random()}"} for key in keys])
            gone = dice.sample(range(2000), 2)
            source.delete(gone)
            stop.wait(0.02)

    def taken() -> int:
        return sum(each.records_in for each in positions_of(db.settings, "p").values())

    writer = threading.Thread(target=write)
    try:
        jobs = [begin(number) for number in range(2)]
        writer.start()
        assert writer.is_alive()
        until(lambda: taken() > 300, f"they work: {[job.tail() for job in jobs]}", seconds=20)
        dying = begin(2, failpoint="pipeline.claim")
        assert dying.wait(deadline=60) != 0, "it dies between the lease's word and its claim"
        jobs.append(begin(2))
        time.sleep(3)
        jobs[0].kill()
        os.kill(jobs[1].pid, signal.SIGSTOP)
        time.sleep(6)  # beyond the lease
        jobs.append(begin(0))
        os.kill(jobs[1].pid, signal.SIGCONT)
        time.sleep(4)
        stop.set()
        writer.join(timeout=30)
        db.settle()
        wanted = rows(db, "in")

        def equal() -> bool:
            db.settle()
            return rows(db, "out") == wanted

        until(equal, "all is in", seconds=60)
        assert all(job.running() for job in jobs[1:]), [job.tail() for job in jobs[1:]]
    finally:
        stop.set()
        writer.join(timeout=30)
        for each in made:
            each.kill()
    assert "Traceback" not in "".join(path.read_text() for path in tmp_path.glob("w*/worker.log"))
