"""One consistent look at all tables: each is pinned once, in the order in which none can be ahead of one pinned behind it.

Node, flusher and compaction go on meanwhile. What follows from another table is pinned before it: the flusher's checkpoints,
the segments, each collection's deletes and then its rows (compaction takes a delete away behind the rows that it hit), last the
WAL that all of them came from. So what a checkpoint says was flushed the others have; what is newer in them lies behind the
range that is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.base.settings import Settings
from millrace.operations.quality.collection_frames import StoredCollection, stored_collections
from millrace.operations.quality.frames import WalVersion
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    """The versions that a run looks at, and what it takes from them."""

    checkpoints: Mapping[str, Checkpoint]
    checkpoints_version: int
    segments_version: int | None
    """None where there is no such table yet."""
    collections: Mapping[int, StoredCollection]
    wal: WalVersion

    @property
    def flushed_ticks(self) -> dict[str, int]:
        """By PChannel the tick of its checkpoint."""
        return {name: each.time_tick for name, each in self.checkpoints.items()}


def take_snapshot(settings: Settings) -> DeploymentSnapshot | None:
    """Pin every table; None where there is no WAL yet."""
    checkpoints = open_table(settings.checkpoints_uri)
    segments = open_table(settings.segments_uri)
    known = read_checkpoints(checkpoints)
    stored = stored_collections(settings, known)
    if not WalTable.exists(settings.wal_uri):
        return None
    wal = WalTable.open(settings.wal_uri)
    return DeploymentSnapshot(
        checkpoints=known,
        checkpoints_version=0 if checkpoints is None else checkpoints.version,
        segments_version=None if segments is None else segments.version,
        collections=stored,
        wal=WalVersion(wal, WalSnapshot(wal.table)),
    )
