"""Places of consumer groups at the server: one holder each while it calls, and a position that never goes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
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
from millrace.client.consume.membership import ExclusivePositions
from millrace.client.consume.positions import FilePositions
from millrace.coord.consumer_positions import MetaStorePositions
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Mutation, RevisionEquals
from millrace.node.append import consumer_groups as module
from millrace.node.append.consumer_groups import ConsumerGroups
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
    assert not list(tmp_path.glob("coord/group-mail-*.lock"))
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
        {"group": "x" * 200, "take": "p0"},
        {"group": "ü" * 40, "take": "p0"},
    ],
)
def test_what_is_no_call_is_refused(groups: ConsumerGroups, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        groups.handle({"group": "mail", "holder": "a", **wrong})
    with pytest.raises(ChannelNotFound):
        asks(groups, "a")(take="../p0")
