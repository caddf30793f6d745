"""DAGs of declared streams: one for each stream or group, and an asset for each table that they read or write.

    globals().update(stream_dags())      # in a file of dags/

A run of such a DAG watches its job for a while, as that of ``streaming`` does. Pausing the DAG stops the job. A stream
that is paused by ``millrace flows pause`` stays paused whatever its DAG does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, Asset

from millrace.base.deadline import Deadline
from millrace.base.settings import Settings
from millrace.flows.declare.discovery import declared_flow, declared_flows
from millrace.flows.declare.flow import Flow
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.flows.spark_host.status import app_name, dag_id, run_id
from millrace_airflow.defaults import WATCH_FOR, supervising_dag
from millrace_airflow.hooks import MillraceHook
from millrace_airflow.streaming import StreamingJobOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from millrace.runtime.launch.command import JobSpec


def table_asset(target: str) -> Asset:
    """Return the asset of a stream's input or output: ``collection:flights`` is ``millrace://collection/flights``."""
    kind, _, name = target.partition(":")
    return Asset(target, uri=f"millrace://{kind}/{name.strip('/') or kind}", group="millrace")


def require_startable(settings: Settings, stream: Flow) -> None:
    """Raise InvalidStream if a stream cannot run, or cannot continue from its state."""
    # Loads pandas and Arrow, which a DAG file must not.
    from millrace.flows.declare.checks import check, require_runnable

    require_runnable(stream, check(settings, stream))
    Incarnations(settings, stream.name).startable(stream)


class DeclaredStreamOperator(StreamingJobOperator):
    """Keeps the job of one or more declared streams running; while all of them are paused, only waits.

    :param streams: their names; the job runs those that are not paused.
    """

    def __init__(self, *, stream_job: str, streams: Sequence[str], **arguments: Any) -> None:
        super().__init__(
            job="stream",
            arguments=(),
            job_run_id=run_id(stream_job),
            app_name=app_name(stream_job),
            supervised=True,
            **arguments,
        )
        self.stream_job = stream_job
        self.streams = list(streams)

    def execute(self, context: Context) -> dict[str, Any]:
        """Watch the job for a while; return its restarts and figures. Raises InvalidStream if a stream cannot run."""
        settings = MillraceHook(data_dir=self.data_dir).settings
        end = Deadline.after(float(self.watch_for))
        while all(Incarnations(settings, name).state.paused for name in self.streams):
            self.log.info("paused by `millrace flows pause`: %s", ", ".join(self.streams))
            if not end.pause(10.0):
                return {"restarts": 0, "queries": {}}
        for (
            name
        ) in self.streams:  # before a JVM starts, so that a stream that cannot run fails at once, without retries
            stream = declared_flow(settings, name, host="spark")
            if not Incarnations(settings, name).state.paused:
                require_startable(settings, stream)
        return super().execute(context)

    def _job(self) -> JobSpec:
        from millrace.flows.control import stream_job

        return stream_job(self.stream_job)


def stream_dags(settings: Settings | None = None) -> dict[str, DAG]:
    """Return a DAG, by id, for each stream or group of streams without a schedule.

    Raises InvalidStream, which Airflow shows as an import error.
    """
    by_job: dict[str, list[Flow]] = {}
    for each in declared_flows(settings or Settings.load(), host="spark").values():
        if each.scheduled:  # millrace_airflow.flows
            continue
        by_job.setdefault(each.job, []).append(each)
    return {dag_id(job): stream_dag(job, streams) for job, streams in sorted(by_job.items())}


def stream_dag(job: str, streams: Sequence[Flow]) -> DAG:
    """Return the DAG that keeps one job of streams running. It starts paused: unpause it to run the stream."""
    # A run fails only with permanent errors: Airflow then pauses the DAG, since the next run would fail the same way.
    with supervising_dag(
        dag_id(job), doc=_words(job, streams), tags=["streaming", "stream"], max_consecutive_failed_dag_runs=1
    ) as dag:
        DeclaredStreamOperator(
            task_id="supervise",
            stream_job=job,
            streams=[each.name for each in streams],
            watch_for=WATCH_FOR,
            inlets=[table_asset(name) for name in sorted({name for each in streams for name in each.reads})],
            outlets=[table_asset(target) for target in sorted({target for each in streams for target in each.writes})],
            priority_weight=50,
        )
    return dag


def _words(job: str, streams: Sequence[Flow]) -> str:
    lines = [f"Flow {job}: keeps its job running (jobs/stream.py {job}).", ""]
    for each in streams:
        lines.append(
            f"- `{each.name}`: {each.row_source.target} to {each.row_sink.target},"
            f" {each.chosen_guarantee}. {each.description}".rstrip()
        )
    return "\n".join(
        [*lines, "", "Pausing this DAG stops the job between two micro-batches; unpausing starts it again."]
    )
