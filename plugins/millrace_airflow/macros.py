"""Macros for templates: time ticks and moments, ``{{ macros.millrace.tick_of(data_interval_end) }}``.

A time tick is a hybrid timestamp: milliseconds since 1970 in the upper bits, a counter in the lower 18.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

LOGICAL_BITS: Final = 18


def tick_of(moment: datetime | str) -> int:
    """Return the first time tick of a moment (a datetime, or ISO 8601 text; without a zone it is UTC)."""
    value = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    if value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    return int(value.timestamp() * 1000) << LOGICAL_BITS


def moment_of(tick: int | str) -> datetime:
    """Return the moment of a time tick, to the millisecond, in UTC."""
    return datetime.fromtimestamp((int(tick) >> LOGICAL_BITS) / 1000, tz=UTC)


def ticks_between(start: datetime | str, end: datetime | str) -> tuple[int, int]:
    """Return the ticks [from, to) of a range of time, such as a data interval."""
    return tick_of(start), tick_of(end)
