"""DAGs of flows with a schedule: one each. A run moves what the source has at its start, and ends.

    globals().update(scheduled_dags())      # in a file of dags/

Flows of either host have one. A flow without a schedule runs always (:mod:`millrace_airflow.streams`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowSkipException

from millrace.base.settings import Settings
from millrace.flows.declare.discovery import declared_flows
from millrace.flows.declare.flow import Flow
from millrace.flows.status import scheduled_dag_id
from millrace_airflow.defaults import millrace_dag
from millrace_airflow.hooks import MillraceHook
from millrace_airflow.links import JobLogLink, SparkUiLink
from millrace_airflow.operators import LaunchedOperator
from millrace_airflow.streams import require_startable, table_asset

if TYPE_CHECKING:
    from airflow.sdk import Context

    from millrace.runtime.launch.launcher import RunStatus

_REPORTED: Final = {"state", "rows_in", "rows_out", "rows_error", "rows_late", "lag_records", "lag_seconds"}


class ScheduledFlowOperator(LaunchedOperator):
    """Runs a flow up to the source's end as of its start, without holding a worker slot; returns its counts.

    If the flow is running already, wait for it. If it is paused, skip the run.

    :param flow: its name.
    """

    operator_extra_links = (JobLogLink(), SparkUiLink())
    ui_color = "#e3f1e1"

    def __init__(self, *, flow: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.flow = flow

    def execute(self, context: Context) -> dict[str, Any]:
        """Start the flow and wait for its end.

        Raises InvalidStream if it cannot run, StreamNotFound, and InvalidSettings for a connection that Airflow lacks.
        """
        from millrace.flows.control import is_paused, run_id_of, start_flow
        from millrace.flows.directory import find_flow

        settings = MillraceHook(data_dir=self.data_dir).settings
        flow = find_flow(settings, self.flow)
        if is_paused(settings, flow):
            raise AirflowSkipException(f"{self.flow} is paused: `millrace flows resume {self.flow}`")
        if flow.stream is not None:  # before a JVM starts, so that a flow that cannot run fails at once
            require_startable(settings, flow.stream)
        ended = self._ended_before(run_id_of(flow), context)
        return self.await_end(context, ended or start_flow(settings, flow, password_of=password_of))

    def ended(self, status: RunStatus, *, late: bool) -> dict[str, Any]:
        """Return the flow's status after its run."""
        from millrace.flows.directory import find_flow, status_of

        super().ended(status, late=late)
        settings = MillraceHook(data_dir=self.data_dir).settings
        counts = status_of(settings, find_flow(settings, self.flow)).model_dump(mode="json", include=_REPORTED)
        self.log.info("%s: %s", self.flow, ", ".join(f"{name} {count}" for name, count in counts.items()))
        return counts

    def _ended_before(self, run_id: str, context: Context) -> RunStatus | None:
        """Return the run that an earlier try of this task started, if it has finished its work."""
        from millrace.base.errors import RunNotFound
        from millrace.runtime.launch.launcher import RunState

        begun = context["dag_run"].start_date
        try:
            known = MillraceHook(data_dir=self.data_dir).launcher().poll(run_id)
        except RunNotFound:
            return None
        done = known.state is RunState.FINISHED and not known.collected
        return known if done and begun is not None and known.started_at >= begun.timestamp() else None


def password_of(connection: str) -> str:
    """Return the password of an Airflow connection. Raises InvalidSettings if there is none."""
    from airflow.sdk import Connection
    from airflow.sdk.exceptions import AirflowNotFoundException

    from millrace.base.errors import InvalidSettings

    try:
        found = Connection.get(connection).password
    except AirflowNotFoundException:
        found = None
    if not found:
        raise InvalidSettings(
            f"Airflow has no connection {connection} with a password, which the flow's declaration uses: add it"
            f" (`airflow connections add {connection} ...`, or Admin, Connections)"
        )
    return str(found)


def scheduled_dags(settings: Settings | None = None) -> dict[str, DAG]:
    """Return a DAG, by id, for each declared flow with a schedule. Raises InvalidStream, which Airflow shows."""
    flows = declared_flows(settings or Settings.load()).values()
    return {scheduled_dag_id(each.name): scheduled_dag(each) for each in flows if each.scheduled}


def scheduled_dag(flow: Flow) -> DAG:
    """Return the DAG that runs a flow by its schedule. It starts paused: unpause it to run the flow."""
    reads, writes = _tables(flow)
    with millrace_dag(
        scheduled_dag_id(flow.name),
        doc=_words(flow, reads, writes),
        schedule=flow.schedule,
        tags=["streaming", "flow"],
        paused=True,
    ) as dag:
        ScheduledFlowOperator(
            task_id="run",
            flow=flow.name,
            inlets=[table_asset(name) for name in sorted(set(reads))],
            outlets=[table_asset(name) for name in sorted(set(writes))],
            priority_weight=50,
        )
    return dag


def _tables(flow: Flow) -> tuple[list[str], list[str]]:
    if flow.host == "spark":
        return list(flow.reads), list(flow.writes)
    from millrace.flows.range_host.observed import described

    found = described(flow)
    return list(found["reads"]), list(found["writes"])


def _words(flow: Flow, reads: list[str], writes: list[str]) -> str:
    return "\n".join(
        [
            f"Flow {flow.name}: runs at `{flow.schedule}` (UTC) to what its source has then.",
            "",
            f"{', '.join(reads)} to {', '.join(writes)}, {flow.chosen_guarantee}. {flow.description}".rstrip(),
            "",
            "A run starts where the last one ended. Trigger the DAG for a run at once. While the flow is paused"
            " (`millrace flows pause`), runs are skipped.",
        ]
    )
