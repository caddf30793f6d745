"""Compaction: merge small files and segments, fold in deletes, and remove replaced files.

Starts when the flusher has flushed segments (asset `segments_flushed`), and every hour. `needed` measures first, from
the Delta logs alone, and skips the rest if a run would gain too little; a manual run always continues. `compact` runs
the job beside the streaming jobs; neither waits for the other. Its report says what was merged, folded in and freed.
With `dry_run` it only reports what it would do. VACUUM waits while a critical expectation has failed (*quality*).
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from airflow.sdk import AssetOrTimeSchedule, CronTriggerTimetable, task

from millrace.operations.compaction.declaration import COMPACTION, CompactionParams
from millrace_airflow.assets import segments_flushed
from millrace_airflow.defaults import operation_dag
from millrace_airflow.forms import values
from millrace_airflow.hooks import MillraceHook
from millrace_airflow.operators import JobOperator

with operation_dag(
    COMPACTION,
    doc=__doc__,
    schedule=AssetOrTimeSchedule(
        timetable=CronTriggerTimetable("17 * * * *", timezone="UTC"), assets=[segments_flushed]
    ),
    deadline=timedelta(hours=3),
) as dag:

    @task.short_circuit(task_id="needed")
    def worth_its_cost(params: dict[str, Any] | None = None, dag_run: Any = None) -> bool:
        """Continue if there is enough to do; log the reason."""
        from millrace.operations.compaction.need import need

        found = need(MillraceHook().settings, CompactionParams.parse(values(CompactionParams, params or {})))
        logging.getLogger(__name__).info("%s", "; ".join(found.why) or "nothing worth a run")
        return found.needed or dag_run.run_type == "manual"

    worth_its_cost() >> JobOperator(task_id="compact", operation=COMPACTION)
