"""Checkpoint: write a checkpoint of each PChannel, verify it by a replay, and truncate the log before it.

One task, one job, every five minutes. Its report says what was replayed, what each log gave up and what the WAL's
retention removed. The task fails if a replay did not confirm a checkpoint. Nothing of that PChannel is removed then,
and the DAG *recovery* finds the cause. While a critical expectation has failed (*quality*), checkpoints are written and
nothing is removed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from millrace.operations.checkpoint.declaration import CHECKPOINT
from millrace_airflow.assets import checkpoint_written
from millrace_airflow.defaults import operation_dag
from millrace_airflow.operators import JobOperator


def must_be_confirmed(report: dict[str, Any]) -> None:
    """Fail the task for good if a replay and the WAL differ: the same bytes differ again."""
    problems = [f"{each['pchannel']}: {each['problem']}" for each in report["channels"] if each["problem"]]
    if problems:
        raise AirflowFailException(f"not confirmed: {'; '.join(problems)}. Run the DAG recovery.")


with operation_dag(
    CHECKPOINT,
    doc=__doc__,
    schedule="*/5 * * * *",
    deadline=timedelta(minutes=30),
) as dag:
    JobOperator(
        task_id="checkpoint",
        operation=CHECKPOINT,
        outlets=[checkpoint_written],
        check=must_be_confirmed,
    )
