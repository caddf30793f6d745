"""A check (one expectation on one table) and its outcome, as plain data that no library of either side appears in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

CheckSource = Literal["law", "schema", "user"]
Severity = Literal["critical", "warning", "info"]
"""As Great Expectations has them; a critical one that fails stands in the way of truncation and VACUUM."""
CRITICAL: Final = "critical"


@dataclass(frozen=True, slots=True)
class Check:
    """One expectation: a type of Great Expectations with its arguments, under a name that stays the same."""

    name: str
    type: str
    kwargs: Mapping[str, Any]
    words: str
    """What it says, for people; it stands in the Data Docs."""
    severity: Severity = CRITICAL
    source: CheckSource = "law"

    @property
    def critical(self) -> bool:
        return self.severity == CRITICAL


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check came to."""

    check: Check
    success: bool
    observed: str = ""
    """The observed value, where the expectation has one; JSON."""
    elements: int = 0
    unexpected: int = 0
    sample: tuple[str, ...] = ()
    """Wrong values, with the ids of their rows where the table has ids; JSON each."""
    error: str = ""
    """Why the check could not be made; it counts as failed."""


@dataclass(frozen=True, slots=True)
class TableCheckResult:
    """The outcomes of one table over one range."""

    table: str
    """``wal``, ``wal/rejections``, ``wal/channels``, ``segments``, ``checkpoints`` or ``collections/<id>``."""
    ranges: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[CheckResult, ...] = ()
    collection_id: int = 0
    seconds: float = 0.0
    rows: int = 0

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(each for each in self.results if not each.success)

    @property
    def failed_critical(self) -> tuple[CheckResult, ...]:
        return tuple(each for each in self.failed if each.check.critical)
