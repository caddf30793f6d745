"""The heartbeat of a streaming job: what it says of each query, and how a job's end is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql.streaming.query import StreamingQuery

from millrace.base.errors import TickTooOld
from millrace.base.files import replace_json
from millrace.base.metrics import METRICS_SUFFIX, Metrics
from millrace.base.settings import Settings
from millrace.runtime.heartbeat import INTERVAL_SECONDS, Heartbeat, heartbeat_path
from millrace.runtime.job import error_json

TICK = 1_795_000_000_000 << 18


class Query:
    """A streaming query, as far as the heartbeat asks it."""

    name = "streaming-node"
    isActive = True

    def __init__(self) -> None:
        self.batch = 1
        self.busy = False
        self.message = "Processing"

    @property
    def status(self) -> dict[str, Any]:
        return {"message": self.message, "isTriggerActive": self.busy, "isDataAvailable": self.busy}

    @property
    def lastProgress(self) -> dict[str, Any]:
        return {"batchId": self.batch}


class Rig:
    """A heartbeat with a clock of its own."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.now = 1_795_000_010.0
        self.settings = settings
        self.progress = folder / "progress.json"
        self.query = Query()
        self.metrics = Metrics()
        self.beat = Heartbeat(settings, "job", progress=self.progress, metrics=self.metrics, clock=lambda: self.now)

    def later(self, seconds: float) -> dict[str, Any]:
        """What the heartbeat says of the query after `seconds`."""
        self.now += seconds
        self.beat([cast("StreamingQuery", self.query)])
        return json.loads(heartbeat_path(self.settings, "job").read_text())["queries"]["streaming-node"]

    def commits(self, rows: int, *, pid: int | None = None) -> None:
        told = {
            "pid": pid or os.getpid(),
            "at": self.now,
            "rows": rows,
            "batches": 1,
            "pchannels": {"dml_0": {"tick": TICK}},
        }
        replace_json(self.settings.progress_path("streaming-node"), told)


@pytest.fixture
def rig(settings: Settings, tmp_path: Path) -> Rig:
    return Rig(settings, tmp_path)


def test_rows_a_second_are_those_since_the_last_beat(rig: Rig) -> None:
    rig.commits(100)
    assert rig.later(0)["rows_per_second"] == 0
    rig.commits(500)
    found = rig.later(4.0)
    assert (found["rows"], found["rows_per_second"]) == (500, 100.0)
    assert found["lag_seconds"] == 10.0


def test_the_figures_of_an_earlier_process_are_not_this_ones(rig: Rig) -> None:
    rig.commits(100, pid=1)
    found = rig.later(0)
    assert (found["rows"], found["last_commit"]) == (0, None)


def test_a_query_in_one_micro_batch_is_busy_and_one_that_waits_is_not(rig: Rig) -> None:
    rig.query.busy = True
    assert rig.later(0)["busy_seconds"] == 0
    assert rig.later(300)["busy_seconds"] == 300
    rig.query.batch += 1
    assert rig.later(10)["busy_seconds"] == 0
    rig.query.busy = False
    assert rig.later(3600)["busy_seconds"] == 0


def test_it_is_written_now_and_then_and_for_the_launcher_too(rig: Rig) -> None:
    rig.later(0)
    written = heartbeat_path(rig.settings, "job").stat().st_mtime_ns
    rig.later(INTERVAL_SECONDS / 2)
    assert heartbeat_path(rig.settings, "job").stat().st_mtime_ns == written
    assert json.loads(rig.progress.read_text())["words"] == "streaming-node: Processing"


def test_an_error_of_ours_is_found_in_what_the_jvm_says() -> None:
    text = (
        "[STREAM_FAILED] Query terminated with exception: An exception was raised by the Python Proxy.\n"
        '  File "committer.py", line 3\nmillrace.errors.WalGap: rows of dml_0 are missing\n\tat py4j.Protocol'
    )
    found = error_json(RuntimeError(text))
    assert found == {"code": "WAL_GAP", "message": "rows of dml_0 are missing", "retriable": False}


def test_an_error_of_ours_says_itself_and_any_other_may_be_tried_again() -> None:
    assert error_json(TickTooOld("gone")) == {"code": "TICK_TOO_OLD", "message": "gone", "retriable": False}
    assert error_json(OSError("no space")) == {"code": "OSError", "message": "no space", "retriable": True}


def test_a_jobs_metrics_lie_beside_its_heartbeat(settings: Settings, tmp_path: Path) -> None:
    rig = Rig(settings, tmp_path)
    for commits in (1.0, 3.0):
        rig.metrics.wal_commit_conflict_total.inc(commits)
        rig.later(INTERVAL_SECONDS)
        left = heartbeat_path(settings, "job").with_suffix(METRICS_SUFFIX).read_text()
        assert f"millrace_wal_commit_conflict_total {rig.metrics.wal_commit_conflict_total._value.get()}" in left


def test_what_spark_raised_is_told_without_the_jvms_names() -> None:
    text = (
        "An error occurred while calling o87.load.\n: org.apache.spark.SparkException: Job aborted due to stage"
        " failure\n"
        "\tat org.apache.spark.scheduler.DAGScheduler.failJob(DAGScheduler.scala:2672)\n"
        "Caused by: java.io.IOException: No space left on device\n\t... 13 more\n"
    )
    assert error_json(RuntimeError(text))["message"] == "Job aborted due to stage failure\nNo space left on device"


def test_no_java_object_is_named_in_words(settings: Settings, tmp_path: Path) -> None:
    rig = Rig(settings, tmp_path)
    rig.query.message = "Getting offsets from org.apache.spark.sql.execution.python.PythonMicroBatchStream@5b1f0a2c"
    assert rig.later(3.0)["message"] == "Getting offsets from the source"
    assert "@" not in rig.progress.read_text()
