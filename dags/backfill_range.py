"""Backfill of a range: rebuilds any range of a derived table, in slices that run at once and restart alone.

Fill in **start** and **end** (whole hours in UTC, end not included) and trigger. `plan` reads which slices there are and at
which tick of the source all of them are built; `rebuild` is one task a slice; clear one of them, and it alone runs again.
Readers of the table see a slice's old rows or its new ones, never a mix.

- **range_of = ticks**: start and end are moments of arrival. Rebuilds the days of event time that changed in between, be it by
  late rows, deletes or dropped partitions.
- **slice_hours**: 24 is best: slices of whole days never wait for each other.
- **dry_run**: stop behind the plan; its result lists the slices.
- How many slices run at once is the setting `backfill_parallel`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import TriggerRule, task

from millrace.base.settings import Settings
from millrace.operations.backfill.declaration import BACKFILL, BACKFILL_PLAN
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator


@task
def slices(plan: dict[str, Any], **context: Any) -> list[dict[str, Any]]:
    """The parameters of each slice's task; none in a dry run."""
    found: list[dict[str, Any]] = [] if context["params"]["dry_run"] else plan["slices"]
    return found


@task(trigger_rule=TriggerRule.NONE_FAILED)
def summary(plan: dict[str, Any], reports: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What the run came to: slices and rows."""
    done = list(reports or [])
    return {
        "table": plan["table"],
        "at": plan["at"],
        "planned": len(plan["slices"]),
        "rebuilt": len(done),
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
        max_active_tis_per_dagrun=Settings.load().backfill_parallel,
    ).expand(job_params=slices(plan.output))
    summary(plan.output, rebuilt.output)
