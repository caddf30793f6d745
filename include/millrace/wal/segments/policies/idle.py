"""Idle: a segment that has some bytes got no insert for a while of log time."""

from __future__ import annotations

from millrace.message.ids import LOGICAL_BITS
from millrace.wal.config import ChainConfig
from millrace.wal.segments.segment import NEVER, Segment


class IdlePolicy:
    name = "idle"

    def deadline(self, segment: Segment, config: ChainConfig) -> int:
        if segment.bytes < config.segment_idle_bytes:
            return NEVER
        return segment.last_insert_tick + (config.segment_idle_ms << LOGICAL_BITS)
