"""The operation `housekeeping`."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from millrace.operations.operation import Operation, OperationParams

Area = Literal["airflow_database", "airflow_logs", "runs", "reports", "restores", "quality", "uploads"]
ALL_AREAS: Final[tuple[Area, ...]] = (
    "airflow_database",
    "airflow_logs",
    "runs",
    "reports",
    "restores",
    "quality",
    "uploads",
)
"""Areas to trim, each by a setting (docs/operating.md, "What grows")."""


class HousekeepingParams(OperationParams):
    """Areas to trim, and how."""

    areas: tuple[Area, ...] = Field(
        default=ALL_AREAS,
        min_length=1,
        description="What to trim. The settings *_retention_days say how long each is kept.",
    )
    dry_run: bool = Field(default=False, description="Only report what would be removed.")


HOUSEKEEPING: Final = Operation(
    name="housekeeping",
    title="Remove old history",
    summary="Trims Airflow's history and logs, run folders, reports and results of checks to their retention.",
    words="Removes what the system wrote about itself and is older than its retention. Rows of collections, the log, "
    "positions and whatever waits to be sent stay.",
    example="--dry-run",
    params=HousekeepingParams,
    run="millrace.operations.housekeeping.run:run",
    low_priority=True,
)
