"""DAGs of pipelines: one for each that is declared so, with the run id of the pipeline.

Its task starts nothing that is to stand still.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from millrace.access.grants import LOCAL_ADMIN
from millrace.base.deadline import Deadline
from millrace.base.settings import Settings
from millrace.flows.range_host.observed import run_id
from millrace.flows.range_host.status import declaration_path
from millrace.pipelines.api.management import Management
from millrace.pipelines.deploy.airflow import worker_of
from millrace.pipelines.store.store import open_pipelines
from millrace_airflow.pipelines import PipelineOperator, pipeline_dags
from millrace_airflow.streaming import StreamingJobOperator
from tests.pipelines.api.test_routes import DECLARED, NoProcess, NoServers

KEPT = {**DECLARED, "deployment": "airflow"}


@pytest.fixture
def management(settings: Settings) -> Iterator[Management]:
    settings.data_dir.mkdir(mode=0o700)
    with open_pipelines(settings, env={}) as store:
        deployment = NoProcess(settings)
        made = Management(settings, store, deployment=deployment)
        made._world = NoServers(deployment, made._pipeline)
        yield made


def test_each_that_is_declared_so_has_a_dag_with_its_run_id_and_the_others_have_none(
    settings: Settings, management: Management, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_DATA", str(settings.data_dir))
    management.create(LOCAL_ADMIN, "flights", {**KEPT, "description": "Of 2013."})
    management.create(LOCAL_ADMIN, "planes", DECLARED)
    dags = pipeline_dags(settings)
    assert list(dags) == ["pipeline_flights"]
    [task] = dags["pipeline_flights"].tasks
    assert (task.job, task.job_run_id, task.app_name) == ("pipeline", run_id("flights"), "millrace-pipeline-flights")
    file = str(declaration_path(settings, "flights"))
    job = worker_of(replace(settings, pipeline_config="/etc/pipelines.yaml"), "flights")
    assert job.command[2:] == ("millrace.flows.supervisor", "tasks", file, "--config", "/etc/pipelines.yaml")
    assert task._job().command[3:] == ("tasks", file)
    assert "Of 2013." in str(dags["pipeline_flights"].doc_md)
    assert "hunter2" not in str(dags["pipeline_flights"].doc_md) + str(task._job())
    management.delete(LOCAL_ADMIN, "flights")
    assert pipeline_dags(settings) == {}


def test_where_no_pipeline_was_ever_kept_nothing_is_made(settings: Settings) -> None:
    assert pipeline_dags(settings) == {}
    assert not settings.data_dir.exists()


def test_the_service_starts_no_worker_beside_the_dags_and_stops_the_one_that_runs(
    settings: Settings, management: Management
) -> None:
    management.create(LOCAL_ADMIN, "flights", KEPT)
    management.resume(LOCAL_ADMIN, "flights")
    management.tend()
    assert not management.deployment.running("flights")
    management.deployment.start("flights")  # as its DAG does
    management.pause(LOCAL_ADMIN, "flights")
    assert json.loads((settings.data_dir / "pipelines" / "flights" / "wanted.json").read_text())["paused"] is True
    management.stop(LOCAL_ADMIN, "flights")
    assert not management.deployment.running("flights")
    management.resume(LOCAL_ADMIN, "flights")
    management.update(LOCAL_ADMIN, "flights", DECLARED, version=1)
    assert management.deployment.running("flights"), "now it is the service's"
    assert pipeline_dags(settings) == {}


class Watch:
    """Time goes by where it waits, and somebody has it run meanwhile."""

    def __init__(self, then: Any) -> None:
        self.waits = 0
        self._then = then

    def sleep(self, seconds: float) -> None:
        self.waits += 1
        if self.waits == 3:
            self._then()


def test_a_worker_that_somebody_stopped_is_started_when_it_is_to_run_again(
    settings: Settings, management: Management, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(StreamingJobOperator, "_start", lambda *_, **__: started.append(watch.waits))
    monkeypatch.setenv("MILLRACE_DATA", str(settings.data_dir))
    management.create(LOCAL_ADMIN, "flights", KEPT)
    task = PipelineOperator(task_id="supervise", pipeline="flights", job_run_id="x", app_name="x", watch_for=60)
    watch = Watch(lambda: management.resume(LOCAL_ADMIN, "flights"))
    task._start(watch, None, until=Deadline.after(60))  # type: ignore[arg-type]
    assert started == [3]
    management.stop(LOCAL_ADMIN, "flights")
    watch = Watch(lambda: None)
    task._start(watch, None, until=Deadline.after(60), paused=lambda: watch.waits == 2)  # type: ignore[arg-type]
    task._start(watch, None, until=Deadline.after(0))  # type: ignore[arg-type]
    assert started == [3], "who pauses the DAG, or whose time is over, starts none"
