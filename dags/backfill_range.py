"""Backfill of a range: rebuild any range of a derived table in slices that run in parallel and restart alone.

Fill in **start** and **end** (whole hours in UTC; end is exclusive) and trigger. `plan` lists the slices and fixes one
tick of the source for all of them. `rebuild` is one task for each share of the slices, as many as operations may run at
once; the slices of a share use one Spark session. Clear a task to run it again; it skips the slices that are done.
Readers of the table see a slice's old rows or its new ones, never a mix.

- **range_of = ticks**: start and end are times of arrival. Rebuilds the days of event time that changed in between
  because of late rows, deletes or dropped partitions.
- **slice_hours**: use 24 if you can: slices of whole days never wait for each other.
- **dry_run**: stop after the plan; its result lists the slices.
- The setting `backfill_parallel` is the number of slices of a share that run at once.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import TriggerRule, task

from millrace.operations.backfill.declaration import BACKFILL, BACKFILL_PLAN
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator


@task
def shares(plan: dict[str, Any], **context: Any) -> list[dict[str, Any]]:
    """Return the parameters of each share's task; none in a dry run."""
    found: list[dict[str, Any]] = [] if context["params"]["dry_run"] else plan["runs"]
    return found


@task(trigger_rule=TriggerRule.NONE_FAILED)
def summary(plan: dict[str, Any], reports: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the totals of the run: slices and rows."""
    done = list(reports or [])
    return {
        "table": plan["table"],
        "at": plan["at"],
        "planned": len(plan["slices"]),
        "rebuilt": sum(len(each["slices"]) for each in done),
        "rows": sum(each["rows"] for each in done),
    }


with operation_dag(
    BACKFILL_PLAN,
    doc=__doc__,
    max_active_runs=4,
    deadline=timedelta(hours=12),
) as dag:
    plan = JobOperator(
        task_id="plan",
        operation=BACKFILL_PLAN,
        job_params={"run_id": "{{ run_id }}/{{ dag_run.clear_number }}"},
    )
    rebuilt = JobOperator.partial(
        task_id="rebuild",
        operation=BACKFILL,
    ).expand(job_params=shares(plan.output))
    summary(plan.output, rebuilt.output)
