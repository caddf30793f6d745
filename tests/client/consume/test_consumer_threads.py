"""Stream consumers of one connection: common heartbeats, each with its own answer, and few threads while idle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import GroupBusy, InvalidArgument, LogUnavailable, MillraceError, PermissionDenied
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.consumer_threads import MAX_MEMBERS, THREADS, Answer, Heartbeats
from millrace.client.consume.delivery import CHANGES
from millrace.client.consume.membership import GroupMember, GroupShare
from millrace.client.database import Database
from millrace.node.append import consumer_groups
from millrace.rpc.discovery import read_record
from millrace.rpc.wire import error_from_bytes
from tests.client.conftest import ITEMS, item_rows, opened_shop
from tests.processes import end_processes
from tests.sim.group_world import LEASE, Hand, Server
from tests.waiting import until

LANES = ["p0_7v0", "p0_7v1"]


class Groups:
    """A server's groups, and the calls of a connection."""

    def __init__(self, folder: Path) -> None:
        self.clock = Hand()
        self.server = Server(folder, lambda: ["p0"], lease=LEASE, clock=self.clock)
        self.calls: Counter[str] = Counter()
        self.refused = ""
        self.older = False
        self.away = False

    def require(self, group: str) -> None:
        if group == self.refused:
            raise PermissionDenied(f"no role on {group}")

    def together(self, requests: list[dict[str, Any]]) -> Sequence[Answer]:
        if self.older:
            raise InvalidArgument("unknown call 'append/group_heartbeats'")
        self.calls["together"] += 1
        if self.away:
            raise LogUnavailable("nobody is there")
        answers = self.server.heartbeats(requests, self.require)
        return [error_from_bytes(each["error"].encode()) if "error" in each else each for each in answers]

    def alone(self, request: dict[str, Any]) -> dict[str, Any]:
        self.calls["alone"] += 1
        return self.server.handle(request)


class Heart:
    """A consumer as far as heartbeats are concerned."""

    interval = 1.0

    def __init__(self, groups: Groups, group: str, name: str = "m", **options: Any) -> None:
        self.member = GroupMember(groups.alone, group, LANES, name=name, clock=groups.clock, **options)
        self.share: GroupShare | None = None
        self.error: Exception | None = None
        self.paused = False

    @property
    def claims(self) -> dict[str, int]:
        return {} if self.share is None else {lane: held.claim for lane, held in self.share.held.items()}

    def begin(self) -> dict[str, Any] | None:
        return None if self.paused else self.member.asking(self.claims)

    def end(self, answer: Answer) -> None:
        self.error = answer if isinstance(answer, Exception) else None
        if not isinstance(answer, Exception):
            self.share = self.member.followed(answer)

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.member.send(request)


