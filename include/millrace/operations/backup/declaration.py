"""The operation `backup`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field, field_validator

from millrace.operations.operation import Operation, OperationParams


class BackupParams(OperationParams):
    """Where a backup goes, how many stay, and whether it is read back."""

    to: str = Field(
        default="",
        title="To",
        description="The folder of backups, best on another disk: the setting backup_dir (empty), or one in backup_roots.",
    )
    keep: int = Field(
        default=7,
        ge=1,
        le=100_000,
        title="Keep",
        description="How many backups of this deployment stay in that folder, this one included.",
    )
    verify: bool = Field(
        default=False,
        title="Read back",
        description="Read every file of the backup again in the end, those of earlier backups included, and compare digests.",
    )
    dry_run: bool = Field(default=False, title="Dry run", description="Only say what would be copied.")

    @field_validator("to")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not Path(value).is_absolute():
            raise ValueError("give an absolute path; the job does not run where you are")
        return value


BACKUP: Final = Operation(
    name="backup",
    title="Make a backup",
    summary="Copies the whole deployment into a folder of backups, while it runs.",
    example="--to /mnt/backups/millrace --dry-run",
    params=BackupParams,
    run="millrace.operations.backup.run:run",
    low_priority=True,
    changes_data=False,
)
