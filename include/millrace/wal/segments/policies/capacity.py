"""Capacity: a segment is full of bytes. Up to a tenth below the limit, by its id, so that not all of them end at once."""

from __future__ import annotations

from typing import Final

from millrace.wal.config import ChainConfig
from millrace.wal.segments.segment import Segment

_MASK: Final = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """Finaliser of splitmix64: spreads a segment id over 64 bits (the seal jitter)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class CapacityPolicy:
    name = "capacity"

    def full(self, segment: Segment, config: ChainConfig) -> bool:
        return segment.bytes * 1000 >= config.segment_bytes * (1000 - splitmix64(segment.id) % 101)
