"""Executors that come under load and go when a job is idle, with what they held: on workers that share nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.rpc.wire import TOKEN_VARIABLE
from tests.flows.spark_host.test_on_a_cluster import ROWS, batches, check, numbers, send, streams, wait_for_more
from tests.spark_cluster import Cluster, cluster
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROPERTIES = """
spark.dynamicAllocation.enabled                  true
spark.dynamicAllocation.schedulerBacklogTimeout  200ms
spark.dynamicAllocation.executorIdleTimeout      6s
spark.dynamicAllocation.cachedExecutorIdleTimeout 6s
spark.dynamicAllocation.shuffleTracking.timeout  6s
"""
CORES = 4


def test_executors_come_under_load_and_go_with_what_they_held(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams with windows and patterns lose executors with their state, a driver those with its cached rows."""
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-that-all-machines-have")
    properties = tmp_path / "spark.conf"
    properties.write_text(PROPERTIES)
    with (
        cluster(tmp_path, settings, monkeypatch) as (spark, _),
        streams(spark, tmp_path, spark_properties=str(properties), spark_cores=CORES) as (rig, db),
    ):
        sent = 0

        def send_until(executors: int, most: int) -> None:
            """Send rows until there are so many executors, `most` rows at most."""
            nonlocal sent
            while spark.count_executors() < executors:
                assert sent < most, f"{spark.count_executors()} executors\n{process.tail()}"
                send(db, spark.kafka, range(sent, sent + 250))
                sent += 250
                done.update(wait_for_more(rig.home, done, process))

        done = dict.fromkeys(batches(rig.home), -1)
        with rig.driver("first", "stream", "all") as process:
            send_until(3, ROWS // 2)
            until(lambda: spark.count_executors() == 1, "the idle executors are gone", seconds=180)
            assert with_state(spark) >= 2, "an executor that is gone had the state of windows"
            send_until(3, ROWS)
            send(db, spark.kafka, range(sent, ROWS))
            db["numbers"].insert(numbers(range(ROWS, ROWS + 1)))
            wait_for_more(rig.home, done, process)
        db["numbers"].insert(numbers(range(ROWS + 1, ROWS + 2)))
        with rig.driver("second", "stream", "all", "--available-now") as process:
            assert process.wait(deadline=300) == 0, process.tail()
        check(db, rig.home, numbers(range(ROWS + 2)))
        facts = _cached(rig.home)
        assert facts["before"]["executors"] > facts["after"]["executors"], facts
        assert facts["before"]["cached"] > facts["after"]["cached"], facts
        assert (facts["rows"], facts["equal"]) == (ROWS + 2, True)


def with_state(spark: Cluster) -> int:
    """Return how many executors have had a partition of a window's state."""
    logs = [path for folder in spark.folders for path in (folder / "work").glob("app-*/*/stderr")]
    return sum("StateStore" in path.read_text(errors="replace") for path in logs)


def _cached(settings: Settings) -> dict[str, dict[str, int]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.spark.cached_process"],
        env={**os.environ, **settings.environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT.parent)])},
        cwd=settings.data_dir,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    facts: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return facts
