"""Rows: a segment is full of rows."""

from __future__ import annotations

from millrace.wal.config import ChainConfig
from millrace.wal.segments.segment import Segment


class RowCountPolicy:
    name = "rows"

    def full(self, segment: Segment, config: ChainConfig) -> bool:
        return segment.rows >= config.segment_rows
