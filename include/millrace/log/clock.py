"""The clock that a log stamps by, for who works beside it: timers have to go as log time goes."""

from __future__ import annotations

import time
from typing import Protocol

from millrace.base.errors import InvalidArgument
from millrace.rpc.clock import ClockView
from millrace.rpc.remote_log import RemoteLogService


class LogClock(Protocol):
    """A log's own clock. Thread-safe."""

    def now_ms(self) -> int:
        """The stamp of this moment, in Unix milliseconds; it never decreases."""
        ...

    def view(self) -> ClockView:
        """What it shows now."""
        ...

    def accept(self) -> ClockView:
        """Believe the wall clock as it is now, however far it leapt."""
        ...


def wall_clock_ms() -> int:
    """Unix milliseconds, as the host shows them."""
    return time.time_ns() // 1_000_000


def log_clock(service: object) -> LogClock | None:
    """The clock that a log service stamps by, its `clock`; None where somebody else stamps (a broker)."""
    found: LogClock | None = getattr(service, "clock", None)
    return found


def require_log_clock(service: object) -> LogClock:
    """The clock that a log service stamps by. Raises InvalidArgument where somebody else stamps."""
    clock = log_clock(service)
    if clock is None:
        raise InvalidArgument(
            "the stamps of this log are its brokers': set their clocks right (the metric millrace_log_time_ahead_seconds"
            " says how far log time is ahead)"
        )
    return clock


def log_time_ms(service: object) -> int | None:
    """What the clock shows that a log service stamps by, here or at its server; None where somebody else stamps."""
    if isinstance(service, RemoteLogService):
        try:
            return service.clock().stamp_ms
        except InvalidArgument:
            return None
    clock = log_clock(service)
    return None if clock is None else clock.now_ms()


def log_or_wall_time_ms(service: object) -> int:
    """What the clock shows that a log service stamps by; the host's wall clock where somebody else stamps."""
    found = log_time_ms(service)
    return wall_clock_ms() if found is None else found
