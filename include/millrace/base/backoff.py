"""Delays between retries, with jitter, so that clients that failed at the same time do not retry at the same time."""

from __future__ import annotations

import random
from typing import Final

JITTER: Final = 0.5


def jittered(seconds: float) -> float:
    """Return a random delay between `seconds` and 1.5 times that.

    The result is never below `seconds`: a server may have asked for that delay.
    """
    return seconds * random.uniform(1.0, 1.0 + JITTER)


def delay_after(failures: int, first: float, longest: float, *, factor: float = 2.0) -> float:
    """Return the delay after so many failures in a row, without jitter.

    0.0 after none, then `first` times `factor` for each further failure, at most `longest`.

    For a count of failures that is stored or shared; :class:`Backoff` counts attempts itself.
    """
    return min(longest, first * factor ** min(failures - 1, 60)) if failures > 0 else 0.0


class Backoff:
    """Delays that double with each failure in a row: from `first` seconds up to `longest`, before jitter."""

    __slots__ = ("_delay", "_first", "_jitter", "_longest")

    def __init__(self, first: float, longest: float, *, jitter: bool = True) -> None:
        """`jitter=False` is for retries that no other process makes at the same time."""
        self._first = self._delay = first
        self._longest = max(first, longest)
        self._jitter = jitter

    def next_delay(self) -> float:
        """Return the delay before the next retry, in seconds and with jitter, and double the delay after it."""
        delay, self._delay = self._delay, min(2 * self._delay, self._longest)
        return jittered(delay) if self._jitter else delay

    def reset(self) -> None:
        """Start again at the first delay, after a success."""
        self._delay = self._first
