"""The common parts of Millrace's DAGs: owner, tags, retries by kind of error, deadline alert, docs from docstrings.

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
    """Retries by kind of error: conflicts soon, unavailable services after a while, permanent errors never.

    A MillraceError says whether it is retriable. Any other exception gets the task's ordinary retries.
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
                return RetryDecision.fail(f"{exception.code}: a retry cannot help")
            return RetryDecision.retry(timedelta(seconds=15), f"{exception.code} may be transient")
        return super().evaluate(exception, try_number, max_tries, context)


def default_args(**changes: Any) -> dict[str, Any]:
    """Return the defaults of every task: owner, three retries with back-off, and the policy above."""
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
    """Return a DAG with the defaults above, for use as a context manager. It starts unpaused unless `paused`.

    `doc` is the file's ``__doc__``: its first line is the description, all of it the docs page. `on_deadline` is called
    if a run has not ended `deadline` after it was queued (None: never). `task_defaults` override the default arguments;
    `arguments` are passed to DAG (max_active_runs defaults to 1).
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
    """Parameters of a DAG that keeps a streaming job running."""

    watch_seconds: int = Field(
        3600,
        ge=5,
        le=86400,
        title="Watch for (seconds)",
        description="How long this run watches the job before the next run takes over. The job keeps running.",
    )


WATCH_FOR: Final = "{{ params.watch_seconds }}"
"""The value of the form of :func:`supervising_dag`, for the operator's `watch_for`."""


def supervising_dag(dag_id: str, *, doc: str | None, tags: Sequence[str], paused: bool = True, **arguments: Any) -> DAG:
    """Return a DAG that keeps one streaming job running. Each run watches it for as long as its form says.

    `arguments` are passed to DAG.
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
