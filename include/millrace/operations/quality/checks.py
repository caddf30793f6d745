"""A check (one expectation on one table) and its result, as plain data free of Spark and Great Expectations types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

CheckSource = Literal["law", "schema", "user"]
Severity = Literal["critical", "warning", "info"]
"""Severities as in Great Expectations. A critical failure blocks truncation and VACUUM."""
CRITICAL: Final = "critical"


@dataclass(frozen=True, slots=True)
class Check:
    """One expectation: a Great Expectations type with its arguments, under a stable name."""

    name: str
    type: str
    kwargs: Mapping[str, Any]
    words: str
    """Description for people, shown in the Data Docs."""
    severity: Severity = CRITICAL
    source: CheckSource = "law"

    @property
    def critical(self) -> bool:
        return self.severity == CRITICAL


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    check: Check
    success: bool
    observed: str = ""
    """The observed value as JSON, if the expectation has one."""
    elements: int = 0
    unexpected: int = 0
    sample: tuple[str, ...] = ()
    """Unexpected values as JSON, with the ids of their rows if the table has ids."""
    error: str = ""
    """Reason that the check could not run. The check counts as failed."""


@dataclass(frozen=True, slots=True)
class TableCheckResult:
    """The results of one table over one range."""

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
