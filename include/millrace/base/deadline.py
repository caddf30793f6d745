"""How long somebody waits: one moment for all the steps of a wait, so that none of them starts the clock anew."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

_T = TypeVar("_T")


class Waiter(Protocol):
    """A condition (held by the caller) or an event of :mod:`threading`."""

    def wait(self, timeout: float | None = None) -> bool: ...


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of a clock, in its seconds. A simulation gives the clock, and the sleep that moves it."""

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
        """`seconds` from now; 0 or less is over at once."""
        return cls(clock() + seconds, clock, sleep)

    @classmethod
    def never(cls) -> Self:
        """A wait without an end."""
        return cls(math.inf)

    def extended(self, seconds: float) -> Self:
        """The same wait with `seconds` more: for who answers to somebody that keeps this one."""
        return type(self)(self.at + seconds, self.clock, self.sleep)

    def expired(self) -> bool:
        """Whether it has come."""
        return self.clock() >= self.at

    def remaining(self, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
        """Seconds until it comes, 0 once it has; never below `least` (a call that must be tried) nor above `most`."""
        left = self.at - self.clock()
        if left > maximum:
            left = maximum
        return left if left > minimum else minimum

    def wait(self, waiter: Waiter, *, maximum: float = math.inf) -> bool:
        """Wait on a condition or an event until it is told, for `most` seconds at a time; what its own wait says."""
        left = self.remaining(maximum=maximum)
        return waiter.wait(None if left == math.inf else left)

    def pause(self, seconds: float) -> bool:
        """Sleep `seconds` between two looks, less where it comes before; False, and no sleep, once it has come."""
        left = self.at - self.clock()
        if left <= 0:
            return False
        self.sleep(min(seconds, left))
        return True


def poll_until(look: Callable[[], _T], deadline: Deadline, *, interval: float) -> _T:
    """Look every `every` seconds until something is seen: the first true answer, or the one at the deadline, which is not."""
    while not (found := look()) and deadline.pause(interval):
        pass
    return found
