"""The streaming node on Spark.

From the log's server through the tasks into the table, and on after every kind of end.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from prometheus_client import CollectorRegistry

from millrace.base.metrics import Metrics
from millrace.node.ingest.definition import IngestLoop
from millrace.node.range_loop.batch_driver import BatchDriver
from millrace.node.range_loop.parking import read_parked, unpark
from tests.node.ingest.deployment import Deployment
from tests.node.log_samples import accepted, opening, poison, rejected, tick

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 90.0


def until(condition: Callable[[], bool], *, alive: Callable[[], bool] = lambda: True) -> None:
    """Wait for `condition`, as long as `alive` holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert alive(), "it ended before that"
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)  # between two looks at the condition: it lies in other processes, which tell nobody


def start(spark: SparkSession, deployment: Deployment, *, available_now: bool = False) -> StreamingQuery:
    from millrace.node.range_loop.query import start_query

    metrics = Metrics(registry=CollectorRegistry())
    return start_query(spark, IngestLoop(deployment.settings), metrics=metrics, available_now=available_now)


@pytest.mark.slow
@pytest.mark.spark
def test_the_query_follows_the_logs_parks_what_is_poisoned_and_rests_when_nothing_comes(
    spark: SparkSession, deployment: Deployment
) -> None:
    from millrace.runtime.queries import stop_between_batches

    deployment.append("p0", opening(), accepted(), rejected(b"x"))
    spark.conf.set("spark.sql.streaming.noDataProgressEventInterval", "200ms")
    query = start(spark, deployment)
    try:
        until(lambda: deployment.rows("p0") == 3, alive=lambda: query.isActive)
        deployment.append("p1", opening(), accepted(), poison(), accepted())
        until(lambda: bool(read_parked(deployment.settings.parked_path)), alive=lambda: query.isActive)
        assert deployment.rows("p1") == 2, "what stands before the poisoned entry is committed"
        deployment.append("p0", accepted())
        until(lambda: deployment.rows("p0") == 4, alive=lambda: query.isActive)
        deployment.append("p0", tick())
        until(lambda: deployment.rows("p0") == 5, alive=lambda: query.isActive)
        version = DeltaTable(str(Path(deployment.settings.wal_uri))).version()
        until(lambda: not query.status["isTriggerActive"] or not query.status["isDataAvailable"])
        batches = json.loads(deployment.settings.progress_path(IngestLoop.name).read_text())["batches"]
        polls = _polls(query)
        for _ in range(5):
            deployment.append("p0", tick())
        until(lambda: _polls(query) > polls, alive=lambda: query.isActive)
        assert json.loads(deployment.settings.progress_path(IngestLoop.name).read_text())["batches"] == batches
        assert DeltaTable(str(Path(deployment.settings.wal_uri))).version() == version
        unpark(deployment.settings.parked_path, "p1")
        until(lambda: bool(read_parked(deployment.settings.parked_path)), alive=lambda: query.isActive)
    finally:
        stop_between_batches(query)
        spark.conf.unset("spark.sql.streaming.noDataProgressEventInterval")
    deployment.check()


def _polls(query: StreamingQuery) -> int:
    """Grows with each progress report; an idle query reports now and then."""
    last = query.lastProgress
    return 0 if last is None else hash(last.timestamp)


@pytest.mark.slow
@pytest.mark.spark
def test_queries_are_said_to_run_once_spark_has_what_they_need(spark: SparkSession, deployment: Deployment) -> None:
    from millrace.runtime.queries import await_queries

    query, stop = start(spark, deployment), threading.Event()
    seen: list[str] = []

    def begun() -> None:
        seen.append(query.status["message"])
        stop.set()

    await_queries([query], stop=stop, poll=0.01, on_started=begun)
    (status,) = seen
    assert "Initializing" not in status
    assert not query.isActive


@pytest.mark.slow
@pytest.mark.spark
def test_a_batch_reports_the_logs_ends_and_leaves_workers_with_little_to_collect(
    spark: SparkSession, deployment: Deployment
) -> None:
    deployment.append("p0", opening(), accepted())
    query = start(spark, deployment, available_now=True)
    assert query.awaitTermination(PATIENCE)
    (source,) = next(item.sources for item in query.recentProgress if item.numInputRows)
    end = deployment.service.open("p0").end()
    assert json.loads(source.latestOffset)["ends"]["p0"] == str(end)

    def kept(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"kept": [gc.get_freeze_count()]})

    found = spark.range(8, numPartitions=8).mapInArrow(kept, "kept LONG").collect()
    assert max(row["kept"] for row in found) > 10_000, (
        "the worker that ran the batch's task keeps its modules out of collections"
    )


@pytest.mark.slow
@pytest.mark.spark
def test_a_micro_batch_is_one_stage_with_a_task_for_each_pchannel_and_shuffles_nothing(
    spark: SparkSession, deployment: Deployment
) -> None:
    """docs/scale.md counts on it: the work of a commit does not grow with anything but its PChannels."""
    for name in ("p0", "p1"):
        deployment.append(name, opening(), accepted())
    before = _stages(spark)
    query = start(spark, deployment, available_now=True)
    assert query.awaitTermination(PATIENCE)
    made = _stages(spark)[len(before) :]
    batches = [each for each in query.recentProgress if each.numInputRows]
    assert made == [(2, 0)] * len(batches)
    assert len(batches) == 1


