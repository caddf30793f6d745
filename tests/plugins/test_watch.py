"""The watch over a streaming job: what is a fault, what is not, and how long to pause before a restart."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.runtime.launch.launcher import RunError, RunState, RunStatus
from millrace_airflow.job_monitor import StreamingJobMonitor, restart_backoff

APP = "millrace-streaming-node"
PID = 4711


def watch_of(settings: Settings) -> StreamingJobMonitor:
    return StreamingJobMonitor(
        settings,
        app_name=APP,
        backoff=restart_backoff(settings, "streaming-node"),
        stale_after=60.0,
        stuck_after=900.0,
        say_every=0.0,
    )


def status_of(**changes: Any) -> RunStatus:
    known: dict[str, Any] = {
        "run_id": "streaming-node",
        "job": "streaming_node",
        "attempt": 1,
        "state": RunState.RUNNING,
        "pid": PID,
        "started_at": time.time() - 100,
        "ended_at": None,
        "params": {},
        "progress": None,
        "report": None,
        "error": None,
        "collected": False,
        "log": Path("log"),
    }
    return RunStatus(**known | changes)


def beat(settings: Settings, *, age: float = 0.0, pid: int = PID, busy: float = 0.0) -> None:
    query = {
        "active": True,
        "message": "Waiting for data to arrive",
        "batches": 3,
        "rows": 1234,
        "rows_per_second": 56.0,
        "busy_seconds": busy,
        "last_commit": time.time() - 2,
        "lag_seconds": 0.4,
        "parked": [],
    }
    value = {"pid": pid, "at": time.time() - age, "spark_ui": None, "queries": {"streaming-node": query}}
    replace_json(settings.run_path / f"{APP}.heartbeat.json", value)


def test_a_job_with_a_fresh_heartbeat_is_well_and_says_how_it_is(settings: Settings) -> None:
    beat(settings)
    assert watch_of(settings).find_fault(status_of()) is None
    words = watch_of(settings).progress_line(status_of())
    assert words == "streaming-node: 1,234 rows, 56 rows/s, last commit 2 s ago, lag 0.4 s"


def test_a_heartbeat_that_grew_old_is_a_hang(settings: Settings) -> None:
    beat(settings, age=61)
    fault = watch_of(settings).find_fault(status_of())
    assert fault is not None
    assert (fault.code, fault.retriable) == ("HEARTBEAT_STALE", True)


def test_a_job_that_starts_is_given_its_time_and_no_more(settings: Settings) -> None:
    allowed = settings.start_deadline + 60
    assert watch_of(settings).find_fault(status_of(started_at=time.time() - allowed + 5)) is None
    assert watch_of(settings).find_fault(status_of(started_at=time.time() - allowed - 5)) is not None


def test_the_heartbeat_of_an_earlier_process_says_nothing_of_this_one(settings: Settings) -> None:
    beat(settings, age=1000, pid=PID + 1)
    assert watch_of(settings).find_fault(status_of(started_at=time.time() - 10)) is None


def test_a_micro_batch_without_an_end_is_a_hang(settings: Settings) -> None:
    beat(settings, busy=901)
    fault = watch_of(settings).find_fault(status_of())
    assert fault is not None
    assert fault.code == "QUERY_STUCK"


def test_a_job_that_somebody_else_started_is_seen_while_it_lives(settings: Settings) -> None:
    assert watch_of(settings).foreign_process() is None
    beat(settings, pid=os.getpid())
    assert watch_of(settings).foreign_process() is None, "the folder is a copy: the job reports to the original"
    _reporter = ProcessRegistration(settings.run_path)
    assert watch_of(settings).foreign_process() == os.getpid()
    beat(settings, pid=os.getpid(), age=61)
    assert watch_of(settings).foreign_process() is None
    beat(settings, pid=(1 << 22) + 1)  # beyond the largest process id
    assert watch_of(settings).foreign_process() is None


@pytest.mark.parametrize("retriable", [True, False])
def test_a_job_that_ended_is_a_fault_of_its_own_kind(settings: Settings, retriable: bool) -> None:
    error = RunError("WAL_GAP", "rows are missing", retriable)
    fault = watch_of(settings).find_fault(status_of(state=RunState.FAILED, error=error))
    assert fault is not None
    assert (str(fault), fault.retriable) == ("WAL_GAP: rows are missing", retriable)


def test_the_pause_doubles_outlives_the_task_and_is_forgiven(settings: Settings) -> None:
    assert restart_backoff(settings, "a").remaining_pause() == 0
    restart_backoff(settings, "a").record_failure("first")
    assert 1.5 < restart_backoff(settings, "a").remaining_pause() <= 2
    for _ in range(2):
        restart_backoff(settings, "a").record_failure("again")
    assert 7.5 < restart_backoff(settings, "a").remaining_pause() <= 8
    for _ in range(20):
        restart_backoff(settings, "a").record_failure("again")
    assert 299 < restart_backoff(settings, "a").remaining_pause() <= 300
    beat(settings)
    watch = watch_of(settings)
    watch.backoff.record_failure("once")
    assert watch.find_fault(status_of(started_at=time.time() - 301)) is None
    assert watch.backoff.remaining_pause() == 0
