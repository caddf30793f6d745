"""The range of a check: the ticks (after, up_to] of each PChannel, so that a run continues where the last ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TickRange(NamedTuple):
    """Ticks t with after < t <= up_to."""

    after: int
    up_to: int

    @property
    def empty(self) -> bool:
        return self.up_to <= self.after


Ranges = Mapping[str, TickRange]
"""Tick ranges by PChannel. An empty mapping means the whole table."""


def choose_ranges(
    reached: Mapping[str, int], checked: Mapping[str, int], *, start: int | None = None, end: int | None = None
) -> dict[str, TickRange]:
    """Choose the range to check for each PChannel that has `reached` a tick.

    The range is [start, end) where given. It defaults to everything from `checked` (exclusive) to `reached`.
    """
    found = {}
    for pchannel, tick in sorted(reached.items()):
        after = checked.get(pchannel, 0) if start is None else max(start - 1, 0)
        up_to = tick if end is None else min(tick, end - 1)
        found[pchannel] = TickRange(after, max(after, up_to))
    return found


def has_ticks(ranges: Ranges) -> bool:
    """Return whether any range holds a tick."""
    return any(not each.empty for each in ranges.values())


def covers(outer: Ranges, inner: Ranges) -> bool:
    """Return whether a check over `outer` covered everything that a check over `inner` did."""
    if not inner:
        return True
    return all(
        pchannel in outer and outer[pchannel].after <= each.after and outer[pchannel].up_to >= each.up_to
        for pchannel, each in inner.items()
    )


def ranges_to_json(ranges: Ranges) -> dict[str, list[int]]:
    return {pchannel: list(each) for pchannel, each in ranges.items()}


def ranges_from_json(value: Mapping[str, list[int]]) -> dict[str, TickRange]:
    return {pchannel: TickRange(*each) for pchannel, each in value.items()}