def _stages(spark: SparkSession) -> list[tuple[int, int]]:
    """Return the tasks and the shuffled bytes of each stage that this session has run, the oldest first."""
    context = spark.sparkContext
    quantiles = context._gateway.new_array(context._jvm.double, 0)
    found = context._jsc.sc().statusStore().stageList(None, False, False, quantiles, None)
    each = [found.apply(place) for place in range(found.size())]
    return [(stage.numTasks(), stage.shuffleWriteBytes()) for stage in sorted(each, key=lambda stage: stage.stageId())]


@pytest.mark.spark
def test_a_bounded_run_a_crash_before_sparks_commit_log_and_a_lost_checkpoint_leave_each_row_once(
    spark: SparkSession, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.errors import StreamingQueryException

    deployment.append("p0", opening(), accepted(), rejected(b"y"))
    deployment.append("p1", opening())
    settle = BatchDriver.commit

    def dies(self: BatchDriver[Any], outcomes: Sequence[Any]) -> None:
        settle(self, outcomes)
        raise RuntimeError("the driver dies behind the Delta commit")

    with monkeypatch.context() as patched:
        patched.setattr(BatchDriver, "commit", dies)
        query = start(spark, deployment, available_now=True)
        with pytest.raises(StreamingQueryException, match="the driver dies"):
            query.awaitTermination(PATIENCE)
    assert (deployment.rows("p0"), deployment.rows("p1")) == (3, 1)
    deployment.append("p1", accepted())
    assert start(spark, deployment, available_now=True).awaitTermination(PATIENCE)
    assert (deployment.rows("p0"), deployment.rows("p1")) == (3, 2), (
        "the batch that Spark ran again found nothing to do"
    )

    shutil.rmtree(deployment.settings.spark_checkpoint_path(IngestLoop.name))
    deployment.append("p0", accepted())
    assert start(spark, deployment, available_now=True).awaitTermination(PATIENCE)
    assert (deployment.rows("p0"), deployment.rows("p1")) == (4, 2)
    deployment.check()


class Job:
    """jobs/streaming_node.py as a process of its own."""

    def __init__(
        self, deployment: Deployment, *options: str, failpoints: str = "", first_path: Path | None = None
    ) -> None:
        paths = [] if first_path is None else [str(first_path)]
        paths += [path for path in sys.path if (Path(path) / "millrace").is_dir()]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "jobs" / "streaming_node.py"), *options],
            env={
                **os.environ,
                **deployment.settings.environment(),
                "PYTHONPATH": os.pathsep.join(paths),
                "MILLRACE_TEST_FAILPOINTS": failpoints,
            },
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # a driver that died leaves its JVM and workers
        except ProcessLookupError:
            pass
        self.process.wait(timeout=30)

    def wait(self) -> int:
        return self.process.wait(timeout=PATIENCE)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("place", ["range.written", "commit.checked", "commit.done"])
def test_the_job_that_is_killed_at_any_place_leaves_each_row_once(deployment: Deployment, place: str) -> None:
    deployment.append("p0", opening(), accepted(), rejected(b"x"))
    deployment.append("p1", opening(), accepted())
    with Job(deployment, "--available-now", failpoints=place) as job:
        assert job.wait() != 0
    deployment.append("p0", accepted())
    with Job(deployment, "--available-now") as job:
        assert job.wait() == 0
    assert (deployment.rows("p0"), deployment.rows("p1")) == (4, 2)
    deployment.check()


@pytest.mark.spark
@pytest.mark.slow
def test_the_job_stops_cleanly_on_sigterm_and_goes_on_where_it_was(deployment: Deployment) -> None:
    deployment.append("p0", opening(), accepted())
    with Job(deployment) as job:
        until(lambda: deployment.rows("p0") == 2, alive=lambda: job.process.poll() is None)
        for _ in range(20):
            deployment.append("p0", accepted())
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 0
    with Job(deployment, "--available-now") as job:
        assert job.wait() == 0
    assert deployment.rows("p0") == 22
    deployment.check()


LATE_WORKER = """
import os, sys, time
if "pyspark.sql.streaming.python_streaming_source_runner" in sys.orig_argv:
    try:
        os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
        time.sleep(15)
    except FileExistsError:
        pass
"""
"""A Python start-up file.

The first worker that reads the source comes up later than the 10 s that Spark waits for it.
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--available-now",)], ids=["for good", "to the end"])
def test_a_job_whose_python_worker_comes_up_too_late_starts_its_query_again(
    deployment: Deployment, tmp_path: Path, options: tuple[str, ...]
) -> None:
    marker = tmp_path / "came-late"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LATE_WORKER.format(marker=str(marker)))
    deployment.append("p0", opening(), accepted())
    with Job(deployment, *options, first_path=tmp_path / "site") as job:
        until(lambda: deployment.rows("p0") == 2, alive=lambda: job.process.poll() is None)
        if not options:
            job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 0
    assert marker.exists()
    deployment.check()
