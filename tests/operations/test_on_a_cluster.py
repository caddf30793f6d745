"""Operations with Spark tasks, on workers that share nothing with the driver but the log and the tables' store."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.rpc.remote_log import RemoteLogService
from millrace.runtime.launch.launcher import Launcher
from tests.operations.backfill_rig import SCHEMA
from tests.spark_cluster import cluster, tasks_run_in


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_operations_run_their_tasks_on_workers_that_share_nothing(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(tmp_path, settings, monkeypatch) as (spark, _):
        settings = replace(spark.settings, derived_modules="tests.operations.backfill_rig", read_deadline=60.0)
        launcher = Launcher(spark.settings)
        with connect(settings=settings) as db:
            try:
                db.catalog.ensure_pchannels(2)
                db.catalog.create_collection("trips", SCHEMA, vchannels=2)
                launcher.start("node", "streaming_node", arguments=["--with-flusher"])
                done = _run("tests.operations.cluster_process", settings, tmp_path / "operations")
                (node,) = launcher.runs()
            finally:
                launcher.stop("node")
                with RemoteLogService.connect(settings.log_path, start=False) as server:
                    server.shutdown()
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:] + node.tail(40)
        assert all(tasks_run_in(folder) for folder in spark.folders)


def _run(module: str, settings: Settings, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    paths = os.pathsep.join([str(ROOT), str(ROOT.parent)])
    return subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, **settings.environment(), "PYTHONPATH": paths},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
