"""The findings of a diagnosis and the results of repairs, as plain data for reports, forms and the UI."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from millrace.operations.operation import OperationReport, counted

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


class RecoveryFinding(BaseModel):
    """One fault."""

    model_config = ConfigDict(frozen=True)

    kind: FindingKind
    subject: str
    """The PChannel, or the table's folder relative to the data folder."""
    words: str
    files: tuple[str, ...] = ()
    """Paths relative to the table."""
    destructive: bool = False
    """Whether its repair loses rows."""


class RepairResult(BaseModel):
    """The action taken on one finding."""

    model_config = ConfigDict(frozen=True)

    finding: RecoveryFinding
    done: bool
    words: str
    seconds: float


class RecoveryReport(OperationReport):
    """The result of a run. `healthy` is True if nothing is wrong now (in the clone, for a rehearsal)."""

    mode: Literal["diagnose", "rehearse", "repair"]
    depth: str
    findings: tuple[RecoveryFinding, ...] = ()
    repairs: tuple[RepairResult, ...] = ()
    remaining: tuple[RecoveryFinding, ...] = Field(
        default=(), description="Findings of a second diagnosis after the repairs."
    )
    healthy: bool
    needs_approval: bool
    """Whether a repair needs a person's approval (`allow_destructive`)."""

    @property
    def succeeded(self) -> bool:
        return self.healthy

    @property
    def sentence(self) -> str:
        if not self.findings:
            return "Log, WAL and collections agree: nothing is wrong."
        found = counted(len(self.findings), "finding")
        if self.mode == "diagnose":
            return f"{found}; nothing was changed."
        done = sum(each.done for each in self.repairs)
        what = "a clone" if self.mode == "rehearse" else "the tables"
        if self.healthy:
            return f"{found}, {done:,} repaired in {what}: nothing is wrong there now."
        return f"{found}, {done:,} repaired in {what}: {len(self.remaining):,} remain."

    seconds: float
