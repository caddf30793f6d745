"""Runs the light job of the tests, as a DAG of a user would run a job of Millrace."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator
from tests.runtime.light_job import LIGHT

with operation_dag(replace(LIGHT, retries=0), doc=__doc__) as dag:  # dag.test() would sit through the pauses
    JobOperator(
        task_id="run",
        operation=LIGHT,
        job_params={
            "number": "{{ params.number * 2 }}",
            "write": "{{ params.write }} since {{ macros.millrace.moment_of(0).year }}",
        },
        poll_seconds=0.05,
        timeout=timedelta(seconds=3),
    )
