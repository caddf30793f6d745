"""Recovery: find inconsistencies between the log, the WAL and the collections, repair them, and verify the repair.

1. `diagnose` only reads. Its report names each finding; without findings the remaining tasks are skipped.
2. `rehearse` repairs a shallow clone of the tables and discards it. If the clone is still inconsistent, the run stops
   there and nothing is changed.
3. `approve` waits for a person if a repair would remove rows that no message of the WAL backs. Rejecting changes
   nothing.
4. `repair` repairs, diagnoses again, and fails if a finding remains. Its report says which, and why.

Mode *diagnose* stops after the first step. docs/operating.md, "Recovery", explains each finding and its repair.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import task

from millrace.operations.recovery.declaration import RECOVERY
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator


def must_be_healthy(report: dict[str, Any]) -> None:
    """Fail the task if a finding remains after the repairs."""
    left = "; ".join(f"{each['kind']} {each['subject']}: {each['words']}" for each in report["remaining"])
    if not report["healthy"]:
        raise RuntimeError(f"not repaired: {left}. The report of the task says what was tried.")


with operation_dag(
    RECOVERY,
    doc=__doc__,
    schedule="27,57 * * * *",  # off the minutes at which other DAGs start: a small machine has two cores
    deadline=timedelta(hours=6),
) as dag:
    diagnose = JobOperator(task_id="diagnose", operation=RECOVERY, job_params={"mode": "diagnose"})

    @task.short_circuit(task_id="wrong")
    def something_to_repair(report: dict[str, Any], params: dict[str, Any] | None = None) -> bool:
        """Go on if there are findings and the run may repair them."""
        return not report["healthy"] and (params or {})["mode"] != "diagnose"

    rehearse = JobOperator(
        task_id="rehearse",
        operation=RECOVERY,
        job_params={"mode": "rehearse", "allow_destructive": True},
        check=must_be_healthy,
    )

    @task.branch(task_id="who_decides")
    def approval_or_not(report: dict[str, Any], params: dict[str, Any] | None = None) -> str | None:
        """Ask a person if a repair would remove rows; end a rehearsal here."""
        chosen = params or {}
        if chosen["mode"] == "rehearse":
            return None
        return "approve" if report["needs_approval"] and not chosen["allow_destructive"] else "repair"

    approve = ApprovalOperator(
        task_id="approve",
        subject="Recovery would remove rows that no message of the WAL backs",
        body="{% for each in ti.xcom_pull(task_ids='diagnose')['findings'] if each['destructive'] %}"
        "- `{{ each['subject'] }}`: {{ each['words'] }}\n{% endfor %}",
    )

    repair = JobOperator(
        task_id="repair",
        operation=RECOVERY,
        job_params={"mode": "repair", "allow_destructive": "{{ ti.xcom_pull(task_ids='diagnose')['needs_approval'] }}"},
        check=must_be_healthy,
        trigger_rule="none_failed_min_one_success",
    )

    something_to_repair(diagnose.output) >> rehearse >> approval_or_not(diagnose.output) >> [approve, repair]
    approve >> repair
