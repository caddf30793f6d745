"""The rows of inner files that are dead at a tick, by position: what a published table masks.

A row is judged by its key and its ticks, with the rule that compaction uses (millrace.tables.collections.dead_rows).
Rows of after the tick are masked too: a PChannel may be ahead of the others. A file is opened only if a delete may hit
it by the bounds of key and tick, if DDL hides rows of before it, or if it has rows of after the tick.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import key_schema
from millrace.storage.deletion_vectors import NO_POSITIONS, Positions
from millrace.storage.parquet_file import open_file
from millrace.storage.store import TableStore
from millrace.storage.table import LiveFile, TableHandle
from millrace.tables.collections.data_tables import TICK
from millrace.tables.collections.dead_rows import HiddenRanges, dead_mask
from millrace.tables.read.arrow import stored_table_rows
from millrace.wal.visible.collection_rows import deletes_file_schema

_TICKS: Final = (TICK, "_write_tick")
_PLACE: Final = ("_partition_id", *_TICKS)


@dataclass(frozen=True)
class Deletes:
    """The deletes of a collection in a range of ticks, in memory."""

    rows: pa.Table
    """The columns of the key, ``_partition_id``, ``_time_tick``, ``_write_tick``."""
    key: tuple[str, ...]

    @classmethod
    def read(cls, table: TableHandle | None, schema: CollectionSchema, *, after: int, until: int) -> Deletes:
        """Read the deletes with after < tick <= until. Raises TableDamaged."""
        names = key_schema(schema).names
        wanted = [*names, *_PLACE]
        found = stored_table_rows(table, deletes_file_schema(schema), until, None, after=after, columns=wanted)
        return cls(pa.concat_tables(found), tuple(names))

    def after(self, tick: int) -> Deletes:
        """Return the deletes after `tick`."""
        late = self.rows["_time_tick"].to_numpy() > tick
        return self if late.all() else Deletes(self.rows.filter(pa.array(late)), self.key)

    def up_to(self, tick: int) -> Deletes:
        """Return the deletes up to `tick`."""
        early = self.rows["_time_tick"].to_numpy() <= tick
        return self if early.all() else Deletes(self.rows.filter(pa.array(early)), self.key)

    @cached_property
    def last_tick(self) -> int:
        """The last tick of any delete; 0 without one."""
        return int(pc.max(self.rows["_time_tick"]).as_py() or 0) if self.rows.num_rows else 0

    @cached_property
    def names_partitions(self) -> bool:
        """Whether a delete applies to one partition alone."""
        return bool(self.rows["_partition_id"].to_numpy().any())

    @cached_property
    def _first_keys(self) -> Any:
        """The distinct values of the key's first column, in order."""
        values: Any = pc.unique(self.rows[self.key[0]])
        return np.sort(values.to_numpy()) if pa.types.is_integer(values.type) else sorted(values.to_pylist())

    def may_hit(self, file: LiveFile) -> bool:
        """Return whether a delete may hit a row of `file`, by the bounds of tick and key in the table's log."""
        low_tick = file.low.get(TICK)
        if not self.rows.num_rows or (low_tick is not None and self.last_tick < low_tick):
            return False
        low, high = file.low.get(self.key[0]), file.high.get(self.key[0])
        if low is None or high is None:
            return True
        keys = self._first_keys
        try:
            return bisect_left(keys, low) < bisect_right(keys, high)
        except TypeError:  # bounds of another type than the values, such as a date as text
            return True


@dataclass(frozen=True, slots=True)
class RowJudge:
    """Judges the rows of files at one tick."""

    store: TableStore
    """The store of the rows table."""
    deletes: Deletes
    hidden: HiddenRanges
    tick: int
    opened: list[str] = field(default_factory=list)
    """Files whose rows were read."""

    def positions(self, file: LiveFile) -> Positions:
        """Return the positions of the dead rows of `file`, sorted, and of rows after the tick. Raises TableDamaged."""
        low, high = file.low.get(TICK), file.high.get(TICK)
        hides = any(low is None or low < tick for tick in self.hidden.ticks)
        hit = self.deletes.may_hit(file)
        if not hides and not hit and high is not None and high <= self.tick:
            return NO_POSITIONS
        rows = self._read(file.path, partitions=hides or self.deletes.names_partitions, vchannels=hides, keys=hit)
        deletes = self.deletes.rows if hit else self.deletes.rows.slice(0, 0)
        dead = dead_mask(rows, deletes, key=self.deletes.key, hidden=self.hidden if hides else HiddenRanges())
        dead |= rows[TICK].to_numpy() > self.tick
        return np.flatnonzero(dead).astype(np.int64)

    def _read(self, path: str, *, partitions: bool, vchannels: bool, keys: bool) -> pa.Table:
        names = [*(self.deletes.key if keys else ()), *_TICKS]
        names += ["_partition_id"] if partitions else []
        names += ["_vchannel"] if vchannels else []
        self.opened.append(path)
        with open_file(self.store, path) as file:
            return file.read(columns=names)


def union(one: Positions, other: Positions) -> Positions:
    """Return the positions of both, sorted, each once."""
    return np.union1d(one, other) if len(one) and len(other) else one if len(one) else other
