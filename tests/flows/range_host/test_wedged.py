"""A worker that is alive and does not speak, and one that a document holds.

Seen within a stated time, with the cause, started again, nothing lost.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.flows.errors.redrive import redrive
from millrace.flows.range_host.in_hand import LATE_SECONDS
from millrace.flows.range_host.observed import QUIET_SECONDS
from millrace.flows.range_host.status import SILENT_SECONDS, PipelineStatus, State
from millrace.pipelines.deploy.deployment import Deployment
from tests.flows.range_host.flights import Flights
from tests.flows.samples.test_trying import HOSTILE
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@contextmanager
def _deployed(flights: Flights) -> Iterator[Deployment]:
    deployment = Deployment(flights.settings)
    deployment.write(flights.pipeline)
    deployment.start(flights.id)
    try:
        yield deployment
    finally:
        deployment.stop(flights.id)


def _position(status: PipelineStatus) -> int:
    return sum(task.position for task in status.tasks)


def test_a_worker_that_is_stopped_is_seen_ended_and_started_again(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1)
    flights.send([(f"k{n}", {"flight": n}) for n in range(50)])
    with _deployed(flights) as deployment:
        until(lambda: _position(deployment.status(flights.id)) == 50, "it runs", seconds=120)
        before = deployment.status(flights.id)
        assert (before.state, before.restarts, before.last_end) == (State.RUNNING, 0, "")
        os.kill(before.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        flights.send([(f"k{n}", {"flight": n}) for n in range(50, 100)])
        until(lambda: deployment.status(flights.id).state is State.FAILED, "it is seen", seconds=QUIET_SECONDS + 5)
        assert "has been silent for 1" in deployment.status(flights.id).cause
        until(lambda: deployment.status(flights.id).restarts == 1, "it is ended", seconds=SILENT_SECONDS + 20)
        assert time.monotonic() - stopped > SILENT_SECONDS - 2
        until(lambda: _position(deployment.status(flights.id)) == 100, "it goes on", seconds=120)
        after = deployment.status(flights.id)
        assert (after.state, after.restarts) == (State.RUNNING, 1)
        assert f"was silent for {SILENT_SECONDS:.0f} s (process " in after.last_end
        assert after.pid != before.pid
        assert not Path(f"/proc/{before.pid}").exists()
    assert {key: document["flight"] for key, document in flights.index().items()} == {f"k{n}": n for n in range(100)}


def test_a_document_without_end_is_in_the_error_topic_and_the_others_go_on(tmp_path: Path) -> None:
    step, document, _ = HOSTILE["a pattern of the document's own"]
    flights = Flights(tmp_path, partitions=1, steps=[{"kind": "filter", "keep": "true"}, step])
    mild = {"l": [], "r": ""}
    flights.send([("good0", mild), ("bad", {**document, "l": document["l"] * 4}), ("good1", mild)])
    with _deployed(flights) as deployment:
        until(lambda: deployment.status(flights.id).restarts == 1, "its worker ends", seconds=60 + LATE_SECONDS)
        until(lambda: _position(deployment.status(flights.id)) == 3, "it is gone by", seconds=120)
        status = deployment.status(flights.id)
        assert (status.state, status.restarts) == (State.RUNNING, 1)
        assert f"{flights.id}-0 has had the record at offset 1 in hand for 2" in status.last_end
        (task,) = status.tasks
        assert (task.records_in, task.records_out, task.records_error) == (3, 2, 1)
    assert set(flights.index()) == {"good0", "good1"}
    (error,) = flights.errors()
    headers = dict(error.headers())
    assert headers["__connect.errors.exception.class.name"] == b"TOO_MUCH_WORK"
    assert headers["__connect.errors.class.name"] == b"1.compute"
    again = redrive(flights.settings, flights.pipeline)
    assert (again.looked_at, again.failed_again, again.written) == (1, 1, 0)
