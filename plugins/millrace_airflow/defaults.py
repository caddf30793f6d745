"""What every DAG of Millrace has: owner, tags, retries by fault class, a deadline alert, docs from its file's
docstring.

with operation_dag(COMPACTION, doc=__doc__, deadline=timedelta(hours=1)) as dag:
    JobOperator(task_id="compact", operation=COMPACTION)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow.sdk import (  # type: ignore[attr-defined] # its stub file leaves the deadlines out
    DAG,
    AsyncCallback,
    DeadlineAlert,
    DeadlineReference,
    ExceptionRetryPolicy,
    Param,
    RetryAction,
    RetryRule,
)
from airflow.sdk.definitions.retry_policy import RetryDecision
from pydantic import Field

from millrace.base.errors import MillraceError
from millrace.operations.operation import Operation, OperationParams
from millrace_airflow.alerts import run_callbacks
from millrace_airflow.errors import JobConflict, JobLost, JobUnavailable
from millrace_airflow.forms import form

OWNER: Final = "millrace"
TAG: Final = "millrace"
START: Final = datetime(2026, 1, 1, tzinfo=UTC)


class FaultClassPolicy(ExceptionRetryPolicy):
    """Retries by fault class: a conflict soon, what does not answer after a while; what a retry cannot cure, never.

    An exception of Millrace's own family is asked whether it is retriable; anything else gets the task's ordinary
    retries.
    """

    def __init__(self) -> None:
        super().__init__(
            rules=[
                RetryRule(JobConflict, RetryAction.RETRY, timedelta(seconds=5), "another writer was first"),
                RetryRule(
                    JobUnavailable, RetryAction.RETRY, timedelta(seconds=30), "what it needs does not answer yet"
                ),
                RetryRule(JobLost, RetryAction.RETRY, timedelta(seconds=15), "its process was lost"),
            ]
        )

    def evaluate(self, exception: BaseException, try_number: int, max_tries: int, context: Any = None) -> RetryDecision:
        if isinstance(exception, MillraceError):
            if not exception.retriable:
                return RetryDecision.fail(f"{exception.code}: a retry cannot cure it")
            return RetryDecision.retry(timedelta(seconds=15), f"{exception.code} may pass")
        return super().evaluate(exception, try_number, max_tries, context)


def default_args(**changes: Any) -> dict[str, Any]:
    """Defaults of every task: owner, three retries with back-off, the policy above."""
    return {
        "owner": OWNER,
        "retries": 3,
        "retry_delay": timedelta(seconds=20),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=5),
        "retry_policy": FaultClassPolicy(),
        **changes,
    }


def operation_dag(operation: Operation, *, doc: str | None, **arguments: Any) -> DAG:
    """Return the DAG of an operation, with its id, form, tags and retries; `arguments` go to :func:`millrace_dag`."""
    asked = form(operation.params, **operation.dag_defaults)
    return millrace_dag(
        operation.dag_id,
        doc=doc,
        params={name: param for name, param in asked.items() if name not in operation.set_by_dag},
        tags=operation.tags or (operation.name,),
        task_defaults={"retries": operation.retries},
        **arguments,
    )


def millrace_dag(
    dag_id: str,
    *,
    doc: str | None,
    schedule: Any = None,
    params: Mapping[str, Param] | None = None,
    tags: Sequence[str] = (),
    deadline: timedelta | None = timedelta(hours=1),
    on_deadline: Callable[..., Any] | str = "millrace_airflow.alerts.deadline_missed",
    task_defaults: Mapping[str, Any] | None = None,
    paused: bool = False,
    **arguments: Any,
) -> DAG:
    """A DAG with the defaults above; use it as a context manager. It runs from the start unless it begins `paused`.

    `doc` is the file's ``__doc__``: its first line is the description, all of it the docs page. `deadline`: how long
    after a run was queued `on_deadline` is called where it has not ended (None: never). `task_defaults` go over the
    default arguments; `arguments` go to DAG as they are (max_active_runs is 1 where it is not given).
    """
    words = (doc or "").strip()
    alert = None
    if deadline is not None:
        alert = DeadlineAlert(
            reference=DeadlineReference.DAGRUN_QUEUED_AT,
            interval=deadline,
            callback=AsyncCallback(on_deadline, kwargs={"dag_id": dag_id, "seconds": deadline.total_seconds()}),
            name=f"{dag_id} is late",
        )
    return DAG(
        dag_id=dag_id,
        schedule=schedule,
        start_date=arguments.pop("start_date", START),
        catchup=arguments.pop("catchup", False),
        max_active_runs=arguments.pop("max_active_runs", 1),
        description=words.splitlines()[0] if words else None,
        doc_md=words or None,
        params=dict(params or {}),
        tags=[TAG, *tags],
        default_args=default_args(**(task_defaults or {})),
        deadline=alert,
        **{**run_callbacks(), **arguments},
        is_paused_upon_creation=paused,
    )


class WatchParams(OperationParams):
    """Parameters of a DAG that keeps a streaming job alive."""

    watch_seconds: int = Field(
        3600,
        ge=5,
        le=86400,
        title="Watch for (seconds)",
        description="How long this run watches the job before the next run takes over; the job goes on meanwhile.",
    )


WATCH_FOR: Final = "{{ params.watch_seconds }}"
"""What the form of :func:`supervising_dag` says, for the operator's `watch_for`."""


def supervising_dag(dag_id: str, *, doc: str | None, tags: Sequence[str], paused: bool = True, **arguments: Any) -> DAG:
    """A DAG that keeps one streaming job alive: run after run, each of which watches for as long as its form says.

    `arguments` go to DAG.
    """
    return millrace_dag(
        dag_id,
        doc=doc,
        paused=paused,
        schedule="@continuous",
        tags=tags,
        deadline=timedelta(hours=2),
        params=form(WatchParams),
        task_defaults={"retries": 20, "retry_delay": timedelta(seconds=5), "max_retry_delay": timedelta(minutes=1)},
        **arguments,
    )
