"""The window of a work queue's VChannel: a task comes until it is done, to one holder at a time, across restarts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import UnsupportedVersion
from millrace.message.keys import key_hashes
from millrace.node.append.task_window import (
    DEFAULT_GRACE,
    KEY_BYTES,
    PROMISE_SECONDS,
    TASK_BYTES,
    TaskNames,
    TaskWindow,
)

SIZE = 40
Name = tuple[int, int]


def names(*each: tuple[int, int, int]) -> TaskNames:
    """Deliveries of (tick, ordinal, count)."""
    columns = (
        [np.array(column, np.int64) for column in zip(*each, strict=True)] if each else [np.zeros(0, np.int64)] * 3
    )
    return TaskNames(*columns)


def batch(first: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": pa.array(range(first, first + count), pa.int64())})


def add(window: TaskWindow, tick: int, count: int, **options: object) -> None:
    window.add(np.full(count, tick, np.int64), batch(tick * 100, count), **options)  # type: ignore[arg-type]


def taken(
    window: TaskWindow, now: float = 0.0, *, holder: int = 1, most: int = 100, lease: float = 10.0
) -> list[tuple[int, int, int]]:
    places, _ = window.take(now, holder=holder, lease=lease, most=most, max_bytes=1 << 20)
    found = window.names(places)
    rows = [int(each) for part, _ in window.rows(places) for each in part["id"].to_pylist()]
    assert rows == [tick * 100 + ordinal for tick, ordinal in zip(found.ticks, found.ordinals, strict=True)]
    return list(zip(found.ticks.tolist(), found.ordinals.tolist(), found.deliveries.tolist(), strict=True))


def test_a_task_is_one_holders_until_its_lease_is_over_and_then_comes_again() -> None:
    window = TaskWindow(5)
    add(window, 6, 2)
    assert taken(window, most=1) == [(6, 0, 1)]
    assert taken(window, holder=2) == [(6, 1, 1)]
    assert taken(window, 9.9, holder=3) == []
    window.expire(10.0)
    assert taken(window, 10.0, holder=3, most=1) == [(6, 0, 2)]
    assert window.acknowledge(names((6, 0, 1)), 1).lost == [0], "it is another's"
    assert window.acknowledge(names((6, 0, 2)), 3).lost == []
    assert window.acknowledge(names((6, 1, 1)), 2).lost == [], "late, and nobody else has it"
    assert window.position == (6, 0)


def test_the_position_stays_within_a_unit_until_the_unit_is_done() -> None:
    window = TaskWindow(0)
    add(window, 7, 3)
    first, second, third = taken(window)
    window.acknowledge(names(first, third), 1)
    assert window.position == (0, 1)
    window.acknowledge(names(second), 1)
    assert window.position == (7, 0)
    window.confirm(9)
    assert window.position == (9, 0)


def test_a_released_task_comes_after_its_delay_and_an_unused_delivery_does_not_count() -> None:
    window = TaskWindow(0)
    add(window, 1, 2)
    first, second = taken(window)
    window.release(names(first), 1, at=5.0)
    window.release(names(second), 1, at=0.0, unused=True)
    assert taken(window, 1.0, holder=2) == [(1, 1, 1)]
    assert window.next_time(1.0) == 5.0
    assert taken(window, 5.0, holder=2) == [(1, 0, 2)]


def test_renewal_keeps_a_task_and_fails_once_it_is_anothers() -> None:
    window = TaskWindow(0)
    add(window, 1, 1)
    [task] = taken(window)
    assert window.renew(names(task), 1, 20.0).lost == []
    assert window.expire(15.0) == 0
    window.expire(20.0)
    taken(window, 20.0, holder=2)
    assert window.renew(names(task), 1, 30.0).lost == [0]


def test_a_full_window_takes_no_more_and_its_state_has_a_bound() -> None:
    window = TaskWindow(0)
    chance = random.Random(1)
    for tick in range(1, window.size // 64 + 1):
        add(window, tick, 64)
    assert window.room == 0
    with pytest.raises(AssertionError, match="full"):
        add(window, 1 << 20, 1)
    for _ in range(3):
        tasks = taken(window, most=window.size)
        window.release(names(*(task for task in tasks if chance.random() < 0.8)), 1, at=0.0)
    window.acknowledge(names(*(task for task in tasks[1:] if chance.random() < 0.5)), 1)
    assert window.room == 0, "the first is not done"
    assert len(window.encoded()) < window.size * 9 // 8 + 200


def test_memory_is_freed_with_what_is_done_and_keys_of_the_past_are_forgotten() -> None:
    window = TaskWindow(0, ordered=True, size=SIZE)
    for tick in range(1, 400):
        add(window, tick, SIZE, keys=np.arange(tick * SIZE, tick * SIZE + SIZE, dtype=np.uint64))
        assert window.bytes <= SIZE * (8 + TASK_BYTES + KEY_BYTES)
        window.acknowledge(names(*taken(window)), 1)
    assert window.bytes == 0
    assert len(window._last) <= 3 * SIZE
    assert len(window._ended) <= 1


def test_after_a_change_of_owner_what_may_be_in_hands_waits_for_a_lease_and_the_rest_comes_at_once() -> None:
    window = TaskWindow(0, size=4096)
    for tick in range(1, 31):
        add(window, tick, 100)
    given = taken(window, most=50, lease=20.0)
    window.acknowledge(names(given[3]), 1)
    after = TaskWindow(window.position.tick, window.encoded(), now=100.0, size=4096)
    for tick in range(1, 31):
        add(after, tick, 100)
    fresh = taken(after, 100.0, holder=7, most=4096)
    assert not {each[:2] for each in fresh} & {each[:2] for each in given}
    assert len(fresh) >= 3000 - 50 - 1024
    assert after.acknowledge(names(given[0]), 9).lost == [], "its holder has it still"
    assert after.renew(names(given[1]), 9, 130.0).lost == []
    after.expire(120.0)
    again = taken(after, 120.0, holder=7, most=4096)
    assert {given[2][:2], given[49][:2]} <= {each[:2] for each in again}
    assert not {given[0][:2], given[1][:2], given[3][:2]} & {each[:2] for each in again}
    assert all(count == 2 for _, _, count in again)


def test_what_is_not_read_yet_is_told_apart_from_what_is_lost() -> None:
    window = TaskWindow(0)
    add(window, 1, 2)
    add(window, 2, 2, last=False)
    found = window.acknowledge(names((1, 0, 1), (2, 1, 1), (2, 2, 1), (3, 0, 1)), 1)
    assert (found.lost, found.unread) == ([0, 1], [2, 3])


def test_a_unit_that_is_read_twice_after_an_error_has_its_tasks_once() -> None:
    window = TaskWindow(0)
    add(window, 1, 1)
    add(window, 2, 3, last=False)
    window.acknowledge(names(*taken(window, most=2)), 1)
    window.forget_open_unit()
    assert window.read_tick == 1
    assert window.position == (1, 1)
    window.add(np.full(5, 2, np.int64), batch(200, 5))
    assert [task[:2] for task in taken(window)] == [(2, 1), (2, 2), (2, 3), (2, 4)]
    window.acknowledge(names(*((2, ordinal, 1) for ordinal in range(1, 5))), 1)
    assert window.position == (2, 0)


def test_a_state_of_a_newer_build_is_refused() -> None:
    newer = bytearray(TaskWindow(0).encoded())
    newer[0] = 99
    with pytest.raises(UnsupportedVersion, match="use a newer build"):
        TaskWindow(0, bytes(newer))


class Model:
    """A log of units, an owner's window that restarts, and holders, checked against what may happen."""

    def __init__(self, seed: int, *, ordered: bool) -> None:
        self.chance = random.Random(seed)
        self.ordered = ordered
        self.now = 0.0
        self.units: list[tuple[int, int]] = []
        self.done: set[Name] = set()
        """Acknowledged, and durable."""
        self.applied: set[Name] = set()
        """Acknowledged, and perhaps not durable."""
        self.held: dict[Name, tuple[int, int, float]] = {}
        """The holder, count and end of the newest delivery."""
        self.counts: dict[Name, int] = {}
        self.saved: tuple[int, bytes] | None = None
        self.window = TaskWindow(0, ordered=ordered, size=SIZE)
        self.read: Iterator[tuple[int, int, int, bool]] = iter(())
        self.save()

    def key(self, name: Name) -> int:
        return (name[0] * 7 + name[1]) % 5

    def save(self) -> None:
        self.saved = (self.window.position.tick, self.window.encoded())
        self.done |= self.applied

    def more(self) -> None:
        """Read on, in pieces that end anywhere."""
        tick = self.window.read_tick
        following = next((unit for unit in self.units if unit[0] > tick), None)
        if following is None:
            self.window.confirm(max(tick, self.units[-1][0] if self.units else 0) + 1)
            self.units.append((self.window.read_tick + self.chance.randint(1, 3), self.chance.randint(1, 12)))
            return
        tick, count = following
        first = self.window._open
        rows = min(count - first, self.window.room, self.chance.randint(1, 12))
        if rows > 0:
            keys = key_hashes(pa.array([self.key((tick, first + each)) for each in range(rows)], pa.int64()))
            self.window.add(
                np.full(rows, tick, np.int64), batch(tick * 100 + first, rows), last=first + rows == count,
                keys=keys if self.ordered else None,
            )  # fmt: skip

    def take(self) -> None:
        holder = self.chance.randint(1, 3)
        places, must = self.window.take(
            self.now,
            holder=holder,
            lease=10.0,
            most=self.chance.randint(1, 9),
            max_bytes=self.chance.choice([8, 1 << 20]),
        )
        if must or self.ordered:
            self.save()
        found = self.window.names(places)
        for tick, ordinal, count in zip(
            found.ticks.tolist(), found.ordinals.tolist(), found.deliveries.tolist(), strict=True
        ):
            name = (tick, ordinal)
            assert name not in self.done, f"{name} is done and comes again"
            before = self.held.get(name)
            assert before is None or before[2] <= self.now, f"{name} has two holders"
            assert count > self.counts.get(name, 0), f"{name}: a delivery has the count of an earlier one"
            if self.ordered:
                for other, (_, _, until) in self.held.items():
                    assert other == name or self.key(other) != self.key(name) or until <= self.now, f"{other}, {name}"
                earlier = [each for each in self.names() if each < name and self.key(each) == self.key(name)]
                assert set(earlier) <= self.done, f"{name} comes before one of its key"
            self.counts[name] = count
            self.held[name] = (holder, count, self.now + 10.0)

    def names(self) -> list[Name]:
        return [(tick, ordinal) for tick, count in self.units for ordinal in range(count)]

    def settle(self) -> None:
        for name, (holder, count, _) in list(self.held.items()):
            if self.chance.random() < 0.5:
                continue
            what = self.chance.choice(["ack", "ack", "ack", "renew", "release", "forget"])
            one = names((*name, count))
            if what == "ack":
                outcomes = self.window.acknowledge(one, holder)
                assert not outcomes.lost, f"{name} is this holder's"
                if not outcomes.unread:
                    self.applied.add(name)
                    del self.held[name]
            elif what == "renew" and not (found := self.window.renew(one, holder, self.now + 10.0)).unread:
                assert not found.lost
                self.held[name] = (holder, count, max(self.held[name][2], self.now + 10.0))
            elif what == "release" and not self.window.release(one, holder, at=self.now).unread:
                del self.held[name]
        if self.chance.random() < 0.7:
            self.save()

    def restart(self) -> None:
        assert self.saved is not None
        self.applied &= self.done
        self.window = TaskWindow(*self.saved, now=self.now, ordered=self.ordered, size=SIZE)

    def time(self) -> None:
        self.now += self.chance.choice([0.5, 2.0, 6.0])
        self.window.expire(self.now)

    def error(self) -> None:
        self.window.forget_open_unit()

    def play(self, steps: int) -> None:
        kinds = {"more": 5, "take": 6, "settle": 5, "time": 2, "restart": 1, "error": 1}
        for _ in range(steps):
            getattr(self, self.chance.choices(list(kinds), list(kinds.values()))[0])()
            assert self.window.room >= 0
            position = self.window.position
            everything = self.names()
            assert self.done | self.applied >= {n for n in everything if n[0] <= position.tick}, (
                "a task was passed over"
            )
        last = self.units[-1][0] if self.units else 0
        for _ in range(400):
            if self.window.position.tick >= last:
                break
            self.now += 11.0
            self.window.expire(self.now)
            self.more()
            self.take()
            for name, (holder, count, _) in list(self.held.items()):
                if not self.window.acknowledge(names((*name, count)), holder).unread:
                    self.applied.add(name)
                    del self.held[name]
            self.save()
        assert self.done >= {n for n in self.names() if n[0] <= last}, "not everything was done in the end"


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30), st.booleans())
def test_nothing_done_comes_again_nothing_is_lost_and_a_task_has_one_holder(seed: int, ordered: bool) -> None:
    Model(seed, ordered=ordered).play(120)


def test_the_grace_of_a_queue_that_never_gave_a_lease_is_bounded() -> None:
    window = TaskWindow(0, TaskWindow(0).encoded(), now=50.0)
    assert window._grace == 50.0 + DEFAULT_GRACE


def test_a_long_lease_that_is_over_makes_no_later_restart_wait_so_long() -> None:
    window = TaskWindow(0)
    add(window, 1, 3)
    [first] = taken(window, most=1, lease=3600.0)
    assert window.lease == 3600.0
    now = PROMISE_SECONDS + 1.0
    assert taken(window, now, most=1, lease=5.0), "the long lease runs"
    assert window.lease >= 3600.0 - now, "an owner that starts now must wait for it"
    window.acknowledge(names(first), 1)
    for turn in (2, 3):
        window.promise(turn * now, 5.0)
    assert window.lease == 5.0
    after = TaskWindow(window.position.tick, window.encoded(), now=1000.0)
    assert after._grace == 1005.0


def test_tasks_of_a_consumer_that_is_gone_keep_their_count() -> None:
    window = TaskWindow(0)
    add(window, 1, 1)
    taken(window)
    window.free(1, 0.0)
    assert taken(window, holder=2) == [(1, 0, 2)]
