"""Retention of the WAL: verify a base, raise the earliest readable tick of the collections, then remove rows.

Removed is what is older than the retention, is flushed (on all PChannels of its collections), and lies before a
verified checkpoint. If no whole file qualifies, no base is verified, so the cost is that of the removed rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pydantic import Field

from millrace.base.errors import PositionTruncated, StagedFileDamaged
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.message.ids import compose_tick, pchannel_of
from millrace.operations.checkpoint.base_verification import BaseMismatch, verify_base
from millrace.operations.checkpoint.staged_trim import remove_trimmed_files
from millrace.operations.checkpoint.wal_trim import files_before, trim_wal
from millrace.operations.operation import OperationReport
from millrace.storage.table import open_table
from millrace.tables.collections.bases import VerifiedBase, read_bases, write_base
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.collections.flush_tables import Checkpoint
from millrace.tables.collections.staged_files import StagedFiles
from millrace.tables.rewrite.commits import raise_base_tick
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable


class WalTrimReport(OperationReport):
    """Rows that a PChannel's WAL removed by its retention, or could remove. VACUUM frees the bytes."""

    pchannel: str
    base_tick: int
    files: int
    rows: int
    freed_bytes: int
    problem: str = Field(default="", description="Why no base could be verified there. Nothing was trimmed then.")


def apply_retention(
    settings: Settings,
    snapshot: WalSnapshot,
    flushed: Mapping[str, Checkpoint],
    reached: Mapping[str, int],
    *,
    now_ms: int,
    dry_run: bool = False,
) -> Iterator[WalTrimReport]:
    """Trim each PChannel of `reached` as far as ``wal_retention`` allows.

    `reached` maps a PChannel to the tick of its newest verified checkpoint. `now_ms` is log time, so that a wall clock
    that jumps ahead removes nothing.
    """
    oldest = compose_tick(max(0, now_ms - int(settings.wal_retention * 1000)), 0)
    bases = read_bases(settings.wal_uri)
    if not dry_run:
        _remove_staged(settings)  # left by a run that was killed
    for pchannel, verified in sorted(reached.items()):
        checkpoint = flushed.get(pchannel)
        if checkpoint is None:
            continue
        before = bases.get(pchannel, VerifiedBase(pchannel))
        tick = min(oldest, verified, _common_tick(flushed, checkpoint))
        wanted = before
        if tick > before.time_tick:
            wanted = replace(before, time_tick=tick, confirmed=snapshot.confirmed_at(pchannel, tick))
        if not files_before(WalTable.open(settings.wal_uri), wanted):
            continue
        if not dry_run:
            try:
                base = before if wanted is before else verify_base(settings, snapshot, checkpoint, before, tick)
            except PositionTruncated:
                continue  # another run verified a base first, and has trimmed to it
            except (BaseMismatch, StagedFileDamaged) as error:
                yield WalTrimReport(
                    pchannel=pchannel, base_tick=tick, files=0, rows=0, freed_bytes=0, problem=str(error)
                )
                continue
            hit("base.proved")
            if base is not before and not write_base(settings.wal_uri, before, base):
                continue  # another run verified a base first, and trims to it
            hit("base.written")
            _raise_base_ticks(settings, base)
            wanted = base
        found = trim_wal(settings, wanted, dry_run=dry_run)
        if not dry_run:
            _remove_staged(settings)
        yield WalTrimReport(
            pchannel=pchannel, base_tick=found.time_tick, files=found.files, rows=found.rows, freed_bytes=found.bytes
        )


def _remove_staged(settings: Settings) -> None:
    wal = WalSnapshot.open(settings.wal_uri)
    if wal is not None:
        remove_trimmed_files(StagedFiles.of(settings), wal)


def _common_tick(flushed: Mapping[str, Checkpoint], checkpoint: Checkpoint) -> int:
    """Return the tick up to which every PChannel is flushed that shares a collection with this one.

    A collection is readable up to the least tick of its PChannels, so its base must not be later.
    """
    names = {
        pchannel_of(name)
        for info in checkpoint.catalog.vchannels.values()
        if not info.dropped_tick
        for name in info.vchannels
    }
    return min(flushed[name].time_tick if name in flushed else 0 for name in {*names, checkpoint.pchannel})


def _raise_base_ticks(settings: Settings, base: VerifiedBase) -> None:
    """Make each collection's table refuse reads before the base.

    They could not be answered again from the WAL (law 7).
    """
    for number in base.collections:
        path = rows_uri(settings, number)
        table = open_table(path)
        if table is not None:
            raise_base_tick(table, base.time_tick)
