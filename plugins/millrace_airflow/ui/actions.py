"""The actions on the pages: one DAG each, with the parameters that a button fills in.

A button opens the form of :mod:`millrace_airflow.ui.start_forms`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from pydantic import BaseModel

from millrace.operations.registry import operations


class Action(BaseModel):
    """A DAG that can be started."""

    dag_id: str
    title: str
    words: str
    changes_data: bool
    """Whether a run can change or remove stored data."""
    allowed: bool = False
    """Whether the user may start it."""
    conf: dict[str, Any] = {}
    """Parameters that override the DAG's defaults."""


ACTIONS: Final = (
    Action(
        dag_id="streaming",
        title="Run the streaming jobs",
        words="Starts and supervises the streaming node and the flusher, until the DAG is paused.",
        changes_data=False,
    ),
    *(
        Action(
            dag_id=operation.dag_id,
            title=operation.title,
            words=operation.words or operation.summary,
            changes_data=operation.changes_data,
        )
        for operation in operations().values()
        if operation.title
    ),
)


RUN_ID: Final = re.compile(r"manual__[0-9T:.+\-]{10,40}")
"""Ids of runs that the form starts."""


def started_run(dag: str, run: str) -> dict[str, str] | None:
    """Return the run that the form has just started, from the parameters of its redirect; None if there is none."""
    known = {each.dag_id for each in ACTIONS}
    return {"dag": dag, "run": run} if dag in known and RUN_ID.fullmatch(run) else None


def actions_for(allowed: Callable[[str], bool], **conf: Any) -> list[Action]:
    """Return all actions, with whether the user may start each, and with `conf` filled in."""
    return [action.model_copy(update={"allowed": allowed(action.dag_id), "conf": conf}) for action in ACTIONS]
