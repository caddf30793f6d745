"""Move: take the tables to another place, a disk or an object store, while everything runs.

One task, one job. It copies each table, compares every file by its SHA-256, closes the tables, and lets the deployment
continue in the new place. Producers notice nothing; the streaming job and flows start again by themselves. A run that
was killed is triggered again with the same form, or with an empty one, and continues. Nothing of the old place is
removed until a run with `remove_old`. See docs/moving.md.
"""

from __future__ import annotations

from datetime import timedelta

from millrace.operations.move.declaration import MOVE
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator

with operation_dag(MOVE, doc=__doc__, deadline=timedelta(hours=24)) as dag:
    JobOperator(task_id="move", operation=MOVE)
