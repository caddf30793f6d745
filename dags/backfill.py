"""Backfill: rebuild a derived table for the run's data interval (by default one day).

Each run replaces the rows of its own interval, in event time, in one commit. Readers see either the old slice or the
new one. Airflow's own backfill therefore rebuilds history, from the UI (Trigger, then Backfill), the CLI or REST:

    airflow backfill create --dag-id backfill --from-date 2013-01-01 --to-date 2013-01-03 --reprocess-behavior completed

- Repeating a run at the same tick of the source changes nothing. Clearing a run rebuilds it at the newest tick.
- A manual run without a data interval fails: it has nothing to rebuild. Use **backfill_range** for any range.
- **table**: the derived table to rebuild (default: flights_hourly).
- **range_of = ticks**: for late rows. Rebuilds the days that changed in the source within the interval, whatever their
  event times are.
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
    paused=True,  # its table must exist; unpause it for a daily run
    schedule=CronDataIntervalTimetable("0 0 * * *", timezone="UTC"),
    start_date=datetime(2000, 1, 1, tzinfo=UTC),  # the earliest history to rebuild; catch-up is off
    max_active_runs=Settings.load().backfill_parallel,
    deadline=timedelta(hours=6),
) as dag:
    JobOperator(
        task_id="rebuild",
        operation=BACKFILL,
        job_params={
            # Without an interval both are the same moment, and the operation refuses an empty range.
            "start": "{{ (dag_run.data_interval_start or dag_run.run_after).isoformat() }}",
            "end": "{{ (dag_run.data_interval_end or dag_run.run_after).isoformat() }}",
            "run_id": "{{ run_id }}/{{ dag_run.clear_number }}",
        },
    )
