"""``millrace log clock`` on a real server, whose host's clock leapt a day ahead.

Held, seen everywhere, kept through kill -9, accepted.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from millrace.log.rocksmq.stamp_clock import StampClock
from millrace.observe.observer import Observer
from millrace.rpc.discovery import read_record
from tests.cli.deployment import Deployment

DAY = 86_400


def test_the_clock_of_the_log_is_looked_at_and_accepted_where_a_server_runs(deployment: Deployment) -> None:
    assert "No log server runs" in deployment.ok("log", "clock")
    assert deployment.as_json("log", "clock") == []
    assert "no log server runs" in deployment.fails("LOG_UNAVAILABLE", "log", "clock", "--accept")
    assert not (deployment.settings.log_path / "server.json").exists(), "looking starts none"
    deployment.create_users()
    for arguments in (["clock"], ["clock", "--accept"]):
        [found] = deployment.as_json("log", *arguments)
        assert (found["held"], found["held_since"], found["leap_seconds"]) == (False, None, 300.0)
        assert found["ahead_seconds"] == 0.0
        assert found["wall_clock"] == found["stamps"]


@pytest.fixture
def leapt(deployment: Deployment) -> Deployment:
    """A deployment whose log was last open a moment ago, when its host's clock showed a day less."""
    deployment.settings.log_path.mkdir(parents=True)
    StampClock(deployment.settings.log_path / "clock.json", wall=lambda: time.time_ns() - DAY * 1_000_000_000).close()
    return deployment


@pytest.mark.slow
def test_a_leap_that_is_held_is_seen_everywhere_outlives_the_server_and_ends_when_it_is_accepted(
    leapt: Deployment,
) -> None:
    def clock(*options: str) -> dict[str, object]:
        [found] = leapt.as_json("log", "clock", *options)
        assert isinstance(found, dict)
        return found

    leapt.create_users()
    assert leapt.produce({"id": 1})["accepted"] == 1
    held = clock()
    assert held["held"]
    assert held["ahead_seconds"] == pytest.approx(-DAY, abs=60)
    observer = Observer(leapt.settings)
    try:
        [finding] = [each for each in observer.overview().findings if each.kind == "clock"]
        assert (finding.subject, finding.where.startswith("`millrace log clock`")) == ("log clock", True)
        assert "\nmillrace_log_clock_held 1.0\n" in observer.metrics().decode()
    finally:
        observer.close()
    record = read_record(leapt.settings.log_path)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    assert leapt.produce({"id": 2})["accepted"] == 1
    assert clock()["held_since"] == held["held_since"], "the next server holds it on"
    accepted = clock("--accept")
    assert not accepted["held"]
    assert accepted["ahead_seconds"] == pytest.approx(0, abs=5)
    assert leapt.produce({"id": 3})["accepted"] == 1
    leapt.catch_up()
    assert sorted(row["id"] for row in leapt.lines("read", "users", "--json")) == [1, 2, 3]
    stamped = {row["last_append"][:10] for row in leapt.as_json("log", "describe") if row["last_append"]}
    assert time.strftime("%Y-%m-%d", time.gmtime()) in stamped
