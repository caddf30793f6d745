"""What happens when a run is late: a line in the history of failures, which the UI shows, and a warning in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

_logger = logging.getLogger(__name__)


async def deadline_missed(*, dag_id: str, seconds: float, **context: Any) -> None:
    """Called by the triggerer when a run of `dag_id` has not ended `seconds` after it was queued."""
    _logger.warning("a run of %s has not ended after %.0f s", dag_id, seconds)
    run = (context.get("context") or {}).get("dag_run") or {}
    line = {
        "kind": "deadline",
        "at": time.time(),
        "dag_id": dag_id,
        "run_id": run.get("dag_run_id") if isinstance(run, dict) else None,
        "error": {"code": "DEADLINE_MISSED", "message": f"not ended {seconds:.0f} s after it was queued"},
    }
    await asyncio.to_thread(record_failure, line)


def record_failure(line: dict[str, Any]) -> None:
    """Add a line to ``run/history/failures.jsonl`` of the data folder."""
    from millrace.base.settings import Settings
    from millrace.runtime.launch.history import FAILURES, append_history, history_path

    append_history(history_path(Settings.load(), FAILURES), line)
