"""Bound a wait by one point in time that all its steps share, so that no step restarts the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from millrace.base.errors import InvalidArgument

_T = TypeVar("_T")


class Waiter(Protocol):
    """A condition (held by the caller) or an event of :mod:`threading`."""

    def wait(self, timeout: float | None = None) -> bool: ...


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time on a clock, in seconds. A simulation supplies its own clock and sleep."""

    at: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep

    @classmethod
    def after(
        cls,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> Self:
        """Return the deadline `seconds` from now; 0 or less has already expired. Raises InvalidArgument for NaN."""
        if seconds != seconds:
            raise InvalidArgument("a timeout is a number of seconds, not nan")
        return cls(clock() + seconds, clock, sleep)

    @classmethod
    def never(cls) -> Self:
        """Return a deadline that never expires."""
        return cls(math.inf)

    def extended(self, seconds: float) -> Self:
        """Return this deadline plus `seconds`, for a step that has to outlast its caller's wait."""
        return type(self)(self.at + seconds, self.clock, self.sleep)

    def expired(self) -> bool:
        """Return whether the deadline has passed."""
        return self.clock() >= self.at

    def remaining(self, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
        """Return the seconds left, 0 once expired, clamped to `minimum` (for a call that must be tried) and
        `maximum`.
        """
        left = self.at - self.clock()
        if left > maximum:
            left = maximum
        return left if left > minimum else minimum

    def wait(self, waiter: Waiter, *, maximum: float = math.inf) -> bool:
        """Wait on a condition or an event until it is notified, for at most `maximum` seconds.

        Returns what the waiter's own `wait` returns.
        """
        left = self.remaining(maximum=maximum)
        return waiter.wait(None if left == math.inf else left)

    def pause(self, seconds: float) -> bool:
        """Sleep `seconds`, or less if the deadline comes first.

        Returns False without sleeping if the deadline has passed.
        """
        left = self.at - self.clock()
        if left <= 0:
            return False
        self.sleep(min(seconds, left))
        return True


def poll_until(look: Callable[[], _T], deadline: Deadline, *, interval: float) -> _T:
    """Call `look` every `interval` seconds until it returns a true value or the deadline passes.

    Returns the last value, which is false after a timeout.
    """
    while not (found := look()) and deadline.pause(interval):
        pass
    return found
