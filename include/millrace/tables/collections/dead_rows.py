"""Dead rows of a collection's table: rows that no read at a tick >= B can see, which compaction may drop once B is the
base.

A row is dead at B if a delete with a tick <= B hits it, or if its partition or collection was dropped after it at a
tick <= B. The same holds if the collection was created again under its id, or an Import replaced the rows of its
VChannel. A row with a tick > B is never dead. Compaction removes rows by this rule, and verification applies it to both
sides, so it does not matter which dead rows were removed already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.tables.read.deleted import deleted_mask
from millrace.wal.visible.catalog import VChannelInfo


@dataclass(frozen=True, slots=True)
class HiddenRanges:
    """Rows that DDL up to a tick hides."""

    partitions: tuple[tuple[str, int, int], ...] = ()
    """(VChannel, partition id, tick): its rows before the tick are hidden."""
    vchannels: tuple[tuple[str, int], ...] = ()
    """(VChannel, tick): all its rows before the tick are hidden."""

    @property
    def ticks(self) -> list[int]:
        return [*(each[2] for each in self.partitions), *(each[1] for each in self.vchannels)]

    @property
    def last_tick(self) -> int:
        """The last tick of any range; 0 if there is none."""
        return max(self.ticks, default=0)


def hidden_ranges_at(vchannels: Mapping[str, VChannelInfo], tick: int) -> HiddenRanges:
    """Return the rows that DDL on a collection's VChannels hides at `tick`.

    Covers dropped partitions, a dropped collection, replacing imports, and an earlier collection of the same id.
    """
    partitions = [
        (name, number, max(early))
        for name, info in sorted(vchannels.items())
        for number, ticks in sorted(info.partition_drops.items())
        if (early := [each for each in ticks if each <= tick])
    ]
    whole = [
        (name, max(early))
        for name, info in sorted(vchannels.items())
        if (early := [each for each in (info.first_visible_tick(tick), info.dropped_tick) if 0 < each <= tick])
    ]
    return HiddenRanges(tuple(partitions), tuple(whole))


def dead_mask(rows: pa.Table, deletes: pa.Table, *, key: Sequence[str], hidden: HiddenRanges) -> npt.NDArray[np.bool_]:
    """Return a mask of the dead `rows`, shape ``(rows,)``, given the `deletes` and `drops` up to the tick.

    Both tables need the fields `key` and the columns that locate a row or a delete.
    """
    found = np.zeros(rows.num_rows, dtype=bool)
    if rows.num_rows == 0:
        return found
    ticks = rows["_time_tick"].to_numpy()
    for name, number, tick in hidden.partitions:
        mine = pc.and_(pc.equal(rows["_vchannel"], name), pc.equal(rows["_partition_id"], number)).to_numpy()
        found |= mine & (ticks < tick)
    for name, tick in hidden.vchannels:
        found |= pc.equal(rows["_vchannel"], name).to_numpy() & (ticks < tick)
    if deletes.num_rows:
        found |= deleted_mask(rows, deletes, key)
    return found
