"""The pause before another attempt: never the same twice, so that those who failed together do not come back together."""

from __future__ import annotations

import random
from typing import Final

JITTER: Final = 0.5


def jittered(seconds: float) -> float:
    """At least `seconds` (a server may have asked for them), and up to half as long again."""
    return seconds * random.uniform(1.0, 1.0 + JITTER)
