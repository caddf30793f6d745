"""The base class of log handles, and a check of a whole log for backends without checksums of their own."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import pyarrow.compute as pc

from millrace.base.errors import LogCorrupted, LogUnavailable
from millrace.log.protocol import Log
from millrace.message.ids import LogId
from millrace.message.log_entries import LogDescription, LogEntries, VerifyReport


class LogCore(Protocol):
    """What all handles of one log share."""

    def read(self, position: LogId, *, end: LogId | None, max_bytes: int, timeout: float) -> LogEntries: ...

    def truncate(self, position: LogId) -> int: ...

    def describe(self) -> LogDescription: ...


CoreT = TypeVar("CoreT", bound=LogCore)


class LogHandle(Generic[CoreT]):
    """The Log protocol except `append`, which each backend implements. Closing a handle leaves other handles of the log
    open.
    """

    def __init__(self, core: CoreT) -> None:
        self._core: CoreT | None = core

    def read(
        self, position: LogId, *, end: LogId | None = None, max_bytes: int = 64 << 20, timeout: float = 0.0
    ) -> LogEntries:
        """See :meth:`millrace.log.protocol.Log.read`.

        Also raises LogCorrupted if stored entries are damaged or missing.
        """
        return self._open().read(position, end=end, max_bytes=max_bytes, timeout=timeout)

    def truncate(self, position: LogId) -> int:
        """See :meth:`millrace.log.protocol.Log.truncate`."""
        return self._open().truncate(position)

    def describe(self) -> LogDescription:
        """See :meth:`millrace.log.protocol.Log.describe`."""
        return self._open().describe()

    def end(self) -> LogId:
        """See :meth:`millrace.log.protocol.Log.end`."""
        return self._open().describe().end

    def close(self) -> None:
        """See :meth:`millrace.log.protocol.Log.close`."""
        self._core = None

    def _open(self) -> CoreT:
        if self._core is None:
            raise LogUnavailable("this handle is closed: open the log again")
        return self._core


def verify_by_reading(log: Log) -> VerifyReport:
    """Read a log from beginning to end and report the first error. The log must be contiguous.

    Raises what a read raises, except LogCorrupted, which is the finding.
    """
    described = log.describe()
    position, entries, size, records = described.begin, 0, 0, 0
    while position < described.end:
        try:
            run = log.read(position, end=described.end)
        except LogCorrupted as error:
            return VerifyReport(records, entries, size, position, str(error))
        position = run.next
        if not run.batch.num_rows:
            break  # the end; the backend has proven that no entry is missing before it
        records += 1
        entries += run.batch.num_rows
        size += pc.sum(pc.binary_length(run.batch.column("value"))).as_py()
    if position < described.end:
        return VerifyReport(records, entries, size, position, f"the log ends at {position}, before {described.end}")
    return VerifyReport(records, entries, size, None, "every batch's checksum holds, and nothing is missing")
