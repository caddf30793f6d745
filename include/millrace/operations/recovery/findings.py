"""What a diagnosis finds, and what a repair says of it: plain data for reports, forms and the UI."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from millrace.operations.operation import OperationReport

FindingKind = Literal[
    "job_dead",
    "channel_parked",
    "log_regressed",
    "txn_stuck",
    "wal_file_damaged",
    "wal_rows_differ",
    "wal_state_damaged",
    "table_file_damaged",
    "collection_differs",
    "catalog_differs",
    "staged_file_damaged",
]

FINDING_KINDS: Final[dict[str, str]] = {
    "job_dead": "a job stands still or is gone although there is work",
    "channel_parked": "a PChannel stands at an entry that could not be processed",
    "log_regressed": "the log ends before what the WAL has committed",
    "txn_stuck": "an open transaction is past its lease, and nothing comes that would end it",
    "wal_file_damaged": "a file of the WAL is missing, cut or unreadable",
    "wal_rows_differ": "rows of the WAL are not those that the log gives",
    "wal_state_damaged": "a PChannel's state row is missing, unreadable or not what the log gives",
    "table_file_damaged": "a file of a collection, of segments or of checkpoints is missing, cut or unreadable",
    "collection_differs": "a collection's table holds other rows than became visible in the WAL",
    "catalog_differs": "the catalog lacks a collection or a PChannel that the log has, or says otherwise of it",
    "staged_file_damaged": "a staged file that an Import of the WAL names is missing, altered, or does not fit",
}
"""Every kind of finding, in words."""


class RecoveryFinding(BaseModel):
    """One thing that is wrong."""

    model_config = ConfigDict(frozen=True)

    kind: FindingKind
    subject: str
    """The PChannel, or the table's folder relative to the data folder."""
    words: str
    files: tuple[str, ...] = ()
    """Relative to the table."""
    destructive: bool = False
    """Whether its repair gives up rows."""


class RepairResult(BaseModel):
    """What became of one finding."""

    model_config = ConfigDict(frozen=True)

    finding: RecoveryFinding
    done: bool
    words: str
    seconds: float


class RecoveryReport(OperationReport):
    """The result of a run. `healthy`: nothing is wrong now (in the clone, for a rehearsal)."""

    mode: Literal["diagnose", "rehearse", "repair"]
    depth: str
    findings: tuple[RecoveryFinding, ...] = ()
    repairs: tuple[RepairResult, ...] = ()
    remaining: tuple[RecoveryFinding, ...] = Field(
        default=(), description="What a second diagnosis found behind the repairs."
    )
    healthy: bool
    needs_approval: bool
    """Whether a repair waits for a person's word (`allow_destructive`)."""

    @property
    def succeeded(self) -> bool:
        return self.healthy

    seconds: float
