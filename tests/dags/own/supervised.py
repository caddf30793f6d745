"""Supervises the beating job of the tests, with little patience."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import Param

from millrace_airflow.defaults import millrace_dag
from millrace_airflow.streaming import StreamingJobOperator

with millrace_dag(
    "supervised",
    doc=__doc__,
    params={"watch_seconds": Param(2, type="number", description="How long to watch.")},
    task_defaults={"retries": 0},  # dag.test() would sit through the pauses
) as dag:
    StreamingJobOperator(
        task_id="supervise",
        watch_for="{{ params.watch_seconds }}",
        stale_after=timedelta(seconds=1),
        poll_seconds=0.05,
        say_every=timedelta(seconds=0.5),
    )
