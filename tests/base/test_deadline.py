"""A deadline is one moment for all the steps of a wait."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import InvalidArgument


@dataclass
class Time:
    """A clock that sleeping alone moves."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def deadline(self, seconds: float) -> Deadline:
        return Deadline.after(seconds, clock=self.clock, sleep=self.sleep)


def test_it_is_over_at_its_moment_and_not_before() -> None:
    time = Time()
    deadline = time.deadline(2.0)
    assert (deadline.remaining(), deadline.expired()) == (2.0, False)
    time.now += 1.5
    assert (deadline.remaining(), deadline.expired()) == (0.5, False)
    time.now += 0.5
    assert (deadline.remaining(), deadline.expired()) == (0.0, True)
    time.now += 7.0
    assert (deadline.remaining(), deadline.expired()) == (0.0, True)


@pytest.mark.parametrize("seconds", [0.0, -3.0])
def test_one_without_time_is_over_at_once(seconds: float) -> None:
    assert Time().deadline(seconds).expired()


def test_what_is_left_is_bounded_on_both_sides() -> None:
    time = Time()
    deadline = time.deadline(5.0)
    assert deadline.remaining(maximum=0.1) == 0.1
    time.now += 9.0
    assert deadline.remaining(minimum=0.05, maximum=0.1) == 0.05


def test_a_wait_without_an_end_ends_when_it_is_told() -> None:
    told = threading.Event()
    threading.Timer(0.05, told.set).start()
    deadline = Deadline.never()
    assert not deadline.expired()
    assert deadline.remaining() == math.inf
    assert deadline.wait(told)


def test_a_wait_that_nobody_ends_is_over_at_the_deadline() -> None:
    deadline = Deadline.after(0.02)
    assert not deadline.wait(threading.Event())
    assert deadline.expired()
    condition = threading.Condition()
    with condition:
        assert not deadline.wait(condition)


def test_a_wait_takes_no_more_than_it_was_allowed_at_a_time() -> None:
    deadline = Deadline.after(60.0)
    assert not deadline.wait(threading.Event(), maximum=0.01)
    assert not deadline.expired()


def test_a_pause_is_cut_at_the_deadline_and_there_is_none_behind_it() -> None:
    time = Time()
    deadline = time.deadline(2.5)
    assert [deadline.pause(1.0) for _ in range(4)] == [True, True, True, False]
    assert time.slept == [1.0, 1.0, 0.5]


@given(seen_at=st.integers(1, 12), seconds=st.integers(0, 10))
def test_until_looks_first_and_a_last_time_at_the_deadline(seen_at: int, seconds: int) -> None:
    time = Time()
    looks: list[float] = []

    def look() -> str:
        looks.append(time.now)
        return "there" if len(looks) == seen_at else ""

    found = poll_until(look, time.deadline(seconds), interval=1.0)
    assert found == ("there" if seen_at <= seconds + 1 else "")
    assert looks == [100.0 + turn for turn in range(min(seen_at, seconds + 1))]


def test_a_wait_of_no_number_is_refused_instead_of_lasting_for_ever() -> None:
    with pytest.raises(InvalidArgument, match="nan"):
        Deadline.after(math.nan)
