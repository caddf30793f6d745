"""Operators: an operation as a task.

    JobOperator(task_id="compact", operation=COMPACTION)

The task starts the job detached (millrace.runtime.launch.launcher), gives its worker slot back and is woken when the
job has ended. Its result is the job's report. A worker or triggerer that dies changes nothing for the job: the task's
next try, or the trigger's next start, finds the run by its id. Streaming jobs, which do not end, have an operator of
their own (:mod:`millrace_airflow.streaming`).
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow.sdk import BaseOperator

from millrace.base.errors import InvalidArgument
from millrace_airflow.errors import raise_for
from millrace_airflow.forms import values
from millrace_airflow.hooks import MillraceHook
from millrace_airflow.links import JobLogLink, ReportLink, SparkUiLink
from millrace_airflow.triggers import JobTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

    from millrace.operations.operation import Operation
    from millrace.runtime.launch.launcher import RunStatus


class LaunchedOperator(BaseOperator):
    """Waits for the end of a launched run without holding a worker slot; returns its report.

    A permanent error fails the task at once; any other raises a JobError, to which the retry policy applies. Marking
    the task failed, or clearing it, stops the job.

    :param timeout: the job is stopped, and the task fails, when it has run this long.
    :param data_dir: a data folder instead of the settings' own; templated.
    :param poll_seconds: pause between two checks of the job.
    """

    template_fields: Sequence[str] = ("data_dir",)

    def __init__(
        self,
        *,
        timeout: timedelta | None = None,
        data_dir: str | None = None,
        poll_seconds: float = 1.0,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.timeout = timeout
        self.data_dir = data_dir
        self.poll_seconds = poll_seconds

    def await_end(self, context: Context, status: RunStatus) -> dict[str, Any]:
        """Wait in the triggerer for a run that was started, or return the report of one that has ended."""
        self.log.info("job %s: run %s, attempt %d, log %s", status.job, status.run_id, status.attempt, status.log)
        context["ti"].xcom_push(key="millrace_run_id", value=status.run_id)
        if status.active:
            stop_at = None if self.timeout is None else time.time() + self.timeout.total_seconds()
            self.defer(
                trigger=JobTrigger(
                    run_id=status.run_id, data_dir=self.data_dir, poll_seconds=self.poll_seconds, stop_at=stop_at
                ),
                method_name="execute_complete",
            )
        return self.ended(status, late=False)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the ended job."""
        launcher = MillraceHook(data_dir=self.data_dir).launcher()
        return self.ended(launcher.poll(event["run_id"]), late=event["late"])

    def on_kill(self) -> None:
        """Log that the task was killed while it starts the job. The next try finds the job, or the trigger stops it."""
        self.log.warning("killed while it started its job")

    def ended(self, status: RunStatus, *, late: bool) -> dict[str, Any]:
        """Return the report of a run that has ended. Raises JobError and AirflowFailException as the class says."""
        from millrace.runtime.launch.launcher import RunState

        if status.state is not RunState.FINISHED:
            self.log.error("the job's last lines:\n%s", status.tail())
            self._fail(status, late=late)
        MillraceHook(data_dir=self.data_dir).launcher().mark_collected(status.run_id)
        return status.report or {}

    def _fail(self, status: RunStatus, *, late: bool) -> NoReturn:
        if late and self.timeout is not None:
            words = (
                f"stopped after {self.timeout.total_seconds():.0f} s (the task's timeout); raise it, or give the job"
                " less to do"
            )
            raise_for("DEADLINE_EXCEEDED", words, retriable=True)
        if status.error is not None:
            raise_for(status.error.code, status.error.message, retriable=status.error.retriable)
        raise_for("JOB_STOPPED", f"run {status.run_id} was stopped", retriable=False)


class JobOperator(LaunchedOperator):
    """Runs an operation's job to its end without holding a worker slot; returns its report.

    The parameters are those of the DAG run's form that the operation has, overridden by `job_params` (templated); they
    are checked before anything starts.

    :param operation: its declaration. An operation that is not registered (millrace.operations.registry) is the file of
    jobs/ with its name.
    :param job_params: parameters that do not come from the form; templated. None values are left out.
    :param check: called with the report; raise from it to fail the task although its job succeeded.
    """

    template_fields: Sequence[str] = ("job_params", "data_dir")
    template_fields_renderers: ClassVar[dict[str, str]] = {"job_params": "json"}
    operator_extra_links = (ReportLink(), JobLogLink(), SparkUiLink())
    ui_color = "#dcebf7"

    def __init__(
        self,
        *,
        operation: Operation,
        job_params: Mapping[str, Any] | None = None,
        check: Callable[[dict[str, Any]], None] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.operation = operation
        self.job_params = dict(job_params or {})
        self.check = check

    def execute(self, context: Context) -> dict[str, Any]:
        """Start the job, or attach to the one that an earlier try started, and wait for it in the triggerer."""
        from millrace.operations.registry import find_job

        launcher = MillraceHook(data_dir=self.data_dir).launcher()
        given = values(self.operation.params, dict(context["params"]))
        given.update({name: value for name, value in self.job_params.items() if value is not None})
        try:
            chosen = self.operation.params.parse(given).model_dump(mode="json")
        except InvalidArgument as error:
            raise_for(error.code, str(error), retriable=False)
        status = launcher.start(run_id_of(context), find_job(self.operation.name), params=chosen)
        return self.await_end(context, status)

    def ended(self, status: RunStatus, *, late: bool) -> dict[str, Any]:
        """Return the job's report after `check`. If `check` raises, the next try runs the job again."""
        report = super().ended(status, late=late)
        if self.check is not None:
            self.check(report)
        return report


def run_id_of(context: Context) -> str:
    """Return the run id of a task instance: stable across its tries, unique, and short enough for a folder."""
    ti = context["ti"]
    index = getattr(ti, "map_index", -1)
    whole = f"{ti.dag_id}/{ti.task_id}/{ti.run_id}/{index}"
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{ti.dag_id}.{ti.task_id}.{ti.run_id}")[:120].strip("-.")
    suffix = "" if index is None or index < 0 else f".{index}"
    return f"{readable}{suffix}.{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
