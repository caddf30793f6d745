"""The WAL's own retention: a verified base first, then the collections say from where they can be read, then rows go.

How far: what is older than the retention, was flushed (on all PChannels of the collections), and lies before a verified checkpoint. Where no whole file lies there,
nothing is proved either, so that what this costs is that of the rows that go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from pydantic import Field

from millrace.base.errors import PositionTruncated, StagedFileDamaged
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.message.ids import compose_tick
from millrace.operations.checkpoint.base_verification import BaseMismatch, verify_base
from millrace.operations.checkpoint.staged_trim import remove_trimmed_files
from millrace.operations.checkpoint.wal_trim import files_before, trim_wal
from millrace.operations.compaction.commits import raise_base_tick
from millrace.operations.operation import OperationReport
from millrace.storage.table import open_table
from millrace.tables.collections.bases import VerifiedBase, read_bases, write_base
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.collections.flush_tables import Checkpoint
from millrace.tables.read.plan import pchannel_of
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable


class WalTrimReport(OperationReport):
    """What the WAL of a PChannel gave up by its retention, or could. The bytes are free once VACUUM has run."""

    pchannel: str
    base_tick: int
    files: int
    rows: int
    freed_bytes: int
    problem: str = Field(default="", description="Why no base could be verified there; then nothing was trimmed.")


def apply_retention(
    settings: Settings,
    snapshot: WalSnapshot,
    flushed: Mapping[str, Checkpoint],
    reached: Mapping[str, int],
    *,
    now_ms: int,
    dry_run: bool = False,
    seam: Callable[[str], None] = hit,
) -> Iterator[WalTrimReport]:
    """Trim each PChannel of `reached` (its newest verified checkpoint's tick) as far as ``wal_retention`` asks; `now_ms` is log
    time, so that a wall clock that leaps takes nothing away."""
    oldest = compose_tick(max(0, now_ms - int(settings.wal_retention * 1000)), 0)
    bases = read_bases(settings.wal_uri)
    if not dry_run:
        _remove_staged(settings, seam)  # what a run that was killed left
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
                continue  # another run proved one first, and has trimmed to it
            except (BaseMismatch, StagedFileDamaged) as error:
                yield WalTrimReport(
                    pchannel=pchannel, base_tick=tick, files=0, rows=0, freed_bytes=0, problem=str(error)
                )
                continue
            seam("base.proved")
            if base is not before and not write_base(settings.wal_uri, before, base, seam=seam):
                continue  # another run proved one first, and trims to it
            seam("base.written")
            _say_from_where(settings, base, seam)
            wanted = base
        found = trim_wal(settings, wanted, dry_run=dry_run, seam=seam)
        if not dry_run:
            _remove_staged(settings, seam)
        yield WalTrimReport(
            pchannel=pchannel, base_tick=found.time_tick, files=found.files, rows=found.rows, freed_bytes=found.bytes
        )


def _remove_staged(settings: Settings, seam: Callable[[str], None]) -> None:
    wal = WalSnapshot.open(settings.wal_uri)
    if wal is not None:
        remove_trimmed_files(settings.staged_path, wal, seam=seam)


def _common_tick(flushed: Mapping[str, Checkpoint], checkpoint: Checkpoint) -> int:
    """The tick up to which every PChannel is flushed that a collection of this one lies on, too.

    A collection is readable up to the least tick of its PChannels; its base must not lie behind that.
    """
    names = {
        pchannel_of(name, info.collection_id)
        for info in checkpoint.catalog.vchannels.values()
        if not info.dropped_tick
        for name in info.vchannels
    }
    return min(flushed[name].time_tick if name in flushed else 0 for name in {*names, checkpoint.pchannel})


def _say_from_where(settings: Settings, base: VerifiedBase, seam: Callable[[str], None]) -> None:
    """Have each collection's table refuse reads before the base: what lies there could not be rebuilt any more (law 7)."""
    for number in base.collections:
        path = rows_uri(settings, number)
        table = open_table(path)
        if table is not None:
            raise_base_tick(table, base.time_tick, seam=seam)
