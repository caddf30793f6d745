"""Lifetime: a segment is old, in log time since it was created (its id is that tick)."""

from __future__ import annotations

from millrace.message.ids import LOGICAL_BITS
from millrace.wal.config import ChainConfig
from millrace.wal.segments.segment import Segment


class LifetimePolicy:
    name = "lifetime"

    def deadline(self, segment: Segment, config: ChainConfig) -> int:
        return segment.id + (config.segment_lifetime_ms << LOGICAL_BITS)
