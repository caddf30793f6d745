"""Places of consumer groups at the server: one holder each while it calls, and a position that never goes back."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import (
    ChannelNotFound,
    GroupBusy,
    InvalidArgument,
    LogUnavailable,
    MetaUnavailable,
    ServerFull,
)
from millrace.base.metrics import Metrics
from millrace.client.consume.membership import ExclusivePositions, GroupMember, GroupShare
from millrace.client.consume.positions import FilePositions, migrate_positions
from millrace.coord.consumer_positions import MetaStorePositions, import_positions
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Mutation, RevisionEquals
from millrace.node.append import consumer_groups as module
from millrace.node.append.consumer_groups import ConsumerGroups, QueueMove
from tests.sim import group_world
from tests.waiting import until


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


Answer = Callable[..., dict[str, object]]


def asks(groups: ConsumerGroups, holder: str, group: str = "mail") -> Answer:
    return lambda **what: groups.handle({"group": group, "holder": holder, **what})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def groups(tmp_path: Path, clock: Clock) -> Iterator[ConsumerGroups]:
    made = ConsumerGroups(tmp_path, lambda: ["p0", "p1"], lease=0.05, clock=clock)
    yield made
    made.close()


def test_a_place_has_one_holder_for_as_long_as_that_one_calls(
    tmp_path: Path, groups: ConsumerGroups, clock: Clock
) -> None:
    first, second = asks(groups, "a"), asks(groups, "b")
    assert first(take="p0") == {"tick": None, "lease": 0.05}
    for other in (lambda: second(take="p0"), lambda: second(move={"p0": [None, 5]}), lambda: second(keep=["p0"])):
        with pytest.raises(GroupBusy, match="group of its own"):
            other()
    here = FilePositions(tmp_path / "coord")
    with pytest.raises(GroupBusy):
        here.lock("mail", "p0")
    clock.now += 0.04
    first(keep=["p0"])
    clock.now += 0.04
    with pytest.raises(GroupBusy):
        second(take="p0")
    clock.now += 0.02
    until(lambda: not _busy(here), "the silent holder's place is free for a consumer on the spot")
    here.close()
    assert second(take="p0")["tick"] is None
    second(leave=["p0"])
    assert first(take="p0")["tick"] is None


def _busy(here: FilePositions) -> bool:
    try:
        here.lock("mail", "p0")
    except GroupBusy:
        return True
    return False


def test_a_group_moves_from_where_its_holder_left_it_or_not_at_all(tmp_path: Path, clock: Clock) -> None:
    before = ConsumerGroups(tmp_path, lambda: ["p0", "p1"], clock=clock)
    holder = asks(before, "a")
    holder(take="p0")
    holder(take="p1")
    holder(move={"p0": [None, 5], "p1": [None, 7]})
    holder(move={"p0": [None, 5], "p1": [None, 7]})  # its answer was lost
    before.close()
    after = ConsumerGroups(tmp_path, lambda: ["p0", "p1"], clock=clock)  # the server restarted
    holder, other = asks(after, "a"), asks(after, "b")
    holder(move={"p0": [5, 6]})
    holder(leave=["p0"])
    assert other(take="p0")["tick"] == 6
    other(move={"p0": [6, 9]})
    other(leave=["p0"])
    with pytest.raises(GroupBusy, match="tick 9"):
        holder(move={"p0": [6, 8], "p1": [7, 8]})
    after.close()
    found = FilePositions(tmp_path / "coord")
    assert found.groups() == {"mail": {"p0": 9, "p1": 7}}, "all of a move or nothing"
    found.close()


def test_a_move_whose_answer_was_lost_is_asked_for_again_before_a_newer_one(groups: ConsumerGroups) -> None:
    loses = False

    def call(request: dict[str, Any]) -> dict[str, Any]:
        """What a consumer elsewhere calls: done, and once nobody is told."""
        nonlocal loses
        answer = groups.handle(request)
        if loses:
            loses = False
            raise MetaUnavailable("nobody knows")
        return answer

    elsewhere = ExclusivePositions(call)
    elsewhere.lock("mail", "p0")
    elsewhere.move("mail", {"p0": 5})
    loses = True
    with pytest.raises(MetaUnavailable):
        elsewhere.move("mail", {"p0": 6})
    elsewhere.move("mail", {"p0": 8})
    assert elsewhere.get("mail", "p0") == 8
    elsewhere.close()
    assert asks(groups, "b")(take="p0")["tick"] == 8


class Slow(MemoryStore):
    """A store that does not answer for keys of the group `slow`, until it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.away, self.asked = threading.Event(), threading.Event()

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        if self.away.is_set() and any("/slow/" in change.key for change in then):
            self.asked.set()
            raise MetaUnavailable("not there")
        return super().commit(then, when=when)


