"""What a log's server says of the clock that it stamps by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockView:
    """What a stamper's clock shows, in Unix milliseconds."""

    wall_ms: int
    stamp_ms: int
    held_since_ms: int | None
    """The stamp at which the leap began that is not believed; None where the wall clock is believed."""
    leap_seconds: float

    @property
    def ahead_seconds(self) -> float:
        """How far stamps are ahead of the wall clock; below 0 while a leap of it is not believed."""
        return (self.stamp_ms - self.wall_ms) / 1000
