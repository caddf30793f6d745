"""Add jitter to retry delays, so that clients that failed at the same time do not retry at the same time."""

from __future__ import annotations

import random
from typing import Final

JITTER: Final = 0.5


def jittered(seconds: float) -> float:
    """Return a random delay between `seconds` and 1.5 times that.

    The result is never below `seconds`: a server may have asked for that delay.
    """
    return seconds * random.uniform(1.0, 1.0 + JITTER)
