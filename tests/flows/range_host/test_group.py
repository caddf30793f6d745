"""Several workers of one pipeline: the consumer group divides the partitions, and a claim fences the former owner."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import LogUnavailable, MillraceError, PipelineBusy, PipelineInvalid
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.beat import Beat
from millrace.flows.range_host.definition import FlowCommitter, FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.range_host.offsets import require_no_members
from millrace.flows.range_host.positions import Positions, ensure_positions, positions_of, positions_uri
from millrace.flows.range_host.status import State
from millrace.flows.range_host.supervision import read_status
from millrace.flows.range_host.task import Work
from millrace.flows.sinks.delta.sink import OUTPUTS
from millrace.flows.sources.division import Division, instance_name
from millrace.flows.sources.kafka.membership import Membership, leave, members
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.node.range_loop.schedule import START, RangeSchedule
from millrace.pipelines.declaration import pipeline_of
from millrace.storage.table import open_table
from tests.flows.brokers_in_process import Brokers, brokers
from tests.flows.range_host.flights import Flights
from tests.flows.range_host.test_kills import Worker
from tests.waiting import until

ALL = frozenset(f"in-{partition}" for partition in range(4))


class _Group:
    """What a consumer group says to one worker, by hand."""

    def __init__(self) -> None:
        self.division = Division(frozenset())
        self.told: list[tuple[str, int, int]] = []
        self.followed: set[str] = set()
        self.session_seconds = 45.0

    def gives(self, *tasks: str) -> None:
        held = frozenset(tasks)
        self.division = Division(held, held - self.division.held, self.division.held - held)

    def poll(self) -> Division:
        said, self.division = self.division, Division(self.division.held)
        return said

    def wait_joined(self, seconds: float) -> None:
        pass

    def follow(self, lanes: Sequence[tuple[str, int]]) -> None:
        self.followed = {topic for topic, _ in lanes}

    def commit(self, offsets: Any) -> None:
        self.told += offsets

    def close(self) -> None:
        pass


class _Worker:
    """One worker, step by step."""

    def __init__(self, settings: Settings, pipeline: Flow, number: int) -> None:
        self.run = FlowRun(settings, pipeline, number)
        self.group = _Group()
        self.run._members.append(self.group)
        self.run.prepare()
        self.schedule: RangeSchedule[Work] = RangeSchedule(self.run.planner())
        self.committer: FlowCommitter = self.run.committer(None)

    def plans(self) -> list[Work]:
        """What it would read now, at most a range of each task."""
        self.schedule._planner._looked = 0.0  # type: ignore[attr-defined]  # however short ago it looked at the topics
        following = self.schedule.next_offset(START)
        return [] if following == START else self.schedule.plan(following)

    def commits(self, plans: list[Work]) -> tuple[set[str], set[str]]:
        """Run the ranges, and commit them. The tasks whose ranges went in, and those that were fenced."""
        found = self.committer.commit([self.run.run(plan) for plan in plans])
        return {each.channel for each in found.committed}, {each.channel for each in found.fenced}

    def close(self) -> None:
        self.schedule.close()
        self.committer.close()
        self.run.stop_tasks()


def _declared(address: str, **more: Any) -> dict[str, Any]:
    source = {"kind": "kafka", "bootstrap": [address], "topics": ["in"], "assignment": "group", **more}
    return {"id": "p", "source": source, "sink": {"kind": "delta", "table": "out"}, "errors": {"create": False}}


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Iterator[Brokers]:
    monkeypatch.setattr("millrace.flows.sources.kafka.topics.topic_ids", lambda cluster, topics: {})  # they have none
    with brokers() as found:
        found.send("p.errors", [])
        found.producer.list_topics("p.errors", timeout=20)  # which makes it
        yield found


@pytest.fixture
def workers(tmp_path: Path, kafka: Brokers) -> Iterator[tuple[_Worker, _Worker]]:
    for partition in range(4):
        kafka.send("in", [(b"k%d" % n, b"{}", []) for n in range(5)], partition)
    pipeline, settings = pipeline_of(_declared(kafka.address)), Settings(data_dir=tmp_path)
    made = _Worker(settings, pipeline, 0), _Worker(settings, pipeline, 1)
    yield made
    for each in made:
        each.close()


def _rows(settings: Settings) -> Counter[tuple[int, int]]:
    table = open_table(settings.table_uri(f"{OUTPUTS}/out"))
    assert table is not None
    found = table.dataset().to_table(columns=["partition", "offset"])
    return Counter(zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True))


def test_a_worker_reads_what_the_group_gives_it_and_tells_the_group_where_it_stands(
    workers: tuple[_Worker, _Worker],
) -> None:
    first, second = workers
    assert first.plans() == [], "nothing before the group has said what is its"
    first.group.gives("in-0", "in-1")
    second.group.gives("in-2", "in-3")
    mine, others = first.plans(), second.plans()
    assert {each.channel for each in mine} == {"in-0", "in-1"}
    assert {each.channel for each in others} == {"in-2", "in-3"}
    assert first.commits(mine) == ({"in-0", "in-1"}, set())
    assert second.commits(others) == ({"in-2", "in-3"}, set())
    assert sorted(first.group.told) == [("in", 0, 5), ("in", 1, 5)]
    assert set(_rows(first.run.settings).values()) == {1}
    assert len(_rows(first.run.settings)) == 20


def test_a_range_of_the_former_owner_is_fenced_by_the_claim_of_the_new_one(workers: tuple[_Worker, _Worker]) -> None:
    first, second = workers
    first.group.gives("in-0")
    stale = first.plans()
    second.group.gives("in-0")
    assert [each.channel for each in second.plans()] == ["in-0"]
    assert first.commits(stale) == (set(), {"in-0"})
    assert positions_of(first.run.settings, "p")["in-0"].position == 0


def test_a_worker_that_has_not_heard_that_it_lost_a_task_reads_none_of_it(
    workers: tuple[_Worker, _Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workers
    first.group.gives("in-0")
    assert first.plans()
    second.group.gives("in-0")
    assert second.plans()
    assert first.plans() == [], "it believes that it holds the task, and the table says whose it is"
    # The group leaves the task with the first worker for a whole session: then it is its own after all.
    later = time.monotonic() + 60
    monkeypatch.setattr("millrace.flows.range_host.definition.time.monotonic", lambda: later)
    assert [each.channel for each in first.plans()] == ["in-0"]
    assert second.plans() == []


def test_a_task_that_comes_back_is_claimed_again(workers: tuple[_Worker, _Worker], kafka: Brokers) -> None:
    first, second = workers
    first.group.gives("in-0")
    assert first.commits(first.plans()) == ({"in-0"}, set())
    first.group.gives()
    assert first.plans() == []
    second.group.gives("in-0")
    kafka.send("in", [(b"k", b"{}", [])], 0)
    assert second.commits(second.plans()) == ({"in-0"}, set())
    second.group.gives()
    assert second.plans() == []
    first.group.gives("in-0")
    kafka.send("in", [(b"k", b"{}", [])], 0)
    assert first.commits(first.plans()) == ({"in-0"}, set())
    assert _rows(first.run.settings) == {(0, offset): 1 for offset in range(7)}


def test_positions_are_read_by_what_changed(workers: tuple[_Worker, _Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = workers
    first.group.gives(*ALL)
    seen = Positions(ensure_positions(positions_uri(first.run.settings, "p")))
    assert len(seen.now()) == 4
    read: list[str] = []
    plain = type(seen.table).read
    monkeypatch.setattr(type(seen.table), "read", lambda self, path: read.append(path) or plain(self, path))
    plans = first.plans()
    read.clear()
    first.commits(plans[:1])
    read.clear()
    assert seen.now()[plans[0].channel].position == 5
    claims = 4  # one file of each task's claim, one of them replaced by the range's
    assert len(read) == claims
    read.clear()
    seen.now()
    assert not read


def test_statuses_of_several_workers_are_one(workers: tuple[_Worker, _Worker]) -> None:
    settings = workers[0].run.settings
    for each, tasks in zip(workers, [("in-0", "in-2"), ("in-1",)], strict=True):
        each.group.gives(*tasks)
        each.plans()
        beat = Beat(each.run)
        beat.run_once()
        beat.close()
    found = read_status(settings, "p")
    assert [task.task for task in found.tasks] == ["in-0", "in-1", "in-2"]
    assert found.state is State.RUNNING


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"resources": {"workers": 2}, "source": {"assignment": "all"}}, "source.assignment to group"),
        ({"deployment": "airflow"}, "or deployment service"),
    ],
)
def test_what_cannot_be_divided_is_refused(change: dict[str, Any], word: str) -> None:
    declared = _declared("127.0.0.1:1")
    declared["source"] |= change.pop("source", {})
    with pytest.raises(PipelineInvalid, match=word):
        pipeline_of({**declared, **change})


def test_the_group_divides_the_partitions_among_its_members(kafka: Brokers) -> None:
    kafka.send("in", [(b"k", b"{}", [])])
    source = KafkaSource.model_validate(_declared(kafka.address, session_timeout_ms=4000)["source"])
    first = Membership(source, "g", instance="a")
    first.wait_joined(30)
    assert first.poll().came == ALL
    second = Membership(source, "g", instance="b")
    held: list[frozenset[str]] = [ALL, frozenset()]

    def shared() -> bool:
        held[:] = [first.poll().held, second.poll().held]
        return len(held[0]) == len(held[1]) == 2

    until(shared, "each has two", seconds=30)
    assert held[0] | held[1] == ALL
    second.close()  # as if killed: a named member keeps its part for a session
    until(lambda: first.poll().held == ALL, "the first has all again", seconds=30)
    first.close()


def test_a_workers_name_is_its_own_after_a_restart_and_nobody_elses(tmp_path: Path) -> None:
    here, there = Settings(data_dir=tmp_path / "a"), Settings(data_dir=tmp_path / "b")
    assert instance_name(here, 0) == instance_name(here, 0)
    assert len({instance_name(here, 0), instance_name(here, 1), instance_name(there, 0)}) == 3


@pytest.mark.slow
def test_workers_that_are_stopped_for_good_leave_their_group(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=4, source={"assignment": "group", "session_timeout_ms": 60_000})
    declared = pipeline_of(flights.declared)
    source, group = declared.source, declared.consumer_group
    assert isinstance(source, KafkaSource)
    one, other = (Membership(source, group, instance=f"w{number}") for number in range(2))
    for each in (one, other):
        each.wait_joined(30)
    for each in (one, other):
        each.close()
    assert len(members(source, group)) == 2, "a restart would find their partitions"
    with pytest.raises(PipelineBusy, match="has workers in the consumer group"):
        require_no_members(flights.settings, declared)
    leave(source, group, ["w0", "w1", "w2 that never was"])
    require_no_members(flights.settings, declared)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["delta", "opensearch", "collection"])
def test_four_workers_over_twelve_partitions_while_they_die_pause_and_join(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """One is killed, one at its claim, one stops beyond its session, one joins: in = out + errors, nothing twice."""
    more: dict[str, Any] = {"sink": {}} if kind == "opensearch" else {}
    flights = Flights(
        tmp_path,
        partitions=12,
        source={"assignment": "group", "session_timeout_ms": 6000, "max_poll_interval_ms": 30_000},
        resources={"tasks": 4, "workers": 2},
        flush={"items": 200, "seconds": 0.2, "mib": 1},
        **more,
    )
    settings = flights.settings
    if kind == "delta":
        flights.declared["sink"] = {"kind": "delta", "table": "out"}
    if kind == "collection":
        db = request.getfixturevalue("deployed")(settings)
        db.create_collection("out", {"id": "string", "flight": "int64", "n": "int64"}, key="id", vchannels=3)
        flights.declared["sink"] = {"kind": "collection", "collection": "out"}
    dice = random.Random(kind)
    told: list[tuple[str, Any]] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            part = [
                (f"k{number}", {"flight": "bad" if dice.random() < 0.02 else number, "id": f"k{number}", "n": number})
                for number in range(len(told), len(told) + 100)
            ]
            flights.send(part)
            told.extend(part)
            stop.wait(0.05)

    sender = threading.Thread(target=send)
    folders = [tmp_path / f"w{number}" for number in range(5)]
    made = []
    for folder in folders:
        folder.mkdir()
        made.append(Worker(folder, flights))

    def begin(number: int) -> Any:
        return made[number].start("--worker", str(number))

    try:
        jobs = [begin(number) for number in range(3)]
        sender.start()
        until(lambda: sum(each.records_in for each in _standing(flights)) > 500, "they work", seconds=60)
        dying = made[3].start("--worker", "3", failpoint="pipeline.claim")
        assert dying.wait(deadline=60) != 0, "it dies between the group's word and its claim"
        jobs.append(begin(3))
        time.sleep(4)
        jobs[0].kill()
        os.kill(jobs[1].pid, signal.SIGSTOP)
        time.sleep(10)  # beyond the session
        jobs.append(begin(4))
        os.kill(jobs[1].pid, signal.SIGCONT)
        time.sleep(5)
        stop.set()
        sender.join(timeout=60)
        total = len(told)
        until(lambda: sum(each.position for each in _standing(flights)) == total, "all is in", seconds=90)
        assert all(job.running() for job in jobs[1:]), [job.tail() for job in jobs[1:]]
    finally:
        stop.set()
        sender.join(timeout=60)
        for each in made:
            each.kill()
    good = {key for key, value in told if value["flight"] != "bad"}
    bad = {value["n"] for _, value in told if value["flight"] == "bad"}
    assert {json.loads(message.value())["n"] for message in flights.errors()} == bad
    if kind == "opensearch":
        assert set(flights.index()) == good
    elif kind == "collection":
        db.settle()
        changes = db.collection("out").changes_between().read_all().to_pylist()
        assert Counter(each["id"] for each in changes if each["_change"] == "insert") == dict.fromkeys(good, 1)
    else:
        table = open_table(settings.table_uri(f"{OUTPUTS}/out"))
        assert table is not None
        rows = Counter(json.loads(text)["id"] for text in table.dataset().to_table()["document"].to_pylist())
        assert rows == dict.fromkeys(good, 1)
    places = _standing(flights)
    assert sum(each.records_in for each in places) == total


def _standing(flights: Flights) -> list[Any]:
    try:
        return list(positions_of(flights.settings, flights.id).values())
    except MillraceError:
        return []


def test_a_bounded_run_ends_where_its_partitions_end(tmp_path: Path, kafka: Brokers) -> None:
    kafka.send("in", [(b"k", b"{}", [])])
    definition = FlowRun(Settings(data_dir=tmp_path), pipeline_of(_declared(kafka.address)))
    assert run(definition, stop=threading.Event(), until_end=True)["in-0"] == 1


def test_topics_of_a_pattern_are_read_and_new_ones_are_found_while_it_runs(tmp_path: Path, kafka: Brokers) -> None:
    for topic in ("in", "in-2", "inner", "__in"):
        kafka.send(topic, [(b"k", b"{}", [])])
    declared = _declared(kafka.address, topics_regex="in(-.*)?")
    del declared["source"]["topics"]
    worker = _Worker(Settings(data_dir=tmp_path), pipeline_of(declared), 0)
    worker.group.gives("in-0", "in-2-0")
    assert worker.commits(worker.plans()) == ({"in-0", "in-2-0"}, set())
    assert worker.group.followed == {"in", "in-2"}
    kafka.send("in-new", [(b"k", b"{}", [])] * 3)
    topics = worker.schedule._planner._topics  # type: ignore[attr-defined]
    topics._metadata_seconds = 0.0
    worker.group.gives("in-0", "in-2-0", "in-new-0")
    (plan,) = worker.plans()
    assert (plan.channel, plan.start, plan.end) == ("in-new-0", 0, 3)
    assert worker.commits([plan]) == ({"in-new-0"}, set())
    assert worker.group.followed == {"in", "in-2", "in-new"}
    worker.close()


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ({"topics_regex": "in"}, "give either topics or topics_regex"),
        ({"topics": []}, "give either topics or topics_regex"),
        ({"topics": [], "topics_regex": "("}, "not a regular expression"),
        ({"topics": [], "topics_regex": "p.*"}, r"errors\.topic is a topic of the source"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(source: dict[str, Any], word: str) -> None:
    with pytest.raises(PipelineInvalid, match=word):
        pipeline_of(_declared("127.0.0.1:1", **source))


def test_a_bounded_run_that_gets_no_part_in_time_leaves_the_group(tmp_path: Path, kafka: Brokers) -> None:
    kafka.send("in", [])
    definition = FlowRun(Settings(data_dir=tmp_path), pipeline_of(_declared(kafka.address)))
    with pytest.raises(LogUnavailable, match="no assignment"):
        definition.join(seconds=0.0)
    assert not definition._members
