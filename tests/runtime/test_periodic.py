"""A maintenance task goes on after any failure."""

from __future__ import annotations

import threading

import pytest

from millrace.runtime.periodic import PeriodicTask


class Failing(PeriodicTask):
    def __init__(self) -> None:
        super().__init__(name="failing", interval=0.01, run_at_start=True)
        self.runs = 0
        self.again = threading.Event()

    def run_once(self) -> None:
        self.runs += 1
        if self.runs == 1:
            raise KeyError("an entry of a newer build")
        self.again.set()


def test_an_error_that_nobody_expects_is_logged_and_the_next_run_comes(caplog: pytest.LogCaptureFixture) -> None:
    with Failing() as task:
        task.start()
        assert task.again.wait(10)
    assert "failing failed; retrying" in caplog.text
