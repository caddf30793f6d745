"""A micro-batch of changes folded to its net effect: retracted VChannels, deleted keys, new rows.

The last change of a key counts. The order is that of ``_time_tick`` and ``_write_tick`` if the rows have these columns
(at one tick, retractions come first, then deletes, then inserts, as in the source), otherwise that of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import ChangesRefused, InvalidArgument
from millrace.client.produce.rows import last_of_each_key
from millrace.flows.sinks.collection.placed import PLACE
from millrace.wal.visible.changes import CHANGE_COLUMNS

KIND: Final = "_change"
_RANKS: Final = pa.array(["retract", "delete", "insert", "upsert"])
_TICKS: Final = ("_time_tick", "_write_tick")


@dataclass(frozen=True, slots=True)
class Folded:
    """The net effect of a micro-batch."""

    retracted: tuple[str, ...]
    """VChannels of the source whose rows are all removed, before the other changes."""
    deleted: pa.Table
    """Deleted keys: the collection's key columns, each key once, and none that is in `rows`."""
    rows: pa.Table
    """Rows that replace those of their keys, without the columns of changes."""
    earlier_deleted: pa.Table
    """Keys that a later change deletes or replaces, with PLACE. Empty if the changes have no such column."""
    earlier_rows: pa.Table
    """Rows that a later change deletes or replaces, with PLACE. Empty if the changes have no such column."""


def ordered(changes: pa.Table) -> pa.Table:
    """Return `changes` in the order in which they take effect."""
    if KIND not in changes.column_names:
        return changes
    order = _order(changes, pc.fill_null(pc.index_in(changes[KIND].cast(pa.utf8()), _RANKS), len(_RANKS)))
    return changes if order is None else changes.take(order)


def fold(changes: pa.Table, key: Sequence[str]) -> Folded:
    """Return the net effect of `changes` on rows with the key fields `key`. Raises InvalidArgument, ChangesRefused.

    Keys and rows have the column PLACE if `changes` have it, in the order in which they take effect.
    """
    if KIND not in changes.column_names:
        raise InvalidArgument(f"the rows have no column {KIND!r}: it must be insert, upsert, delete or retract")
    missing = [name for name in key if name not in changes.column_names]
    if missing:
        raise InvalidArgument(f"the column {missing[0]!r} is missing, which is part of the collection's key")
    ranks = pc.index_in(changes[KIND].cast(pa.utf8()), _RANKS)
    if ranks.null_count:
        other = changes[KIND].filter(pc.is_null(ranks))[0].as_py()
        raise InvalidArgument(f"{KIND!r} is insert, upsert, delete or retract, not {other!r}")
    order = _order(changes, ranks)
    if order is not None:
        changes, ranks = changes.take(order), ranks.take(order)
    codes = ranks.combine_chunks().to_numpy() if len(ranks) else np.zeros(0, dtype=np.int32)
    retracted: tuple[str, ...] = ()
    if (codes == 0).any():
        retracted, changes, codes = _retracted(changes, codes)
    named = pa.array(codes)
    marked = changes.append_column("_rank", named) if len(changes) else changes
    keys, plain = [name for name in (*key, PLACE) if name in changes.column_names], _plain(changes)
    none = changes.slice(0, 0)
    if not len(marked):
        return Folded(retracted, none.select(keys), none.select(plain), none.select(keys), none.select(plain))
    last = last_of_each_key(marked, key)
    earlier = marked.slice(0, 0)
    if PLACE in marked.column_names and len(last) < len(marked):
        earlier = marked.filter(pc.invert(pc.is_in(marked[PLACE], last[PLACE])))
    gone, went = pc.equal(last["_rank"], 1), pc.equal(earlier["_rank"], 1)
    return Folded(
        retracted,
        last.filter(gone).select(keys),
        last.filter(pc.invert(gone)).select(plain),
        earlier.filter(went).select(keys),
        earlier.filter(pc.invert(went)).select(plain),
    )


def _plain(changes: pa.Table) -> list[str]:
    return [name for name in changes.column_names if name not in CHANGE_COLUMNS.names]


def _order(changes: pa.Table, ranks: pa.ChunkedArray) -> pa.Array | None:
    """Return the rows' places in the order of their ticks; None if they are in order already or have no ticks."""
    if any(name not in changes.column_names for name in _TICKS):
        return None
    keys = [changes[name].to_numpy() for name in _TICKS]
    order = np.lexsort((ranks.to_numpy(), keys[1], keys[0]))  # among equal ones the order of the rows
    return None if (order == np.arange(len(order))).all() else pa.array(order)


def _retracted(changes: pa.Table, codes: np.ndarray) -> tuple[tuple[str, ...], pa.Table, np.ndarray]:
    """Return the retracted VChannels, and the changes that no retraction removed. Raises ChangesRefused."""
    for name in ("_vchannel", "_partition_id"):
        if name not in changes.column_names:
            raise ChangesRefused(
                f"a retraction without the column {name!r} does not name the removed rows: keep that column"
            )
    places = np.flatnonzero(codes == 0)
    if pc.any(pc.not_equal(changes["_partition_id"].take(pa.array(places)), 0)).as_py():
        raise ChangesRefused(
            "a partition of the source was dropped, and it is unknown which of the sink's rows came from it:"
            " delete them, and restart"
            " the stream after that tick, or with a new snapshot"
        )
    homes = changes["_vchannel"].combine_chunks().dictionary_encode()
    homes = homes.chunk(0) if isinstance(homes, pa.ChunkedArray) else homes
    index = homes.indices.to_numpy(zero_copy_only=False)
    last = np.full(len(homes.dictionary), -1)
    last[index[places]] = places  # of equal ones the last assignment wins
    remaining = np.flatnonzero((np.arange(len(codes)) > last[index]) & (codes != 0))
    names = homes.dictionary.to_pylist()
    return tuple(names[each] for each in np.flatnonzero(last >= 0)), changes.take(pa.array(remaining)), codes[remaining]
