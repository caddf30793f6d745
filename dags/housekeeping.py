"""Housekeeping: remove Airflow's old history and logs, run folders, reports and results of checks.

One task, one job, once a day. Each area has a setting for the days that it keeps (30 by default), and the report says
what each of them freed. Nothing that a read or a running job needs is removed, nor anything that waits for a person:
positions, parked PChannels, spools, dead letters and blocks stay.
"""

from __future__ import annotations

from datetime import timedelta

from millrace.operations.housekeeping.declaration import HOUSEKEEPING
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator

with operation_dag(
    HOUSEKEEPING,
    doc=__doc__,
    schedule="39 3 * * *",
    deadline=timedelta(hours=2),
) as dag:
    JobOperator(task_id="trim", operation=HOUSEKEEPING)
