"""Calls of other packages' code: each has a limited time, and those that never return a limited number of threads."""

from __future__ import annotations

import threading

import pytest

from millrace.base.bounded_call import BoundedCalls
from tests.waiting import until


def test_a_call_returns_its_result_and_raises_its_error() -> None:
    calls = BoundedCalls("test", most=1)
    assert calls.run(lambda: 7, 60.0) == 7
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, 60.0)
    assert calls.run(lambda: 8, 60.0) == 8, "a call that returned takes no place"


def test_calls_that_do_not_return_take_a_bounded_number_of_threads() -> None:
    gate, begun = threading.Event(), 0

    def hang() -> None:
        nonlocal begun
        begun += 1
        gate.wait(60)

    calls = BoundedCalls("bounded", most=2)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            calls.run(hang, 0.02)
    until(lambda: begun == 2, "both run")
    gate.set()
    until(lambda: not any(each.name == "bounded" for each in threading.enumerate()), "they return")
    assert calls.run(lambda: 7, 60.0) == 7


def test_a_call_with_a_key_that_is_late_is_waited_for_and_not_begun_again() -> None:
    gate, begun = threading.Event(), 0

    def slow() -> int:
        nonlocal begun
        begun += 1
        gate.wait(60)
        return begun

    calls = BoundedCalls("keyed", most=2)
    with pytest.raises(TimeoutError, match="still runs"):
        calls.run(slow, 0.02, key=1)
    with pytest.raises(TimeoutError):
        calls.run(slow, 0.02, key=1)
    gate.set()
    assert calls.run(slow, 60.0, key=1) == 1
    assert calls.run(slow, 60.0, key=1) == 2, "after its end, a new one"
