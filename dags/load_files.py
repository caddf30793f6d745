"""Load files: load the rows of Parquet, CSV or JSON lines files into a collection, each row once.

Fill in **collection** and **files** (absolute paths or patterns, on the worker's machine) and trigger. Every row of
every file is checked and staged before anything is appended. Then one Import message for each slice names the staged
files. A slice becomes visible as a whole. Clear a task to resume it.

- Loading the same files into the same collection again does nothing, unless you name the load (**import_id**).
- A row that does not fit fails the task with its file and line, and nothing is loaded.
- An Import fails the transactions that are open on its VChannel, as DDL does.
- **dry_run**: only check.
"""

from __future__ import annotations

from datetime import timedelta

from millrace.operations.backfill.declaration import LOAD
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator

with operation_dag(
    LOAD,
    doc=__doc__,
    max_active_runs=4,
    deadline=timedelta(hours=12),
) as dag:
    JobOperator(task_id="load", operation=LOAD)
