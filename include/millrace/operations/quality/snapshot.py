"""A consistent snapshot of all tables: each is pinned once, in an order in which no table is ahead of a later one.

Node, flusher and compaction keep running meanwhile. A table derived from another is pinned before it: the flusher's
checkpoints, the segments, each collection's deletes and then its rows (compaction removes a delete after the rows that
it hit), and finally the WAL, the source of all. The later tables therefore hold everything that a checkpoint calls
flushed, and anything newer in them lies beyond the range under check.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from millrace.base.settings import Settings
from millrace.operations.coverage import Coverage
from millrace.operations.quality.collection_frames import StoredCollection, known_collections, pin_collection
from millrace.operations.quality.frames import WalVersion
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import deletes_uri, rows_uri
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from millrace.wal.visible.catalog import VChannelInfo


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    """The table versions that a run reads, and data derived from them."""

    checkpoints: Mapping[str, Checkpoint]
    checkpoints_version: int
    segments_version: int | None
    """None if the table does not exist yet."""
    known: Mapping[int, Mapping[str, VChannelInfo]]
    """VChannels of the collections that are not dropped."""
    collections: Mapping[int, StoredCollection]
    """Collections that have tables and are not known to be unchanged."""
    wal: WalVersion
    unchanged: frozenset[str]
    """Those of `wal` and `checkpoints` that have not changed since their last check passed."""

    @property
    def flushed_ticks(self) -> dict[str, int]:
        """Tick of the checkpoint by PChannel."""
        return {name: each.time_tick for name, each in self.checkpoints.items()}


def take_snapshot(
    settings: Settings, covered: Coverage, *, names: Collection[str] = (), numbers: Collection[int] = ()
) -> DeploymentSnapshot | None:
    """Pin every table that changed since its last check, and the collections of `names` and `numbers` in any case.

    Returns None if there is no WAL yet.
    """
    same = {"checkpoints"} if covered.look("checkpoints", settings.checkpoints_uri) is not None else set()
    checkpoints = open_table(settings.checkpoints_uri)
    segments = open_table(settings.segments_uri)
    rows = read_checkpoints(checkpoints)
    known, stored = known_collections(rows), {}
    for number, infos in known.items():
        places = (
            (f"deletes/{number}", deletes_uri(settings, number)),
            (f"collections/{number}", rows_uri(settings, number)),
        )
        marks = [covered.look(*place) for place in places]  # all of them, before a table is opened
        idle = None not in marks
        if idle and number not in numbers and next(iter(infos.values())).name not in names:
            continue
        found = pin_collection(settings, number, infos)
        if found is not None:
            stored[number] = found
        else:  # nothing to check until it has a first row
            for name, _ in places:
                covered.record(name)
    if not WalTable.exists(settings.wal_uri):
        return None
    same |= {"wal"} if covered.look("wal", settings.wal_uri) is not None else set()
    wal = WalTable.open(settings.wal_uri)
    return DeploymentSnapshot(
        checkpoints=rows,
        checkpoints_version=0 if checkpoints is None else checkpoints.version,
        segments_version=None if segments is None else segments.version,
        known=known,
        collections=stored,
        wal=WalVersion(wal, WalSnapshot(wal.table)),
        unchanged=frozenset(same),
    )
