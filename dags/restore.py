"""Restore: copy a collection's rows at a time tick or a moment into a new collection, or put them back in place.

1. `check` verifies that the moment can be read, and counts the rows. It changes nothing.
2. `approve` waits for a person if the collection itself is replaced (*in place*). Rejecting changes nothing.
3. `restore` reads at that tick. It either creates the collection **into** and inserts the rows through a producer, or
   appends one Import to each VChannel, which replaces all rows there. It compares both results by content.

A collection changes only through messages, so rows that a restore in place replaced can still be read at earlier ticks.
If a run was killed, repeat it unchanged. See docs/restore.md.
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
        """Stop after the check in a dry run."""
        return not (params or {})["dry_run"]

    @task.branch(task_id="who_decides")
    def approval_or_not(params: dict[str, object] | None = None) -> str:
        """Ask a person if rows are replaced."""
        return "approve" if (params or {})["in_place"] else "restore"

    approve = ApprovalOperator(
        task_id="approve",
        subject="Replace the rows of {{ params['collection'] }}",
        body="All rows of `{{ params['collection'] }}` are replaced by the "
        "{{ ti.xcom_pull(task_ids='check')['rows'] }} rows that it had at {{ ti.xcom_pull(task_ids='check')['at'] }}. "
        "Rows that were written since then disappear, and stay readable at earlier ticks.",
    )

    # Take the tick from the check, so that both tasks use the same moment even if the form said "now".
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