class Quiet(Heartbeats):
    """Without its thread: the test beats."""

    def _beat(self) -> None: ...

    def pass_time(self, groups: Groups, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            groups.clock.now += 0.5
            groups.server.release_silent()
            while self.beat():
                pass


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    made = Groups(tmp_path)
    yield made
    made.server.close()


def test_members_of_many_groups_are_renewed_by_few_calls(groups: Groups) -> None:
    before = len(os.listdir("/proc/self/fd"))
    beats = Quiet(groups.together, clock=groups.clock)
    hearts = [Heart(groups, f"g{number}") for number in range(2 * MAX_MEMBERS + 100)]
    for heart in hearts:
        beats.add(heart)
    beats.pass_time(groups, 10.0)
    assert all(set(heart.claims) == set(LANES) for heart in hearts)
    assert groups.calls["together"] <= 10 * 3
    assert groups.calls["alone"] == 0
    assert len(beats) == len(hearts)
    assert len(os.listdir("/proc/self/fd")) < before + 50, "a claim of a group is no open file"


def test_an_error_of_one_member_concerns_no_other(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = Quiet(groups.together, clock=groups.clock)
    hearts = [Heart(groups, f"g{number}") for number in range(6)]
    groups.refused = "g2"
    hearts[3].begin = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    follow = hearts[4].end
    hearts[4].end = lambda answer: (follow(answer), 1 / 0)[0]  # type: ignore[method-assign]
    for heart in hearts:
        beats.add(heart)
    beats.pass_time(groups, 2 * LEASE)
    assert isinstance(hearts[2].error, PermissionDenied)
    assert not hearts[3].claims
    for number in (0, 1, 4, 5):
        assert set(hearts[number].claims) == set(LANES), number
        hearts[number].member.move({LANES[0]: 1})


def test_a_member_that_is_suspended_is_fenced_and_comes_back(groups: Groups) -> None:
    here, there = (Quiet(groups.together, clock=groups.clock) for _ in range(2))
    one, two = Heart(groups, "mail", "one"), Heart(groups, "mail", "two")
    here.add(one)
    here.pass_time(groups, 1.0)
    claims = dict(one.claims)
    assert set(claims) == set(LANES)
    one.paused = True
    there.add(two)
    for _ in range(4):
        groups.clock.now += LEASE / 4
        groups.server.release_silent()
        here.beat()
        there.beat()
    there.pass_time(groups, 1.0)
    assert set(two.claims) == set(LANES), "its lease is over"
    assert one.member.expired
    with pytest.raises(GroupBusy):
        one.member.move({LANES[0]: 5})
    two.member.move({LANES[0]: 7})
    one.paused = False
    here.beat()
    assert one.share is not None
    assert not one.share.held, "it has lost all lanes"
    assert one.share.members == 2


def test_a_server_of_an_earlier_build_is_called_for_each_member(groups: Groups) -> None:
    groups.older = True
    beats = Quiet(groups.together, clock=groups.clock)
    hearts = [Heart(groups, f"g{number}") for number in range(5)]
    for heart in hearts:
        beats.add(heart)
    beats.pass_time(groups, 5.0)
    assert all(set(heart.claims) == set(LANES) for heart in hearts)
    assert groups.calls["alone"] >= 15
    groups.older = False
    beats.pass_time(groups, 60.0)
    assert groups.calls["together"] > 0, "it is asked again whether it can"


def test_a_server_that_is_away_leaves_no_member_in_a_call(groups: Groups) -> None:
    beats = Quiet(groups.together, clock=groups.clock)
    hearts = [Heart(groups, f"g{number}") for number in range(3)]
    for heart in hearts:
        beats.add(heart)
    groups.away = True
    beats.pass_time(groups, 3.0)
    assert all(isinstance(heart.error, LogUnavailable) for heart in hearts)
    groups.away = False
    beats.pass_time(groups, 1.5)
    assert all(heart.claims for heart in hearts)


def test_a_group_that_another_call_uses_delays_no_other(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_groups, "HEARTBEATS_SECONDS", 0.2)
    requests = [Heart(groups, f"g{number}").member.asking({}) for number in range(3)]
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with groups.server._turn("g1"):
            held.set()
            go.wait(10.0)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10.0)
    answers = groups.together(requests)
    go.set()
    thread.join()
    assert isinstance(answers[1], LogUnavailable)
    for each in (answers[0], answers[2]):
        assert isinstance(each, dict)
        assert set(each["held"]) == set(LANES)


@pytest.mark.parametrize("wrong", [None, {}, [1], [{}], [{"group": "g", "holder": "h"}], [{"sync": {}}] * 2000])
def test_heartbeats_that_are_none_are_refused(groups: Groups, wrong: Any) -> None:
    try:
        answers = groups.server.heartbeats(wrong, groups.require)
    except InvalidArgument:
        return
    assert [error_from_bytes(each["error"].encode()).code for each in answers] == ["INVALID_ARGUMENT"]


def threads() -> int:
    names = ("consumer-", "group-heartbeats", "tail-", "group-member")
    return sum(each.name.startswith(names) for each in threading.enumerate())


def test_idle_consumers_of_many_groups_have_no_threads_and_share_their_calls(
    reader: Database, shop: Database, items: CollectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    service, count = reader.connection.service, 60
    call = service.call_with_retry
    before = threads()
    made = [reader.consumer(items.name, group=f"{items.name}{number}", filters=[CHANGES]) for number in range(count)]
    pool = reader.consumer_threads.pool
    until(lambda: all(each.caught_up for one in made for each in one._readers.values()), "all have everything")
    assert threads() - before <= THREADS + 1 + 2, "those that read ahead, that of the heartbeats and two tails"
    beat = reader.consumer_threads.heartbeats._send
    assert beat is not None
    beats: list[int] = []

    def counted(asked: list[dict[str, Any]]) -> Sequence[Answer]:
        beats.append(len(asked))
        return beat(asked)

    def called(*given: Any, **more: Any) -> Any:
        calls.update(["call"])
        return call(*given, **more)

    monkeypatch.setattr(service, "call_with_retry", called)
    monkeypatch.setattr(reader.consumer_threads.heartbeats, "_send", counted)
    until(lambda: sum(beats) >= 3 * count, "three heartbeats of each")
    assert len(beats) <= 3 * 6
    assert calls["call"] <= len(beats) + 2 * 12, "and the tails of two PChannels, a call a second each"

    def quiet() -> bool:
        runs, before = pool.runs, sum(beats)
        until(lambda: sum(beats) >= before + count, "a heartbeat of each")
        return pool.runs == runs

    until(quiet, "nobody runs without news: a tick, now and then")
    shop.new_producer().insert(items, item_rows(1))
    for each in made:
        delivery = each.poll(timeout=10.0)
        assert delivery is not None
        each.acknowledge(delivery)
        each.close()
    assert len(reader.consumer_threads.heartbeats) == 0


def test_after_a_kill_of_the_server_all_consumers_go_on(tmp_path: Path) -> None:
    opened = opened_shop(tmp_path)
    shop = next(opened)
    try:
        items = shop.catalog.create_collection("items", ITEMS, vchannels=2)
        streams = [shop.consumer("items", group=f"s{number}", filters=[CHANGES]) for number in range(10)]
        queues = [shop.consumer("items", group=f"q{number}", mode="queue") for number in range(10)]
        record = read_record(shop.settings.log_path)
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        producer = shop.new_producer()
        producer.insert(items, item_rows(1))
        for stream in streams:
            until(lambda stream=stream: _comes(stream), "a row to each group")  # type: ignore[misc]
        for queue in queues:
            until(lambda queue=queue: _comes(queue), "a task to each queue")  # type: ignore[misc]
        for each in (*streams, *queues):
            each.close()
    finally:
        for _ in opened:
            pass


def _comes(consumer: Any) -> bool:
    try:
        found = consumer.poll(timeout=0.5)
    except MillraceError as error:
        if not error.retriable:
            raise
        return False
    if found is not None:
        consumer.acknowledge(found)
    return found is not None


def _run(program: str, folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a new data folder, and end the server that it started."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, str(folder / "data"), how]
    try:
        return subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True, check=False)
    finally:
        end_processes(folder)


PROGRAM = """
import ctypes, sys
import millrace
db = millrace.connect(sys.argv[1], create=True)
items = db.create_collection("items", {"id": "int64"}, key="id", exist_ok=True)
items.insert({"id": [1]})
consumer = items.consume(group="mail")
while consumer.poll(timeout=0.3) is not None:
    pass
if sys.argv[2] == "closed":
    db.close()
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)  # sleeps for as many seconds as the process's code, when Python is gone
sys.exit(2)
"""


@pytest.mark.parametrize("how", ["closed", "open"])
def test_a_program_that_ends_with_consumers_that_wait_does_not_crash(tmp_path: Path, how: str) -> None:
    ended = _run(PROGRAM, tmp_path, how)
    assert (ended.returncode, ended.stderr) == (2, "")


QUEUE_PROGRAM = """
import atexit, sys, time
@atexit.register  # before the client's: it is called after that
def tell():
    from millrace.rpc.link import _links
    print("calls that wait:", any(each.busy for each in list(_links)))
import millrace
db = millrace.connect(sys.argv[1], create=True)
jobs = db.create_collection("jobs", {"id": "int64"}, key="id", exist_ok=True)
queue = jobs.queue(group="workers")
if sys.argv[2] == "direct":
    jobs.insert({"id": [1]})
    queue.acknowledge(queue.poll(timeout=10))
    queue.commit()
while not db.task_session._waits:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("wait", ["news", "direct"])
def test_calls_of_a_queue_that_wait_end_with_their_program(tmp_path: Path, wait: str) -> None:
    """They wait for up to ten seconds at the server; one that returns to a Python that is gone crashes the process."""
    ended = _run(QUEUE_PROGRAM, tmp_path, wait)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "calls that wait: False\n", "")
