"""Load files: inserts the rows of Parquet, CSV or JSON lines files into a collection, each row once.

Fill in **collection** and **files** (absolute paths or patterns, on the machine of the worker) and trigger. `stage` checks every
row of every file before anything is appended, and keeps them as digested slices; `load` is one task for each group of slices;
clear one, and it goes on where it was. A slice becomes visible as a whole.

- The same files into the same collection a second time do nothing, unless you give the load a name of its own (**import_id**).
- A row that does not fit fails `stage`, with its file and line, and nothing is loaded.
- **dry_run**: only check.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import task

from millrace.ops.backfill.params import LoadParams
from millrace.settings import Settings
from millrace_airflow.defaults import millrace_dag
from millrace_airflow.forms import form
from millrace_airflow.operators import JobOperator

TASKS = 64
"""Most tasks that the slices of one load are dealt to."""


@task
def groups(staged: dict[str, Any], **context: Any) -> list[dict[str, Any]]:
    """The parameters of each task of `load`; none in a dry run."""
    if context["params"]["dry_run"]:
        return []
    tasks = min(TASKS, len(staged["slices"]))
    return [
        {"step": "load", "import_id": staged["import_id"], "slices": staged["slices"][number::tasks]}
        for number in range(tasks)
    ]


with millrace_dag(
    "load_files",
    doc=__doc__,
    max_active_runs=4,
    tags=["backfill", "load"],
    deadline=timedelta(hours=12),
    params={name: param for name, param in form(LoadParams).items() if name not in ("parallel", "step", "slices")},
) as dag:
    staged = JobOperator(task_id="stage", job="load_files", params_class=LoadParams, job_params={"step": "stage"})
    loaded = JobOperator.partial(
        task_id="load",
        job="load_files",
        params_class=LoadParams,
        max_active_tis_per_dagrun=Settings.load().backfill_parallel,
    ).expand(job_params=groups(staged.output))
    finish = JobOperator(
        task_id="finish",
        job="load_files",
        params_class=LoadParams,
        job_params={"step": "finish", "import_id": "{{ ti.xcom_pull(task_ids='stage')['import_id'] }}"},
    )
    loaded >> finish
