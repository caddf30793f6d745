"""A query starts although a Python worker came up too late for Spark to plan with it.

What else fails is raised at once.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from millrace.runtime.queries import await_queries, start_with_retries

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


class Query:
    """A streaming query that ended late, starts, or runs."""

    lastProgress = None

    def __init__(self, state: str) -> None:
        self.state = state

    @property
    def isActive(self) -> bool:
        return self.state in ("starts", "runs")

    @property
    def status(self) -> dict[str, Any]:
        starts = self.state == "starts"
        return {
            "message": "Initializing sources" if starts else "Waiting for data",
            "isTriggerActive": False,
            "isDataAvailable": False,
        }

    def exception(self) -> Exception | None:
        return RuntimeError(LATE) if self.state == "late" else None

    def stop(self) -> None:
        self.state = "stopped"

    def awaitTermination(self) -> None:
        if self.state == "late":
            raise RuntimeError(LATE)


def test_queries_whose_workers_came_up_too_late_start_again_one_after_another() -> None:
    stop, again, polls = threading.Event(), list[int](), 0
    running: list[Query] = []

    def restart(place: int) -> Any:
        again.append(place)
        running.append(Query("late" if len(again) == 1 else "starts"))
        return running[-1]

    def look(queries: Any) -> None:
        nonlocal polls
        polls += 1
        starting = [each for each in queries if each.state == "starts"]
        assert len(starting) <= 1, "their workers would delay each other"
        if polls % 3 == 0:
            for each in starting:
                each.state = "runs"

    await_queries(
        [Query("late"), Query("late")], stop=stop, poll=0.001, heartbeat=look, restart=restart, on_started=stop.set
    )  # type: ignore[arg-type]
    assert sorted(again) == [0, 0, 1]
    assert [each.state for each in running] == ["late", "stopped", "stopped"]


def test_a_query_whose_worker_never_comes_up_in_time_fails_the_job() -> None:
    again: list[int] = []

    def restart(place: int) -> Any:
        again.append(place)
        return Query("late")

    with pytest.raises(RuntimeError, match="connect back"):
        await_queries([Query("late"), Query("runs")], stop=threading.Event(), poll=0.001, restart=restart)  # type: ignore[list-item]
    assert 1 < len(again) < 10
