"""A query starts although a Python worker came up too late for Spark to plan with it.

What else fails is raised at once.
"""

from __future__ import annotations

from typing import Any

import pytest

from millrace.runtime.queries import start_with_retries

LATE = "[PYTHON_DATA_SOURCE_ERROR] Failed to plan: Python worker failed to connect back."


class Starts:
    """Fails as often as it is told, then starts."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "a query"


def test_a_worker_that_came_up_too_late_is_asked_for_again() -> None:
    start = Starts(RuntimeError(LATE), RuntimeError(LATE))
    assert start_with_retries(start) == "a query"
    assert start.calls == 3


def test_a_start_that_never_succeeds_ends_with_its_error() -> None:
    start = Starts(*[RuntimeError(LATE)] * 100)
    with pytest.raises(RuntimeError, match="connect back"):
        start_with_retries(start)
    assert 1 < start.calls < 10


def test_any_other_error_is_raised_at_once() -> None:
    start = Starts(RuntimeError("no such table"))
    with pytest.raises(RuntimeError, match="no such table"):
        start_with_retries(start)
    assert start.calls == 1
