"""Backfill: rebuilds a derived table for the data interval of the run, a day unless you ask Airflow for more.

Each run rebuilds the rows of its own interval, in event time, in one commit: readers see the old slice or the new one. So
Airflow's own backfill rebuilds history, in the UI (Trigger, then Backfill), by CLI or by REST:

    airflow backfill create --dag-id backfill --from-date 2013-01-01 --to-date 2013-01-03 --reprocess-behavior completed

- A run that is repeated at the same tick of the source changes nothing; cleared, it rebuilds at the newest tick.
- A manual run without an interval of its own has nothing to rebuild and says so: **backfill_range** takes any range.
- **table**: which derived table (default: flights_hourly). Late rows: **range_of = ticks** rebuilds the days that changed in
  the source within the interval, whatever their own times are.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.sdk import CronDataIntervalTimetable

from millrace.base.settings import Settings
from millrace.operations.backfill.declaration import BACKFILL
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator

with operation_dag(
    BACKFILL,
    doc=__doc__,
    paused=True,  # its table has to be there; unpause it for a run each day
    schedule=CronDataIntervalTimetable("0 0 * * *", timezone="UTC"),
    start_date=datetime(2000, 1, 1, tzinfo=UTC),  # history can be rebuilt from here on; nothing is caught up by itself
    max_active_runs=Settings.load().backfill_parallel,
    deadline=timedelta(hours=6),
) as dag:
    JobOperator(
        task_id="rebuild",
        operation=BACKFILL,
        job_params={
            # Without an interval both are the same moment, and an empty range is refused in words.
            "start": "{{ (dag_run.data_interval_start or dag_run.run_after).isoformat() }}",
            "end": "{{ (dag_run.data_interval_end or dag_run.run_after).isoformat() }}",
            "run_id": "{{ run_id }}/{{ dag_run.clear_number }}",
        },
    )
