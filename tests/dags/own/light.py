"""Runs the light job of the tests, as a DAG of a user would run a job of Millrace."""

from __future__ import annotations

from datetime import timedelta

from millrace_airflow.defaults import millrace_dag
from millrace_airflow.forms import form
from millrace_airflow.operators import JobOperator
from tests.ops.light_job import LightParams

with millrace_dag(
    "light",
    doc=__doc__,
    params=form(LightParams),
    task_defaults={"retries": 0},  # dag.test() would sit through the pauses
) as dag:
    JobOperator(
        task_id="run",
        job="light",
        params_class=LightParams,
        job_params={
            "number": "{{ params.number * 2 }}",
            "write": "{{ params.write }} since {{ macros.millrace.moment_of(0).year }}",
        },
        poll_seconds=0.05,
        timeout=timedelta(seconds=3),
    )
