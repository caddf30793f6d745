"""Pipelines whose worker Airflow supervises (``deployment: airflow``), each by its own DAG that runs it on Spark.

The run id is the one that the service would use, so that there is one worker. The service stops, observes and controls
it like any other, but never starts it. The wanted state (RUNNING, PAUSED, STOPPED) is in the store, where the DAG's
task reads it.
"""

from __future__ import annotations

from pathlib import Path

from millrace.base.settings import Settings
from millrace.flows.control import worker_job
from millrace.flows.declare.worker import AIRFLOW
from millrace.flows.range_host.status import declaration_path
from millrace.pipelines.store.records import Phase, Record
from millrace.pipelines.store.store import may_have_pipelines, open_pipelines
from millrace.runtime.launch.command import JobSpec


def by_airflow(record: Record) -> bool:
    """Return whether a DAG starts the pipeline's worker."""
    return record.declaration.get("deployment") == AIRFLOW


def worker_of(settings: Settings, pipeline: str) -> JobSpec:
    """Return the job that supervises its worker, jobs/pipeline.py."""
    config = Path(settings.pipeline_config) if settings.pipeline_config else None
    return worker_job(declaration_path(settings, pipeline), config=config, tasks=True)


def app_name(pipeline: str) -> str:
    """Return the name under which jobs/pipeline.py writes its heartbeat."""
    return f"millrace-pipeline-{pipeline}"


def airflow_pipelines(settings: Settings) -> list[Record]:
    """Return the pipelines that need a DAG; creates no store if there is none. Raises MetaUnavailable."""
    if not may_have_pipelines(settings):
        return []
    with open_pipelines(settings) as store:
        return [record for record in store.all() if record.phase is Phase.READY and by_airflow(record)]


def wanted(settings: Settings, pipeline: str) -> str:
    """Return the pipeline's wanted state; empty if no DAG runs it any more. Raises MetaUnavailable."""
    return next((record.wanted for record in airflow_pipelines(settings) if record.id == pipeline), "")
