"""Reasons why a range ended early, in a form that crosses processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

import pyarrow as pa

from millrace.base.errors import MillraceError
from millrace.message.ids import EARLIEST, LogId

_MAY_PASS: Final = (OSError, MemoryError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class RangeFailure:
    """A failure. If `retriable`, the range is tried again; otherwise a retry gives the same result."""

    code: str
    message: str
    retriable: bool
    position: LogId = EARLIEST
    """The log entry that caused the failure, if one did."""

    @classmethod
    def of(cls, error: BaseException, position: LogId = EARLIEST) -> Self:
        """Describe `error`.

        Millrace's errors say whether they are retriable. Of all others, those of disk and memory are.
        """
        if isinstance(error, MillraceError):
            code, retriable = error.code, error.retriable
        else:
            code, retriable = type(error).__name__, isinstance(error, _MAY_PASS)
        return cls(code, str(error) or type(error).__name__, retriable, position)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True, slots=True)
class FailedRange:
    """A range without a report: nothing of it is committed."""

    channel: str
    failure: RangeFailure
    error: Exception | None = field(default=None, compare=False)
    """The exception, if it was raised in this process."""

    @classmethod
    def from_error(cls, channel: str, error: Exception) -> Self:
        """Describe a range that raised `error`."""
        return cls(channel, RangeFailure.of(error), error)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.channel, self.failure)
