"""The clock that stamps a log's entries, for components whose timers must follow log time."""

from __future__ import annotations

import time
from typing import Protocol

from millrace.base.errors import InvalidArgument
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.wire import ClockView


class LogClock(Protocol):
    """A log's own clock. Thread-safe."""

    def now_ms(self) -> int:
        """Return the current stamp in Unix milliseconds. It never decreases."""
        ...

    def view(self) -> ClockView:
        """Return the clock's current state."""
        ...

    def accept(self) -> ClockView:
        """Accept the wall clock as it is now, however far it leapt."""
        ...


def wall_clock_ms() -> int:
    """Return the host's wall clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def log_clock(service: object) -> LogClock | None:
    """Return the clock of a log service, its `clock`; None if a broker stamps entries."""
    found: LogClock | None = getattr(service, "clock", None)
    return found


def require_log_clock(service: object) -> LogClock:
    """Return the clock of a log service.

    Raises InvalidArgument if a broker stamps entries.
    """
    clock = log_clock(service)
    if clock is None:
        raise InvalidArgument(
            "brokers stamp this log's entries: correct their clocks (the metric millrace_log_time_ahead_seconds"
            " shows how far log time is ahead)"
        )
    return clock


def log_time_ms(service: object) -> int | None:
    """Return the log clock's time, of this process or the log server's; None if a broker stamps entries."""
    if isinstance(service, RemoteLogService):
        try:
            return service.clock().stamp_ms
        except InvalidArgument:
            return None
    clock = log_clock(service)
    return None if clock is None else clock.now_ms()


def log_or_wall_time_ms(service: object) -> int:
    """Return the log clock's time; the host's wall clock if a broker stamps entries."""
    found = log_time_ms(service)
    return wall_clock_ms() if found is None else found
