"""The operation `backup`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field, field_validator

from millrace.operations.operation import Operation, OperationParams


class BackupParams(OperationParams):
    """Where the backup goes, how many backups are kept, and whether it is read back."""

    to: str = Field(
        default="",
        title="To",
        description=(
            "Folder of the backups, preferably on another disk, or a prefix of an object store (s3://bucket/prefix). "
            "Empty: the setting backup_dir. Otherwise one in backup_roots."
        ),
    )
    keep: int = Field(
        default=7,
        ge=1,
        le=100_000,
        title="Keep",
        description="Backups of this deployment to keep in that folder, including this one.",
    )
    verify: bool = Field(
        default=False,
        title="Read back",
        description=(
            "Read every file of the backup again at the end, including those of earlier backups, and compare digests."
        ),
    )
    full: bool = Field(
        default=False,
        title="Full",
        description="Open every table, also those that have not changed since the previous backup.",
    )
    dry_run: bool = Field(default=False, title="Dry run", description="Only report what would be copied.")

    @field_validator("to")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and "://" not in value and not Path(value).is_absolute():
            raise ValueError("give an absolute path; the job does not run in your working directory")
        return value


BACKUP: Final = Operation(
    name="backup",
    title="Make a backup",
    summary="Copies the whole deployment into a folder of backups while it runs.",
    example="--to /mnt/backups/millrace --dry-run",
    params=BackupParams,
    run="millrace.operations.backup.run:run",
    low_priority=True,
    changes_data=False,
)
