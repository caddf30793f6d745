"""The operation `recovery`."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from millrace.operations.operation import Operation, OperationParams


class RecoveryParams(OperationParams):
    """Parameters of the operation ``recovery``."""

    mode: Literal["diagnose", "rehearse", "repair"] = Field(
        "diagnose",
        title="Mode",
        description=(
            "diagnose: look, change nothing. rehearse: repair a clone of the tables and discard it. repair: repair."
        ),
    )
    depth: Literal["quick", "changed", "full"] = Field(
        "full",
        title="Depth",
        description=(
            "quick: jobs, parked channels, files by name and size, open transactions. full: also contents by digest. "
            "changed: the same, without what has not changed since a run found nothing wrong; in full once a day."
        ),
    )
    allow_destructive: bool = Field(
        False,
        title="Allow repairs that give up data",
        description="Required to remove table rows that no message of the WAL accounts for.",
    )
    stale_after: float = Field(
        60.0,
        ge=1,
        le=86400,
        title="Stale after (s)",
        description="Seconds without progress, while there is work, after which a job counts as dead.",
    )


RECOVERY: Final = Operation(
    name="recovery",
    title="Diagnose and repair",
    summary="Compares log, WAL and collections by digests, repairs what differs, and verifies the repair.",
    example="--mode repair",
    params=RecoveryParams,
    run="millrace.operations.recovery.run:run",
    dag_defaults={"mode": "repair", "depth": "changed"},
    retries=1,
)
