"""DAGs of pipelines with ``deployment: airflow``: each keeps one worker running under the pipeline's run id.

    globals().update(pipeline_dags())      # in a file of dags/

Run, pause and stop such a pipeline like any other (docs/pipelines-api.md): the DAG's task starts the worker when the
pipeline should run. Pausing the DAG stops the worker, whatever the pipeline's wanted state is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG

from millrace.base.deadline import Deadline
from millrace.base.settings import Settings
from millrace_airflow.defaults import WATCH_FOR, supervising_dag
from millrace_airflow.hooks import MillraceHook
from millrace_airflow.streaming import StreamingJobOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from millrace.pipelines.store.records import Record
    from millrace.runtime.launch.command import JobSpec
    from millrace.runtime.launch.launcher import Launcher
    from millrace_airflow.job_monitor import StreamingJobMonitor

_LOOK_SECONDS = 5.0


class PipelineOperator(StreamingJobOperator):
    """Keeps the worker of one pipeline running while the pipeline should run; while it is STOPPED, only waits.

    :param pipeline: its id.
    """

    def __init__(self, *, pipeline: str, **arguments: Any) -> None:
        super().__init__(job="pipeline", arguments=(), supervised=True, **arguments)
        self.pipeline = pipeline

    def execute(self, context: Context) -> dict[str, Any]:
        """Watch the worker for a while; return its restarts and figures."""
        end = Deadline.after(float(self.watch_for))
        while self._stopped():
            self.log.info("%s is STOPPED: waiting until it is resumed", self.pipeline)
            if not end.pause(_LOOK_SECONDS):
                return {"restarts": 0, "queries": {}}
        return super().execute(context)

    def _start(
        self,
        watch: StreamingJobMonitor,
        launcher: Launcher,
        *,
        until: Deadline | None = None,
        paused: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Start the worker when the pipeline should run. Stopping the pipeline stopped its worker."""
        until = until or Deadline.after(float(self.watch_for))
        while self._stopped():
            if until.expired() or paused():
                return False
            watch.sleep(until.remaining(maximum=_LOOK_SECONDS))
        return super()._start(watch, launcher, until=until, paused=paused)

    def _job(self) -> JobSpec:
        from millrace.pipelines.deploy.airflow import worker_of

        return worker_of(MillraceHook(data_dir=self.data_dir).settings, self.pipeline)

    def _stopped(self) -> bool:
        from millrace.pipelines.deploy.airflow import wanted
        from millrace.pipelines.store.records import STOPPED

        return wanted(MillraceHook(data_dir=self.data_dir).settings, self.pipeline) in (STOPPED, "")


def pipeline_dags(settings: Settings | None = None) -> dict[str, DAG]:
    """Return a DAG, by id, for each pipeline with ``deployment: airflow``.

    Raises MetaUnavailable, which Airflow shows as an import error while it keeps the known DAGs.
    """
    from millrace.flows.range_host.observed import dag_id
    from millrace.pipelines.deploy.airflow import airflow_pipelines

    settings = settings or Settings.load()
    return {dag_id(record.id): pipeline_dag(record) for record in airflow_pipelines(settings)}


def pipeline_dag(record: Record) -> DAG:
    """Return the DAG that keeps one pipeline's worker running."""
    from millrace.flows.range_host.observed import dag_id, run_id
    from millrace.pipelines.deploy.airflow import app_name

    doc = (
        f"Pipeline {record.id}: keeps its worker running"
        f" (jobs/pipeline.py).\n\n{record.declaration.get('description', '')}"
    )
    # The pipeline's wanted state decides: nobody should have to unpause the DAG as well.
    with supervising_dag(dag_id(record.id), doc=doc, tags=["streaming", "pipeline"], paused=False) as dag:
        PipelineOperator(
            task_id="supervise",
            pipeline=record.id,
            job_run_id=run_id(record.id),
            app_name=app_name(record.id),
            watch_for=WATCH_FOR,
            priority_weight=50,
        )
    return dag
