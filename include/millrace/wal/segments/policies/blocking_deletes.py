"""Blocking deletes: too many rows were deleted on the VChannel since its oldest growing segment was created."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.wal.config import ChainConfig
from millrace.wal.segments.segment import Segment


class BlockingDeletesPolicy:
    name = "blocking_deletes"

    def remaining_rows(self, growing: Iterable[Segment], deleted: int, config: ChainConfig) -> int:
        """How many rows more may be deleted before what grows is sealed, where `deleted` rows were so far."""
        return config.blocking_delete_rows - (deleted - min(growing).deletes_before)