def test_groups_go_on_while_one_waits_for_the_store_and_that_one_is_waited_for_at_the_end(
    tmp_path: Path, clock: Clock
) -> None:
    store = Slow()
    groups = ConsumerGroups(
        tmp_path,
        lambda: ["p0", "p1"],
        positions=lambda: MetaStorePositions(store, seconds=60.0),
        lease=0.05,
        clock=clock,
    )
    slow, other = asks(groups, "a", "slow"), asks(groups, "b")
    asks(groups, "c", "silent")(take="p0")
    slow(take="p0")
    store.away.set()
    moving = threading.Thread(target=lambda: slow(move={"p0": [None, 5]}))
    moving.start()
    assert store.asked.wait(30.0)
    done = threading.Event()

    def work() -> None:
        other(take="p0")
        other(move={"p0": [None, 7]})
        clock.now += 0.06
        other(keep=["p0"])
        until(lambda: store.get("consumers/place/silent/p0") is None, "the place of who is silent is free")
        other(leave=["p0"])
        groups.drop({"group": "mail"})
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(30.0), "another group waits for the slow one"
    assert moving.is_alive()
    closing = threading.Thread(target=groups.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "who closes waits for what is under way"
    with pytest.raises(LogUnavailable, match="call again"):
        other(take="p0")
    store.away.clear()
    moving.join(30.0)
    closing.join(30.0)
    assert store.get("consumers/at/slow/p0") is not None


def test_what_is_held_for_consumers_elsewhere_is_bounded(
    groups: ConsumerGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LEASES", 2)
    asks(groups, "a")(take="p0")
    asks(groups, "a")(take="p1")
    with pytest.raises(ServerFull):
        asks(groups, "a", "third")(take="p0")
    asks(groups, "a")(move={"p0": [None, 1]})
    asks(groups, "a")(leave=["p0", "p1"])
    monkeypatch.setattr(module, "MAX_GROUPS", 1)
    with pytest.raises(InvalidArgument, match="1 consumer groups"):
        asks(groups, "a", "second")(take="p0")
    assert asks(groups, "a")(take="p0")["tick"] == 1


def test_a_group_is_dropped_only_while_nobody_has_it(tmp_path: Path, groups: ConsumerGroups, clock: Clock) -> None:
    holder = asks(groups, "a")
    holder(take="p0")
    holder(move={"p0": [None, 5]})
    asks(groups, "b", "other")(move={"p0": [None, 3]})
    with pytest.raises(GroupBusy, match="close it first"):
        groups.drop({"group": "mail"})
    holder(leave=["p0"])
    here = FilePositions(tmp_path / "coord")
    here.lock("mail", "p1")  # a consumer on the spot that has acknowledged nothing so far
    with pytest.raises(GroupBusy, match="reads p1"):
        groups.drop({"group": "mail"})
    assert here.get("mail", "p0") == 5, "nothing of it is forgotten"
    here.unlock("mail", "p1")
    holder(take="p1")
    clock.now += 0.06  # a silent holder's lease has run out
    for _ in range(2):
        groups.drop({"group": "mail"})
    assert here.groups() == {"other": {"p0": 3}}
    assert holder(take="p0") == {"tick": None, "lease": 0.05}, "it begins anew"
    with pytest.raises(GroupBusy):
        here.lock("mail", "p0")
    here.close()
    holder(leave=["p0"])
    groups.drop({"group": "mail"})
    with pytest.raises(GroupBusy, match="moved group"):
        holder(move={"p0": [5, 6]})
    for wrong in ({}, {"group": ""}, {"group": 5}):
        with pytest.raises(InvalidArgument, match="group"):
            groups.drop(wrong)


def test_two_never_have_one_place_though_its_lock_file_is_dropped_between(tmp_path: Path) -> None:
    """Many take, keep and drop the same place at once; who has it has it alone."""
    inside = 0
    faults: list[int] = []
    taken = [0] * 4

    def works(number: int) -> None:
        nonlocal inside
        own = FilePositions(tmp_path)
        end = Deadline.after(60.0)
        while (min(taken[1:]) if number == 0 else taken[number]) < 300 and not end.expired():
            try:
                if number == 0:
                    own.drop("mail", ["p0"])
                    continue
                own.lock("mail", "p0")
            except GroupBusy:
                continue
            inside += 1
            taken[number] += 1
            faults.extend([inside] if inside > 1 else [])
            inside -= 1
            own.unlock("mail", "p0")
        own.close()

    threads = [threading.Thread(target=works, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == []
    assert taken == [0, 300, 300, 300]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"take": 5},
        {"move": {"p0": 5}},
        {"move": {"p0": [None, -1]}},
        {"move": {"p0": ["x", 1]}},
        {"holder": ""},
        {"holder": "\udc80", "take": "p0"},
        {"group": "x" * 200, "take": "p0"},
        {"group": "ü" * 40, "take": "p0"},
    ],
)
def test_what_is_no_call_is_refused(groups: ConsumerGroups, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        groups.handle({"group": "mail", "holder": "a", **wrong})
    with pytest.raises(ChannelNotFound):
        asks(groups, "a")(take="../p0")


LANES = [f"p{number % 2}_7v{number}" for number in range(8)]


def member_of(groups: ConsumerGroups, name: str, clock: Clock, lanes: Sequence[str] = LANES) -> GroupMember:
    return GroupMember(groups.handle, "mail", lanes, name=name, clock=clock)


def followed(found: GroupShare) -> dict[str, int]:
    return {lane: its.claim for lane, its in found.held.items()}


def settled(members: Sequence[GroupMember]) -> list[dict[str, int]]:
    """The claims of each once the lanes are divided."""
    claims: list[dict[str, int]] = [{} for _ in members]
    for _ in range(3):
        for number, each in enumerate(members):
            found = each.sync(claims[number])
            each.release(found.held.keys() - found.share)
            claims[number] = {lane: claim for lane, claim in followed(found).items() if lane in found.share}
    return claims


def test_a_member_that_was_away_moves_nothing_even_if_it_has_the_lane_again(tmp_path: Path, clock: Clock) -> None:
    groups = ConsumerGroups(tmp_path, lambda: ["p0", "p1"], clock=clock)
    member = member_of(groups, "a", clock, LANES[:1])
    stale = member_of(groups, "a", clock, LANES[:1])  # what a thread of it still believes
    member.sync({})
    stale.sync({})
    member.move({LANES[0]: 5})
    clock.now += 20.0
    groups.release_silent()
    assert groups.describe()["groups"][0]["members"] == []
    with pytest.raises(GroupBusy, match="silent for longer than its lease"):
        stale.move({LANES[0]: 6})
    groups.reset({"group": "mail", "ticks": {LANES[0]: 2}})
    found = member.sync({})
    assert found.held[LANES[0]].tick == 2
    with pytest.raises(GroupBusy, match="silent for longer than its lease"):
        stale.move({LANES[0]: 6})
    member.move({LANES[0]: 3})
    with pytest.raises(GroupBusy, match="tick 3"):
        member.move({LANES[0]: 1})
    groups.close()


class Counted(MemoryStore):
    """A store that counts commits that move positions."""

    moves = 0

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        self.moves += any(change.key.startswith("consumers/at/") for change in then)
        return super().commit(then, when=when)


def test_the_writes_of_a_group_do_not_grow_with_its_members(tmp_path: Path, clock: Clock) -> None:
    store = Counted(clock)
    positions = MetaStorePositions(store, seconds=60.0)
    metrics = Metrics()
    groups = ConsumerGroups(tmp_path, lambda: ["p0", "p1"], positions=lambda: positions, clock=clock, metrics=metrics)
    members = [member_of(groups, f"m{number}", clock) for number in range(8)]
    claims = settled(members)
    assert [len(each) for each in claims] == [1] * 8
    assert metrics.registry.get_sample_value("millrace_consumer_group_members", {"group": "mail"}) == 8
    groups._flusher = threading.current_thread()  # nobody else writes
    for tick in range(1, 4):
        for number, each in enumerate(members):
            each.move(dict.fromkeys(claims[number], tick), later=True)
        groups.flush()
    assert store.moves == 3, "one write an interval"
    members[0].move(dict.fromkeys(claims[0], 5))
    assert store.moves == 4, "a commit is written at once"
    assert metrics.registry.get_sample_value("millrace_consumer_position_commits_total") == 4
    members[1].move(dict.fromkeys(claims[1], 7), later=True)
    members[1].release(claims[1])
    assert positions.groups()["mail"] == {
        lane: 5 if lane in claims[0] else 7 if lane in claims[1] else 3 for lane in LANES
    }, "all is written before a lane changes hands"
    groups._flusher = None
    groups.close()


def test_members_keep_their_lanes_when_the_server_is_killed(tmp_path: Path, clock: Clock) -> None:
    before = ConsumerGroups(tmp_path, lambda: ["p0", "p1"], clock=clock)
    members = [member_of(before, name, clock) for name in ("a", "b")]
    claims = settled(members)
    assert [len(each) for each in claims] == [4, 4]
    before._open().close()  # as the end of a process releases its locks
    after = ConsumerGroups(tmp_path, lambda: ["p0", "p1"], clock=clock)
    for each in members:
        each._call = after.handle
    assert followed(members[0].sync(claims[0])) == claims[0], "none of b, who was silent so far"
    members[1].move(dict.fromkeys(claims[1], 9))
    assert followed(members[1].sync(claims[1])) == claims[1], "the same claims"
    after.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"sync": {}},
        {"sync": {"lanes": ["p0_7v0"], "held": ["p0_7v0"]}},
        {"sync": {"lanes": [5], "held": {}}},
        {"sync": {"lanes": ["p0_7v0"], "held": {}, "lease": 0.1}},
        {"sync": {"lanes": ["p0_7v0"], "held": {}, "lease": "long"}},
        {"sync": {"lanes": ["p0_7v0"], "held": {}, "queue": True, "order": "x" * 100_000}},
    ],
)
def test_what_is_no_member_is_refused(groups: ConsumerGroups, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        groups.handle({"group": "mail", "holder": "a", **wrong})
    with pytest.raises(ChannelNotFound):
        asks(groups, "a")(sync={"lanes": ["p9_7v0"], "held": {}})
    for ticks in (None, {}, {"p0_7v0": -1}, {"p0_7v0": "x"}):
        with pytest.raises(InvalidArgument):
            groups.reset({"group": "mail", "ticks": ticks})


def test_a_member_that_leaves_gives_back_lanes_of_an_answer_that_it_never_got(tmp_path: Path, clock: Clock) -> None:
    groups = ConsumerGroups(tmp_path, lambda: ["p0", "p1"], lease=10.0, clock=clock)
    one, two = asks(groups, "one"), asks(groups, "two")
    one(sync={"lanes": ["p0", "p1"], "held": {}})
    one(leave=[], member=True)
    assert two(sync={"lanes": ["p0", "p1"], "held": {}})["held"].keys() == {"p0", "p1"}
    groups.close()


def test_refused_calls_leave_nothing_in_memory(tmp_path: Path, clock: Clock) -> None:
    groups = ConsumerGroups(tmp_path, lambda: ["p0"], lease=10.0, clock=clock, metrics=(metrics := Metrics()))
    for number in range(20):
        answer = asks(groups, "one", f"group-{number}")
        with pytest.raises(GroupBusy):
            answer(move={"p0": [1, 5]}, strict=True)
        with pytest.raises(ChannelNotFound):
            answer(sync={"lanes": ["nowhere"], "held": {}})
    with pytest.raises(InvalidArgument, match="held"):
        asks(groups, "one")(sync={"lanes": ["p0"], "held": {f"p0_1v{each}": 1 for each in range(9)}})
    assert not groups._groups
    member = asks(groups, "one", "some")
    member(sync={"lanes": ["p0"], "held": {}})
    assert b'consumer_group_members{group="some"}' in metrics.render()
    member(leave=["p0"], member=True)
    assert b'consumer_group_members{group="some"}' not in metrics.render(), "a group that is gone has no series"
    groups.close()


@pytest.mark.parametrize("where", ["file", "meta store"])
def test_states_of_a_queue_move_with_its_position_and_end_with_it(tmp_path: Path, where: str) -> None:
    made = FilePositions(tmp_path) if where == "file" else MetaStorePositions(MemoryStore(Clock()), seconds=5.0)
    made.lock("work", "p0_1v0")
    made.move("work", {"p0_1v0": 5}, {"p0_1v0": b"bits"})
    made.move("work", {"p0_1v1": 6}, {"p0_1v1": b"more"})
    assert made.queue_states("work") == {"p0_1v0": b"bits", "p0_1v1": b"more"}
    assert made.queue_states("work", ["p0_1v0"]) == {"p0_1v0": b"bits"}
    assert made.queues() == {"work"}
    assert made.locked_until("work", "p0_1v0") > -1 > made.locked_until("work", "elsewhere")
    made.unlock("work", "p0_1v0")
    made.place("work", {"p0_1v0": 3})
    assert "p0_1v0" not in made.queue_states("work"), "a reset forgets what was done"
    made.unlock("work", "p0_1v1")
    made.place("work", {"p0_1v0": 2, "p0_1v1": None}, {"p0_1v0": b"new"})
    assert made.queue_states("work") == {"p0_1v0": b"new"}
    made.drop("work", ["p0"])
    assert made.queues() == set()
    made.close()


def test_of_two_servers_at_one_position_only_the_owner_writes_a_queues_state() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    old, new = (MetaStorePositions(store, seconds=5.0, patience=0.0, clock=clock) for _ in range(2))
    for each in (old, new):
        each._keeping = threading.Thread()  # nobody renews
    old.lock("work", "p0_1v0", holder="one")
    old.move("work", {"p0_1v0": 5}, {"p0_1v0": b"a"})
    clock.now += 6.0
    new.lock("work", "p0_1v0", holder="two")
    new.move("work", {"p0_1v0": 5}, {"p0_1v0": b"ab"})
    new.unlock("work", "p0_1v0")
    with pytest.raises(GroupBusy):
        old.move("work", {"p0_1v0": 5}, {"p0_1v0": b"ac"})
    assert new.queue_states("work") == {"p0_1v0": b"ab"}


def test_a_file_that_moves_into_a_meta_store_brings_the_states_of_queues(tmp_path: Path) -> None:
    file = FilePositions(tmp_path)
    file.move("work", {"p0_1v0": 5}, {"p0_1v0": b"bits"})
    file.close()
    store = MemoryStore(Clock())
    migrate_positions(tmp_path, partial(import_positions, store))
    found = MetaStorePositions(store, seconds=5.0)
    assert found.groups() == {"work": {"p0_1v0": 5}}
    assert found.queue_states("work") == {"p0_1v0": b"bits"}


class TwoServers:
    """Two servers on a meta store, each of which may be cut off it."""

    def __init__(self, *lanes: str) -> None:
        self.clock = group_world.Hand()
        store = group_world.Store(self.clock, random.Random(1))
        self.positions = [group_world.Positions(store) for _ in range(2)]
        self.servers = [
            group_world.Server(Path("unused"), lambda: ["dml_0"], positions=lambda each=each: each, clock=self.clock)  # type: ignore[misc]
            for each in self.positions
        ]
        self._lanes = lanes or ("dml_0_7v0",)

    def member(self, name: str, server: int, *, queue: bool = False) -> GroupMember:
        return GroupMember(self.servers[server].handle, "mail", self._lanes, name=name, queue=queue, clock=self.clock)

    def stands(self) -> dict[str, int]:
        found: dict[str, int] = self.servers[1].describe()["groups"][0]["positions"]
        return found


def test_a_queue_whose_claim_ended_does_not_write_its_old_state_under_a_later_claim() -> None:
    """The answer to its next claim was lost: the store names it, and another server dispatched in between."""
    two, lane = TwoServers(), "dml_0_7v0"
    first, second = (two.member(f"queue-{number}", number, queue=True) for number in range(2))
    claims = followed(first.sync({}))
    assert two.servers[0].move_queue("mail", "queue-0", {lane: QueueMove(claims[lane], 1, b"old")}) == set()
    two.positions[0].link.cut = True
    two.clock.now += group_world.SESSION + group_world.LEASE
    two.servers[0].release_silent()
    claim = followed(second.sync({}))[lane]
    assert two.servers[1].move_queue("mail", "queue-1", {lane: QueueMove(claim, 1, b"new")}) == set()
    second.leave()
    two.positions[0].link.cut = False
    two.positions[0].renew()
    two.positions[0].lock("mail", lane, holder="queue-0")
    assert two.servers[0].move_queue("mail", "queue-0", {lane: QueueMove(claims[lane], 1, b"older")}) == {lane}
    assert two.servers[1].queue_states("mail", [lane]) == {lane: b"new"}
    found = first.sync(claims).held[lane]
    assert (found.claim != claims[lane], found.tick) == (True, 1)
    assert two.servers[0].move_queue("mail", "queue-0", {lane: QueueMove(found.claim, 2, b"next")}) == set()


def test_a_lane_that_another_server_had_is_not_kept_by_a_move_that_comes_too_late() -> None:
    """To see that it comes too late, the move acquires the claim again, under a lease that lives."""
    two, lane = TwoServers(), "dml_0_7v0"
    first = two.member("first", 0)
    assert lane in first.sync({}).held
    first.move({lane: 5}, later=True)
    two.positions[0].link.cut = True
    two.clock.now += group_world.SESSION + 1
    second = two.member("second", 1)
    assert lane in second.sync({}).held
    second.move({lane: 7})
    second.leave()
    two.positions[0].link.cut = False
    two.positions[0].renew()
    two.servers[0].flush()
    assert two.stands() == {lane: 7}
    for _ in range(30):  # the first server lives, and its member does not come back
        two.clock.now += 1.0
        for each, server in zip(two.positions, two.servers, strict=True):
            each.renew()
            server.release_silent()
    assert lane in two.member("third", 1).sync({}).held


@pytest.mark.parametrize("released", [True, False])
def test_a_member_that_missed_an_answer_gets_its_lane_anew_though_the_claim_looks_like_its_own(released: bool) -> None:
    """Another member had the lane in between; with its old claim it could never move the lane, nor give it up."""
    two, lane = TwoServers(), "dml_0_7v0"
    first = two.member("first", 0)
    claims = followed(first.sync({}))
    first.move({lane: 2})
    two.positions[0].link.cut = True
    two.clock.now += group_world.SESSION + 1
    if released:
        two.clock.now += group_world.LEASE
    two.servers[0].release_silent()
    assert bool(two.servers[0]._places) is not released
    second = two.member("second", 1)
    assert lane in second.sync({}).held
    second.move({lane: 5})
    second.leave()
    assert lane in two.member("first", 1).sync(claims).held, "an answer that the first never gets"
    two.positions[0].link.cut = False
    two.positions[0].renew()
    assert followed(first.sync(claims)) == claims, "the store says that the first has the lane"
    with pytest.raises(GroupBusy, match="tick 5"):
        first.move({lane: 3})
    found = first.sync(claims).held[lane]
    assert (found.claim != claims[lane], found.tick) == (True, 5)
    first.move({lane: 6})
    assert two.stands() == {lane: 6}


def test_a_move_that_came_too_late_is_not_tried_again_though_the_store_fails_at_the_next_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under a new claim it would take the group back."""
    lanes = ["dml_0_7v0", "dml_0_7v1"]
    two = TwoServers(*lanes)
    first = two.member("first", 0)
    assert first.sync({}).held.keys() == set(lanes)
    first.move(dict.fromkeys(lanes, 5), later=True)
    two.positions[0].link.cut = True
    two.clock.now += group_world.SESSION + 1
    second = two.member("second", 1)
    assert second.sync({}).held.keys() == set(lanes)
    second.move(dict.fromkeys(lanes, 7))
    second.leave()
    two.positions[0].link.cut = False
    two.positions[0].renew()
    move, tried = two.positions[0].move, list[dict[str, int]]()

    def fails(group: str, ticks: dict[str, int]) -> None:
        tried.append(ticks)
        if ticks == {lanes[1]: 5} and len(tried) == 3:
            raise MetaUnavailable("not there")
        move(group, ticks)

    monkeypatch.setattr(two.positions[0], "move", fails)
    for _ in range(3):
        two.servers[0].flush()
        assert two.stands() == dict.fromkeys(lanes, 7)
    assert tried[:3] == [dict.fromkeys(lanes, 5), {lanes[0]: 5}, {lanes[1]: 5}]
