"""The operation `checkpoint`."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from millrace.operations.operation import Operation, OperationParams


class CheckpointParams(OperationParams):
    """The range to replay, and what to remove before the checkpoints."""

    sample_mib: int = Field(
        default=256,
        ge=1,
        le=65536,
        description=(
            "Limit of WAL files to replay per PChannel, in MiB. If more was written since the last "
            "checkpoint, its newest part is replayed."
        ),
    )
    truncate: bool = Field(default=True, description="Truncate the log as far as flush and recovery checkpoints allow.")
    trim: bool = Field(default=True, description="Trim the WAL by its retention (setting wal_retention; 0 keeps all).")
    full: bool = Field(
        default=False, description="Sync every table, also those that have not changed since the last run."
    )
    dry_run: bool = Field(
        default=False, description="Only verify, and report what could be freed. Nothing is written or removed."
    )


CHECKPOINT: Final = Operation(
    name="checkpoint",
    title="Checkpoint and truncate",
    summary="Writes verified checkpoints, then truncates the log and trims the WAL as far as they allow.",
    example="--dry-run",
    params=CheckpointParams,
    run="millrace.operations.checkpoint.run:run",
)
