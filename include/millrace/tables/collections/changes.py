"""Changes of a collection from the ``wal`` table, and where readers of changes start (millrace.wal.visible.changes)."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import pyarrow as pa

from millrace.base.errors import PositionTruncated, StagedFileDamaged
from millrace.base.settings import Settings
from millrace.message.bodies import VChannelImport
from millrace.message.ids import pchannel_of
from millrace.message.schema import CollectionSchema
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import read_checkpoints
from millrace.tables.collections.staged_files import StagedFiles
from millrace.tables.wal.reader import MAX_TICK, WalSnapshot
from millrace.wal.txn_buffer import TxnBuffer
from millrace.wal.visible.catalog import VChannelInfo
from millrace.wal.visible.changes import CHANGES_BEGIN, ChangeBatch, ChangePosition, ChangeReader, ChangeStart


@dataclass(frozen=True, slots=True)
class ImportedFiles:
    """The rows of imports for a reader of the WAL (implements Imports). `wal` tells how long the files stay."""

    staged: StagedFiles
    wal: str

    @classmethod
    def of(cls, settings: Settings) -> ImportedFiles:
        """Return the files of a data folder."""
        return cls(StagedFiles.of(settings), settings.wal_uri)

    def rows(self, named: VChannelImport) -> Generator[tuple[int, pa.RecordBatch], None, None]:
        """Yield the rows. Raises StagedFileDamaged, and PositionTruncated if retention removed the files meanwhile."""
        try:
            yield from self.staged.rows(named)
        except StagedFileDamaged as error:
            raise _truncated(self.wal, pchannel_of(named.vchannel), named.tick - 1) or error from None


def change_start_at(settings: Settings, pchannel: str, collection_id: int, after: ChangePosition) -> ChangeStart:
    """Return the start after `after`, with the catalog of the newest checkpoint, from the earlier of the two."""
    return ChangeStart.of(after, *checkpointed_vchannels(settings, pchannel, collection_id) if after.tick else (0, {}))


def checkpointed_vchannels(
    settings: Settings, pchannel: str, collection_id: int
) -> tuple[int, dict[str, VChannelInfo]]:
    """Return the tick of a PChannel's newest checkpoint (0 without one) and its VChannels of a collection."""
    found = read_checkpoints(open_table(settings.checkpoints_uri)).get(pchannel)
    return (0, {}) if found is None else (found.time_tick, found.catalog.collection_vchannels(collection_id))


def table_changes(
    settings: Settings,
    collection_id: int,
    pchannel: str,
    *,
    after: ChangePosition = CHANGES_BEGIN,
    until_tick: int = MAX_TICK,
    schema: CollectionSchema | None = None,
) -> Iterator[ChangeBatch]:
    """Yield the changes after `after` up to `until_tick` from one version of the ``wal`` table.

    With `schema`, all batches have that schema. Raises PositionTruncated if retention removed what follows `after`, and
    what
    :meth:`ChangeReader.push` raises.
    """
    start = change_start_at(settings, pchannel, collection_id, after)
    wal = WalSnapshot.open(settings.wal_uri)
    if wal is None:
        return
    buffer = TxnBuffer(after_tick=start.scan_after)
    reader = ChangeReader(pchannel, collection_id, start, imports=ImportedFiles.of(settings), schema=schema)
    begin = wal.confirmed_at(pchannel, start.scan_after)
    for rows in wal.messages(pchannel, start=begin, up_to_tick=until_tick):
        yield from reader.push(buffer.push(rows))


def _truncated(wal: str, pchannel: str, tick: int) -> PositionTruncated | None:
    """Return the error for a reader at `tick` if retention removed staged files together with their messages."""
    now = WalSnapshot.open(wal)
    trimmed, earliest = (0, None) if now is None else now.trimmed(pchannel)
    if earliest is None or trimmed <= tick:
        return None
    return PositionTruncated(
        f"the WAL of {pchannel} was trimmed up to tick {trimmed} while this reader was at tick {tick}: read the "
        f"collection at tick {trimmed} or later, and its changes from there",
        earliest=earliest,
    )
