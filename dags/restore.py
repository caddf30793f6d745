"""Restore: the rows of a collection at a time tick, or a moment, become a new collection.

1. `check` makes sure that the moment lies within what can be read, and counts the rows; nothing is made.
2. `restore` reads at that one tick, creates the collection, inserts the rows through a producer, and compares both by content.

The source is not touched: a collection changes only through messages. A run that was killed is repeated as it is: what it left
half-filled is dropped and made anew. To go back in place, restore into a new collection and have readers and producers use
it. See docs/restore.md.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import task

from millrace.ops.restore.params import RestoreParams
from millrace_airflow.defaults import millrace_dag
from millrace_airflow.forms import form
from millrace_airflow.operators import JobOperator

with millrace_dag(
    "restore",
    doc=__doc__,
    schedule=None,
    tags=["restore"],
    params=form(RestoreParams),
    deadline=timedelta(hours=6),
) as dag:
    check = JobOperator(task_id="check", job="restore", params_class=RestoreParams, job_params={"dry_run": True})

    @task.short_circuit(task_id="for_real")
    def not_a_dry_run(params: dict[str, object] | None = None) -> bool:
        """A dry run ends behind the check."""
        return not (params or {})["dry_run"]

    # The tick of the check: both tasks mean the same moment, also where the form said "now".
    restore = JobOperator(
        task_id="restore",
        job="restore",
        params_class=RestoreParams,
        job_params={"at": "{{ ti.xcom_pull(task_ids='check')['tick'] }}", "dry_run": False},
    )

    check >> not_a_dry_run() >> restore
