"""Release: a person accepts data that failed a critical expectation, so that truncation and VACUUM continue.

Give the ids of the blocks (the quality page and the report of *quality* show them). `approve` waits for a person;
rejecting changes nothing. `release` then lifts the blocks and the quarantine of their slices, and records who asked.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.providers.standard.operators.hitl import ApprovalOperator

from millrace.operations.quality.declaration import RELEASE
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator

with operation_dag(
    RELEASE,
    doc=__doc__,
    deadline=timedelta(days=1),
) as dag:
    approve = ApprovalOperator(
        task_id="approve",
        subject="Release data that failed a critical expectation",
        body="Blocks: {{ params.blocks | join(', ') }}\n\nAsked by {{ params.by }}: {{ params.note }}",
    )
    release = JobOperator(task_id="release", operation=RELEASE)
    approve >> release
