"""Why a range ended early, in words that cross processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

import pyarrow as pa

from millrace.base.errors import MillraceError
from millrace.message.ids import EARLIEST, LogId

_MAY_PASS: Final = (OSError, MemoryError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class RangeFailure:
    """`retriable` ones are tried again; no other attempt would come to anything else, as things are."""

    code: str
    message: str
    retriable: bool
    position: LogId = EARLIEST
    """The entry of the log that it is about, where it is about one."""

    @classmethod
    def of(cls, error: BaseException, position: LogId = EARLIEST) -> Self:
        """Errors of ours say whether a retry can help; of the others those of disk and memory may pass."""
        if isinstance(error, MillraceError):
            code, retriable = error.code, error.retriable
        else:
            code, retriable = type(error).__name__, isinstance(error, _MAY_PASS)
        return cls(code, str(error) or type(error).__name__, retriable, position)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True, slots=True)
class FailedRange:
    """A range that left no report: nothing of it is committed."""

    channel: str
    failure: RangeFailure
    error: Exception | None = field(default=None, compare=False)
    """What was raised, where that was in this process."""

    @classmethod
    def from_error(cls, channel: str, error: Exception) -> Self:
        """A range that raised `error`."""
        return cls(channel, RangeFailure.of(error), error)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.channel, self.failure)
