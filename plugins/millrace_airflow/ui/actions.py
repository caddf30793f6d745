"""What can be started from the pages: a DAG each, with the parameters that a button fills in.

A button opens a form made of the DAG's own parameters and starts the run through Airflow's REST API
(``POST /api/v2/dags/<id>/dagRuns``), so that Airflow checks permission and parameters and keeps the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pydantic import BaseModel


class Action(BaseModel):
    """A DAG that can be started."""

    dag_id: str
    title: str
    words: str
    changes_data: bool
    """Whether a run can change or remove what is stored."""
    allowed: bool = False
    """Whether the person who asks may start it."""
    conf: dict[str, Any] = {}
    """Parameters that go over the DAG's defaults."""


ACTIONS: Final = {
    action.dag_id: action
    for action in (
        Action(
            dag_id="streaming",
            title="Run the streaming jobs",
            words="Starts and supervises the streaming node and the flusher, until the DAG is paused.",
            changes_data=False,
        ),
        Action(
            dag_id="checkpoint",
            title="Checkpoint and truncate",
            words="Writes verified checkpoints, then truncates the log and trims the WAL as far as they allow.",
            changes_data=True,
        ),
        Action(
            dag_id="compaction",
            title="Compact tables",
            words="Joins small files and segments, folds old deletes in, clusters, vacuums within the retention.",
            changes_data=True,
        ),
        Action(
            dag_id="recovery",
            title="Diagnose and repair",
            words="Compares log, WAL and collections by digests, repairs what differs, and proves the repair.",
            changes_data=True,
        ),
        Action(
            dag_id="quality",
            title="Check data quality",
            words="Runs the expectation suites; a critical failure holds truncation and vacuum back.",
            changes_data=False,
        ),
        Action(
            dag_id="backfill_range",
            title="Backfill a time range",
            words="Rebuilds a range of a derived table from its collection, slice by slice; readers never see a mix.",
            changes_data=True,
        ),
        Action(
            dag_id="load_files",
            title="Load files",
            words="Brings Parquet, CSV or JSON lines into a collection as Imports, slice by slice, each once.",
            changes_data=True,
        ),
        Action(
            dag_id="quality_release",
            title="Release a block",
            words="Accepts what a critical expectation found, so that truncation and vacuum go on.",
            changes_data=False,
        ),
        Action(
            dag_id="backup",
            title="Make a backup",
            words="Copies the whole deployment into a folder of backups, while it runs.",
            changes_data=False,
        ),
        Action(
            dag_id="restore",
            title="Restore to a point in time",
            words="Makes a collection's rows of a tick or moment a new collection, or its own again after approval.",
            changes_data=True,
        ),
    )
}


def actions_for(allowed: Callable[[str], bool], **conf: Any) -> list[Action]:
    """All actions, with whether the person may start each, and with `conf` filled in."""
    return [action.model_copy(update={"allowed": allowed(action.dag_id), "conf": conf}) for action in ACTIONS.values()]
