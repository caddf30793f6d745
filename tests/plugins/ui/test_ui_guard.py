"""Who guesses passwords is slowed, by address, within a bound; who logs in is not."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient

from millrace_airflow.ui.login_throttle import FREE_FAILURES, LONGEST_PAUSE, LoginFailures, LoginThrottle


class Clock:
    """A clock that a test sets forward."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def login(clock: Clock) -> TestClient:
    """An application whose login knows one password, behind the brake."""
    app = FastAPI()

    @app.post("/auth/token", status_code=201)
    def token(given: dict[str, Any]) -> dict[str, str]:
        if given.get("password") != "right":
            raise HTTPException(401, "Invalid credentials")
        return {"access_token": "x"}

    @app.post("/other")
    def other() -> None:
        raise HTTPException(401, "no")

    app.add_middleware(LoginThrottle, failures=LoginFailures(clock=clock))
    return TestClient(app)


def _try(login: TestClient, password: str) -> Any:
    return login.post("/auth/token", json={"password": password})


def test_failures_behind_the_free_ones_cost_twice_as_long_each(login: TestClient, clock: Clock) -> None:
    assert [_try(login, "wrong").status_code for _ in range(FREE_FAILURES + 1)] == [401] * (FREE_FAILURES + 1)
    waits = []
    for _ in range(12):
        answer = _try(login, "right")
        assert answer.status_code == 429, "not even the right password is looked at before its time"
        waits.append(int(answer.headers["Retry-After"]))
        clock.now += waits[-1]
        assert _try(login, "wrong").status_code == 401
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


def test_who_logs_in_begins_anew(login: TestClient) -> None:
    for _ in range(3):
        for _ in range(FREE_FAILURES):
            assert _try(login, "wrong").status_code == 401
        assert _try(login, "right").status_code == 201


def test_other_routes_are_not_slowed_and_do_not_count(login: TestClient) -> None:
    assert [login.post("/other").status_code for _ in range(3 * FREE_FAILURES)] == [401] * (3 * FREE_FAILURES)
    assert _try(login, "right").status_code == 201


def test_one_address_does_not_slow_another_and_the_memory_is_bounded(clock: Clock) -> None:
    failures = LoginFailures(clock=clock, most=100)
    for _ in range(FREE_FAILURES + 3):
        failures.failed("guesser")
    assert failures.wait("guesser") > 0
    assert failures.wait("somebody else") == 0
    for number in range(1_000):
        failures.failed(f"10.0.0.{number}")
    assert len(failures) == 100


def test_an_address_that_stayed_away_is_forgotten(clock: Clock) -> None:
    failures = LoginFailures(clock=clock)
    for _ in range(FREE_FAILURES + 3):
        failures.failed("guesser")
    clock.now += 2 * LONGEST_PAUSE + 1
    assert failures.wait("guesser") == 0
    assert len(failures) == 0


def test_airflow_has_the_brake_around_its_whole_server() -> None:
    from millrace_airflow.plugin import MillracePlugin

    assert LoginThrottle in [each["middleware"] for each in MillracePlugin.fastapi_root_middlewares]
