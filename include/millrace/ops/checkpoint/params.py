"""Parameters of the operation `checkpoint`. Light: DAG files import this."""

from __future__ import annotations

from pydantic import Field

from millrace.ops.operation import OperationParams


class CheckpointParams(OperationParams):
    """How much is replayed, and what is given up behind the checkpoints."""

    sample_mib: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="At most so many MiB of WAL files are replayed of a PChannel; where more came since the last checkpoint, the newest part of it.",
    )
    truncate: bool = Field(default=True, description="Truncate the log as far as flush and recovery checkpoints allow.")
    trim: bool = Field(default=True, description="Trim the WAL by its retention (setting wal_retention; 0 keeps all).")
    dry_run: bool = Field(
        default=False, description="Only verify, and say what could be freed; nothing is written or removed."
    )
