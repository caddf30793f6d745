"""Load files: brings the rows of Parquet, CSV or JSON lines files into a collection, each row once.

Fill in **collection** and **files** (absolute paths or patterns, on the machine of the worker) and trigger. Every row of every file is
checked and kept before anything is appended; then one Import message for each slice names what was kept. A slice becomes
visible as a whole. Clear the task, and it goes on where it was.

- The same files into the same collection a second time do nothing, unless you give the load a name of its own (**import_id**).
- A row that does not fit fails the task, with its file and line, and nothing is loaded.
- An Import ends the transactions that are open on its VChannel, as DDL does.
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
