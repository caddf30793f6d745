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
        description="diagnose: look, change nothing. rehearse: repair a clone of the tables, and throw it away. repair: repair.",
    )
    depth: Literal["quick", "full"] = Field(
        "full",
        title="Depth",
        description="quick: jobs, parked channels, files by name and size, open transactions. full: contents by digest too.",
    )
    allow_destructive: bool = Field(
        False,
        title="Allow repairs that give up data",
        description="Rows of a table that no message of the WAL backs are removed only with this.",
    )
    stale_after: float = Field(
        60.0,
        ge=1,
        le=86400,
        title="Stale after (s)",
        description="A job whose work lies still this long, while there is some, counts as dead.",
    )


RECOVERY: Final = Operation(
    name="recovery",
    title="Diagnose and repair",
    summary="Compares log, WAL and collections by digests, repairs what differs, and proves the repair.",
    example="--mode repair",
    params=RecoveryParams,
    run="millrace.operations.recovery.run:run",
    retries=1,
)
