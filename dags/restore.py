"""Restore: the rows of a collection at a time tick, or a moment, become a new collection, or its own rows again.

1. `check` makes sure that the moment lies within what can be read, and counts the rows; nothing is made.
2. `approve` waits for a person where the collection itself is replaced (*in place*). Rejecting leaves all as it is.
3. `restore` reads at that one tick, and either creates the collection **into** and inserts the rows through a producer, or appends
   one Import to each VChannel, which puts the rows in the place of all that is there. Both are compared by content.

A collection changes only through messages: what a restore in place replaced can still be read at earlier ticks. A run that was killed
is repeated as it is. See docs/restore.md.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import task

from millrace.operations.restore.declaration import RESTORE
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator

with operation_dag(
    RESTORE,
    doc=__doc__,
    deadline=timedelta(hours=6),
) as dag:
    check = JobOperator(task_id="check", operation=RESTORE, job_params={"dry_run": True})

    @task.short_circuit(task_id="for_real", ignore_downstream_trigger_rules=True)
    def not_a_dry_run(params: dict[str, object] | None = None) -> bool:
        """A dry run ends behind the check."""
        return not (params or {})["dry_run"]

    @task.branch(task_id="who_decides")
    def approval_or_not(params: dict[str, object] | None = None) -> str:
        """A person decides where rows are replaced."""
        return "approve" if (params or {})["in_place"] else "restore"

    approve = ApprovalOperator(
        task_id="approve",
        subject="Replace the rows of {{ params['collection'] }}",
        body="All rows of `{{ params['collection'] }}` are replaced by the "
        "{{ ti.xcom_pull(task_ids='check')['rows'] }} rows that it had at {{ ti.xcom_pull(task_ids='check')['at'] }}. "
        "What was written since is gone from then on, and stays readable at earlier ticks.",
    )

    # The tick of the check: both tasks mean the same moment, also where the form said "now".
    restore = JobOperator(
        task_id="restore",
        operation=RESTORE,
        job_params={
            "at": "{{ ti.xcom_pull(task_ids='check')['tick'] }}",
            "dry_run": False,
            "run_id": "{{ run_id }}",
        },
        trigger_rule="none_failed_min_one_success",
    )

    check >> not_a_dry_run() >> approval_or_not() >> [approve, restore]
    approve >> restore
