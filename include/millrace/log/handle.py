"""What a handle on a log is on every backend: a way to what all handles of that log share, until it is closed."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from millrace.base.errors import LogUnavailable
from millrace.message.ids import LogId
from millrace.message.log_entries import LogDescription, LogEntries


class LogCore(Protocol):
    """What the handles of one log share."""

    def read(self, position: LogId, *, end: LogId | None, max_bytes: int, timeout: float) -> LogEntries: ...

    def truncate(self, position: LogId) -> int: ...

    def describe(self) -> LogDescription: ...


CoreT = TypeVar("CoreT", bound=LogCore)


class LogHandle(Generic[CoreT]):
    """The Log protocol but for `append`, which is a backend's own. Closing it leaves other handles of the log open."""

    def __init__(self, core: CoreT) -> None:
        self._core: CoreT | None = core

    def read(
        self, position: LogId, *, end: LogId | None = None, max_bytes: int = 64 << 20, timeout: float = 0.0
    ) -> LogEntries:
        """See :meth:`millrace.log.protocol.Log.read`. Also raises LogCorrupted where stored entries are damaged or missing."""
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
