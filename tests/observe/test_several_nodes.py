"""What is seen of several nodes.

A query runs where one of them runs it, and each PChannel has the node that says so.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

import psutil

from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.node.range_loop.ownership import assigned_path, write_assigned
from millrace.observe.exposition import job_metrics
from millrace.observe.jobs import pchannel_owners, read_jobs


def _says(settings: Settings, *, alive: bool, rows: int, failure: str = "", assigned: str = "") -> None:
    settings.node_run_path.mkdir(parents=True, exist_ok=True)
    at = time.time() if alive else psutil.Process().create_time() - 60
    channels = {"dml_0": {"failure": failure, "seconds": {"commit": rows}}}
    replace_json(
        settings.progress_path("streaming-node"),
        {"pid": os.getpid(), "at": at, "batches": 1, "rows": rows, "pchannels": channels},
    )
    if assigned:
        write_assigned(assigned_path(settings), [assigned])


def test_a_job_that_was_started_again_runs_although_its_last_batch_is_of_the_one_before(settings: Settings) -> None:
    _reporter = ProcessRegistration(settings.run_path)
    _says(settings, alive=False, rows=7)
    assert [each.state for each in read_jobs(settings)] == ["stopped", "never started"]
    beat = {"pid": os.getpid(), "at": time.time(), "queries": {"streaming-node": {"message": "Waiting for data"}}}
    replace_json(settings.node_run_path / "streaming.heartbeat.json", beat)
    job = read_jobs(settings)[0]
    assert (job.state, job.pid, job.rows) == ("running", os.getpid(), 0)


def test_the_nodes_of_a_cluster_are_seen_together_and_one_that_ended_counts_no_more(settings: Settings) -> None:
    _reporter = ProcessRegistration(settings.run_path)
    assert [each.state for each in read_jobs(settings)] == ["never started"] * 2
    beat = {"pid": os.getpid(), "at": time.time(), "queries": {"streaming-node": {"message": "Waiting for data"}}}
    replace_json(settings.node_run_path / "streaming.heartbeat.json", beat)
    assert [each.state for each in read_jobs(settings)] == ["running", "never started"], "before its first batch"
    replace_json(settings.node_run_path / "streaming.heartbeat.json", {"queries": {"streaming-node": {}}})
    assert read_jobs(settings)[0].state == "never started"
    first, second, third = (replace(settings, node=name) for name in ("n1", "n2", "n3"))
    (settings.run_path / "nodes" / "no node").mkdir(parents=True)
    _says(first, alive=True, rows=2, failure="it waits", assigned="dml_0")
    _says(second, alive=True, rows=3, assigned="dml_1")
    _says(third, alive=False, rows=50, assigned="dml_2")
    job = read_jobs(settings)[0]
    assert (job.state, job.batches, job.rows, job.failures) == ("running", 2, 5, {"dml_0": "it waits"})
    assert job.seconds == {"commit": 3.0}
    assert pchannel_owners(settings) == {
        "dml_0": f"n1 (process {os.getpid()})",
        "dml_1": f"n2 (process {os.getpid()})",
    }
    _says(first, alive=False, rows=2)
    _says(second, alive=False, rows=3)
    assert read_jobs(settings)[0].state == "stopped"
    assert pchannel_owners(settings) == {}
    assert job_metrics(settings) == []


def test_one_node_without_a_name_is_as_it_was(settings: Settings) -> None:
    _reporter = ProcessRegistration(settings.run_path)
    _says(settings, alive=True, rows=7)
    assert read_jobs(settings)[0].rows == 7
    assert pchannel_owners(settings) == {}
