"""A flow with a schedule: a run moves what its source has at the start, and ends; one that could not says so."""

from __future__ import annotations

from pathlib import Path

import pytest

import millrace.testing
from millrace.base.settings import Settings
from millrace.flows.control import run_id_of, start_flow
from millrace.flows.declare.discovery import declared_flow
from millrace.flows.directory import find_flow, status_of, write_declared
from millrace.flows.hosts import StreamHost, TaskHost, WorkerHost
from millrace.flows.range_host.supervision import want
from millrace.flows.status import FlowState
from millrace.runtime.launch.launcher import Launcher, RunState

DECLARED = """
flows:
- name: nightly
  schedule: 0 2 * * *
  source: {kind: collection, collection: flights}
  transform: [{kind: rename, fields: {number: flight}}]
  sink: {kind: collection, collection: copied}
  errors: {collection: letters, create: true}
  failure_threshold: 1
- name: hourly
  schedule: "@hourly"
  source: {kind: collection, collection: flights}
  transform: {sql: select * from flights}
  sink: {kind: collection, collection: copied, mode: upsert}
- name: on_spark
  schedule: "@hourly"
  deployment: airflow
  source: {kind: collection, collection: flights}
  sink: {kind: collection, collection: copied}
  errors: {collection: letters}
"""


@pytest.fixture
def declarations(tmp_path: Path) -> Path:
    path = tmp_path / "flows.yaml"
    path.write_text(DECLARED, encoding="utf-8")
    return path


def test_a_run_ends_where_the_source_ends_and_the_next_one_goes_on(tmp_path: Path, declarations: Path) -> None:
    with millrace.testing.deployment(tmp_path / "data", flow_declarations=str(declarations)) as db:
        source = db.create_collection("flights", {"number": "int64"}, key="number")
        settings, flow = db.settings, find_flow(db.settings, "nightly")
        launcher, run = Launcher(settings), run_id_of(flow)
        new = status_of(settings, flow)
        assert (new.state, new.schedule, new.dag_id) == (FlowState.NEW, "0 2 * * *", "flow_nightly")

        source.insert([{"number": 1}, {"number": 2}])
        start_flow(settings, flow)
        failed = launcher.wait(run, deadline=60)
        assert (failed.state, failed.error and failed.error.code) == (RunState.FAILED, "LANES_FAILED")
        assert "collection 'copied'" in str(failed.error)
        assert failed.error is not None
        assert not failed.error.retriable, "the next run of the schedule tries again"

        copied = db.create_collection("copied", {"flight": "int64"}, key="flight")
        for numbers in ([1, 2], [1, 2, 3, 4]):  # a run after one that ended is a new one, and begins where that ended
            source.insert([{"number": number} for number in numbers[2:]])
            start_flow(settings, flow)
            assert launcher.wait(run, deadline=60).state is RunState.FINISHED
            assert sorted(copied.read()["flight"].to_pylist()) == numbers
        ended = status_of(settings, flow)
        assert (ended.state, ended.rows_in, ended.rows_error, ended.schedule) == ("stopped", 4, 0, "0 2 * * *")

        want(settings, "nightly", paused=True)  # it waits until it is resumed, or stopped
        start_flow(settings, flow)
        assert launcher.stop(run).state is RunState.STOPPED


def test_every_host_ends_a_run_of_a_flow_with_a_schedule(tmp_path: Path, declarations: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", flow_declarations=str(declarations))
    settings.data_dir.mkdir()
    result = tmp_path / "r.json"
    worker = WorkerHost(settings, write_declared(settings, declared_flow(settings, "nightly")))
    stream = StreamHost(settings, "hourly")
    tasks = TaskHost(settings, write_declared(settings, declared_flow(settings, "on_spark")))
    assert worker.command(0, result)[-1] == "--until-end"
    for host in (stream, tasks):
        assert "--available-now" in host.command(0, result)
        assert host.restarts.attempts is not None, "who started it learns that it cannot run"
    assert all(host.bounded for host in (worker, stream, tasks))
    always = declarations.read_text(encoding="utf-8").replace('schedule: "@hourly"', "schedule: continuous")
    declarations.write_text(always, encoding="utf-8")
    stream = StreamHost(settings, "hourly")
    assert "--available-now" not in stream.command(0, result)
    assert (stream.bounded, stream.restarts.attempts) == (False, None)
