"""A consistent snapshot of all tables: each is pinned once, in an order in which no table is ahead of a later one.

Node, flusher and compaction keep running meanwhile. A table derived from another is pinned before it: the flusher's
checkpoints, the segments, each collection's deletes and then its rows (compaction removes a delete after the rows that
it hit), and finally the WAL, the source of all. The later tables therefore hold everything that a checkpoint calls
flushed, and anything newer in them lies beyond the range under check.
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
    """The table versions that a run reads, and data derived from them."""

    checkpoints: Mapping[str, Checkpoint]
    checkpoints_version: int
    segments_version: int | None
    """None if the table does not exist yet."""
    collections: Mapping[int, StoredCollection]
    wal: WalVersion

    @property
    def flushed_ticks(self) -> dict[str, int]:
        """Tick of the checkpoint by PChannel."""
        return {name: each.time_tick for name, each in self.checkpoints.items()}


def take_snapshot(settings: Settings) -> DeploymentSnapshot | None:
    """Pin every table. Returns None if there is no WAL yet."""
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
