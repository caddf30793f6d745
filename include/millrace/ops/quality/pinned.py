"""One consistent look at all tables: each is pinned once, in the order in which none can be ahead of one pinned behind it.

Node, flusher and compaction go on meanwhile. What follows from another table is pinned before it: the flusher's checkpoints,
the segments, each collection's deletes and then its rows (compaction takes a delete away behind the rows that it hit), last the
WAL that all of them came from. So what a checkpoint says was flushed the others have; what is newer in them lies behind the
range that is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.ops.quality.collection_frames import Stored, stored_collections
from millrace.ops.quality.frames import Wal
from millrace.settings import Settings
from millrace.tables.delta_files import open_table
from millrace.tables.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.wal_reader import WalSnapshot
from millrace.tables.wal_table import WalTable


@dataclass(frozen=True, slots=True)
class Pinned:
    """The versions that a run looks at, and what it takes from them."""

    checkpoints: Mapping[str, Checkpoint]
    checkpoints_version: int
    segments_version: int | None
    """None where there is no such table yet."""
    stored: Mapping[int, Stored]
    wal: Wal

    @property
    def flushed(self) -> dict[str, int]:
        """By PChannel the tick of its checkpoint."""
        return {name: each.time_tick for name, each in self.checkpoints.items()}


def pin(settings: Settings) -> Pinned | None:
    """Pin every table; None where there is no WAL yet."""
    checkpoints = open_table(settings.checkpoints_path)
    segments = open_table(settings.segments_path)
    known = read_checkpoints(checkpoints, settings.checkpoints_path)
    stored = stored_collections(settings, known)
    if not WalTable.exists(settings.wal_path):
        return None
    wal = WalTable.open(settings.wal_path)
    return Pinned(
        checkpoints=known,
        checkpoints_version=0 if checkpoints is None else int(checkpoints.version()),
        segments_version=None if segments is None else int(segments.version()),
        stored=stored,
        wal=Wal(wal, WalSnapshot(wal.path, wal.delta)),
    )
