"""The listener: every failure of a Millrace DAG goes to the log and to ``run/history/failures.jsonl``, which the UI
shows."""

from __future__ import annotations

import logging
import time
from typing import Any

from airflow.listeners import hookimpl

from millrace_airflow.alerts import record_failure
from millrace_airflow.defaults import TAG

_logger = logging.getLogger(__name__)


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: Any, error: Any) -> None:
    """Record a task's failure, final or not. Called by the worker, or by the API server if a person marked it."""
    task = getattr(task_instance, "task", None)
    if task is None or TAG not in (getattr(task.dag, "tags", None) or ()):
        return
    line = {
        "kind": "task",
        "at": time.time(),
        "dag_id": task_instance.dag_id,
        "task_id": task_instance.task_id,
        "run_id": task_instance.run_id,
        "map_index": getattr(task_instance, "map_index", -1),
        "try_number": task_instance.try_number,
        "state": str(getattr(task_instance, "state", "") or "failed"),
        "error": {"code": _code(error), "message": str(error)[:2000]},
    }
    _logger.error("%s.%s failed: %s", line["dag_id"], line["task_id"], line["error"]["message"])
    record_failure(line)


def _code(error: Any) -> str:
    """Return Millrace's code or the name of the exception.

    Airflow reports some failures only as text (a worker that was killed).
    """
    if error is None or isinstance(error, str):
        return "TASK_FAILED"
    return str(getattr(error, "code", type(error).__name__))


@hookimpl
def on_dag_run_failed(dag_run: Any, msg: str) -> None:
    """Record the failure of a whole run. Called by the scheduler."""
    dag = getattr(dag_run, "dag", None)
    if TAG not in (getattr(dag, "tags", None) or ()):
        return
    line = {
        "kind": "run",
        "at": time.time(),
        "dag_id": dag_run.dag_id,
        "run_id": dag_run.run_id,
        "error": {"code": "RUN_FAILED", "message": str(msg)[:2000]},
    }
    _logger.error("run %s of %s failed: %s", line["run_id"], line["dag_id"], msg)
    record_failure(line)
