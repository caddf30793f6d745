"""Backfill of a range: rebuilds any range of a derived table, in slices that run at once and restart alone.

Fill in **start** and **end** (whole hours in UTC, end not included) and trigger. `plan` reads which slices there are and at
which tick of the source all of them are built; `rebuild` is a task for each share of them, as many as operations may run at once: the
slices of a share have one Spark session. Clear one, and it alone runs again; slices that are done are left alone.
Readers of the table see a slice's old rows or its new ones, never a mix.

- **range_of = ticks**: start and end are moments of arrival. Rebuilds the days of event time that changed in between, be it by
  late rows, deletes or dropped partitions.
- **slice_hours**: 24 is best: slices of whole days never wait for each other.
- **dry_run**: stop behind the plan; its result lists the slices.
- How many slices of a share run at once is the setting `backfill_parallel`.
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
    """The parameters of each share's task; none in a dry run."""
    found: list[dict[str, Any]] = [] if context["params"]["dry_run"] else plan["runs"]
    return found


@task(trigger_rule=TriggerRule.NONE_FAILED)
def summary(plan: dict[str, Any], reports: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What the run came to: slices and rows."""
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
