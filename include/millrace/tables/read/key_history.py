"""``read_key_history``: what happened to the rows of some primary keys between two ticks, in order of effect.

The changes are those of the collection's stream of changes (millrace.wal.visible.changes), with two differences. An
upsert is one change, not a delete and an insert. A retraction is there for the keys whose rows it removes, with the
key.

Its cost follows the keys and the ticks: of files that the key index covers, it reads the row groups with rows of these
keys and ticks; of others, those whose bounds of ticks and keys do not exclude them. A retraction in the range reads all
rows of the keys that are left of before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import TickTooOld
from millrace.message.ids import tick_physical_ms
from millrace.message.keys import key_column
from millrace.message.stored_columns import key_schema, needed_columns, to_fields
from millrace.rpc.selection import Selection
from millrace.tables.collections.data_tables import earliest_readable_tick
from millrace.tables.key_index.lookup import find_keys
from millrace.tables.key_index.shared_index import request_index
from millrace.tables.read.deleted import deleted_mask
from millrace.tables.read.keys import deletes_of_keys, rows_of_keys
from millrace.tables.read.open_tables import OpenTables
from millrace.tables.read.plan import ReadPlan
from millrace.wal.visible.collection_rows import align_to_schema, rows_read_schema

HISTORY_COLUMNS: Final = pa.schema(
    [
        pa.field("_change", pa.utf8()),  # insert, upsert, delete, retract
        pa.field("_time", pa.timestamp("ms", "UTC")),  # the physical time of the tick
        pa.field("_partition_id", pa.int64()),  # 0: all partitions, of a delete and a retraction
        pa.field("_vchannel", pa.utf8()),
        pa.field("_time_tick", pa.int64()),  # from which on the change is visible
        pa.field("_write_tick", pa.int64()),  # the message's own: the order inside a transaction
    ]
)
"""Columns after the fields in the history of keys."""

_PLACE: Final = ("_partition_id", "_vchannel", "_time_tick", "_write_tick")


@dataclass(frozen=True, slots=True)
class _Retraction:
    """DDL that removes all rows of a VChannel before a tick, in a partition or in all (0)."""

    vchannel: str
    partition_id: int
    tick: int


def read_key_history(
    plan: ReadPlan,
    keys: pa.RecordBatch,
    *,
    after: int | None = None,
    columns: Sequence[str] | None = None,
    tables: OpenTables | None = None,
) -> pa.Table:
    """Return the changes of the rows of `keys` after `after` up to the plan's tick, with `columns` or all fields.

    `keys` has the key's fields in order; their names do not matter. Each change has the key; a delete and a retraction
    have no other field. Without `after`, the history begins with the collection.

    Raises TickTooOld if compaction or retention removed changes after `after`; the message names the earliest tick that
    works. Raises InvalidArgument, TableDamaged.
    """
    schema = plan.schema
    named = key_schema(schema)
    fields = schema.arrow()
    names = Selection(columns=None if columns is None else tuple(columns)).names(fields)
    since = _checked(plan, after)
    wanted = pa.Table.from_batches([keys]).rename_columns(named.names).cast(named)
    chosen = [each for each in fields.names if each in {*names, *schema.key_names}]
    there = {each.name for each in needed_columns(schema, chosen)} | set(_PLACE)
    target = pa.schema([each.with_nullable(True) for each in rows_read_schema(schema) if each.name in there])
    every = _retractions(plan)
    retractions = [each for each in every if each.tick > since]
    first = 0 if retractions else since + 1  # what a retraction removes may be older
    opened = tables or OpenTables()
    rows = _own(_rows(plan, wanted, target, opened, first), plan)
    deletes = _own(deletes_of_keys(plan, wanted, first), plan)
    parts = [_changes(rows, deletes, target, since)]
    parts += [_removed(each, every, rows, deletes, named, target) for each in retractions]
    found = pa.concat_tables(parts)
    order = np.lexsort((found["_write_tick"].to_numpy(), found["_time_tick"].to_numpy()))
    found = to_fields(found.take(pa.array(order)), schema, chosen)
    times = pc.shift_right(found["_time_tick"], pa.scalar(18, pa.int64())).cast(pa.timestamp("ms", "UTC"))
    found = found.append_column("_time", times)
    shown = [name for name in fields.names if name in names] if columns is None else names
    kinds = pa.schema([*(fields.field(name).with_nullable(True) for name in shown), *HISTORY_COLUMNS])
    return found.select(kinds.names).cast(kinds)


def _checked(plan: ReadPlan, after: int | None) -> int:
    """Return the tick after which changes are wanted. Raises TickTooOld if some are gone."""
    base = earliest_readable_tick(plan.rows)
    if base and (after is None or after < base):
        said = f"{_moment(base)} (tick {base})"
        asked = "" if after is None else f", not {after}"
        raise TickTooOld(
            f"the changes up to {said} are gone: compaction folded them, or they were trimmed with the WAL; ask for"
            f" the history after {base} or a later tick{asked}"
        )
    return min(after or 0, plan.tick)  # a tick of one PChannel may be ahead of the tick of a read over several


def _moment(tick: int) -> str:
    milliseconds = pa.scalar(tick_physical_ms(tick), pa.timestamp("ms", "UTC"))
    return str(milliseconds.as_py().isoformat(timespec="milliseconds"))


def _retractions(plan: ReadPlan) -> list[_Retraction]:
    """Return those up to the plan's tick, in order: what one removed, a later one does not remove again."""
    found = [
        _Retraction(name, number, tick)
        for name, info in plan.vchannels.items()
        for number, ticks in ((0, info.replace_ticks), *info.partition_drops.items())
        for tick in ticks
        if info.created_tick < tick <= plan.tick
    ]
    return sorted(found, key=lambda each: (each.tick, each.vchannel, each.partition_id))


def _rows(plan: ReadPlan, wanted: pa.Table, target: pa.Schema, tables: OpenTables, first: int) -> pa.Table:
    """Return all rows of the keys with a tick from `first` up to the plan's, dead ones too."""
    parts = [target.empty_table()]
    if plan.rows is not None:
        index = tables.key_index(plan.settings.key_index_path(plan.collection_id))
        places = find_keys(index, plan.rows, plan.schema, wanted, until=plan.tick, since=first)
        for path, positions in places.positions.items():
            rows, _ = plan.rows.take_rows(path, positions, columns=target.names)
            parts.append(align_to_schema(rows, target))
        request_index(plan.settings, plan.collection_id, index, places.unknown_rows)
        if places.unknown:
            parts.append(rows_of_keys(plan.rows, places.unknown, wanted, target, first_tick=first, last_tick=plan.tick))
    parts += [piece.select(target.names).cast(target) for piece in plan.tail_rows(deletes=False)]
    found = pa.concat_tables(parts)
    ticks = found["_time_tick"].to_numpy()
    found = found.filter(pa.array((ticks >= first) & (ticks <= plan.tick)))
    keys = wanted.column_names
    return found.filter(pc.is_in(key_column(found, keys), key_column(wanted, keys).combine_chunks()))


def _own(found: pa.Table, plan: ReadPlan) -> pa.Table:
    """Remove what belongs to an earlier collection of the same id."""
    created = {name: info.created_tick for name, info in plan.vchannels.items()}
    if not found.num_rows or pc.min(found["_time_tick"]).as_py() >= max(created.values(), default=0):
        return found
    channels = found["_vchannel"].to_pylist()
    ticks = found["_time_tick"].to_numpy()
    return found.filter(pa.array(ticks >= np.array([created.get(name, 0) for name in channels], dtype=np.int64)))


def _changes(rows: pa.Table, deletes: pa.Table, target: pa.Schema, since: int) -> pa.Table:
    """Return rows and deletes after `since` as changes."""
    rows, deletes = (each.filter(pc.greater(each["_time_tick"], since)) for each in (rows, deletes))
    written, deleted = _messages(rows), _messages(deletes)
    # An Upsert deletes its keys and inserts its rows, with the same ticks.
    replaced = pc.is_in(written, deleted)
    kinds = pc.if_else(replaced, "upsert", "insert")
    alone = deletes.filter(pc.invert(pc.is_in(deleted, written)))
    return pa.concat_tables(
        [
            rows.append_column(HISTORY_COLUMNS.field("_change"), kinds),
            _nullable(alone, target).append_column(
                HISTORY_COLUMNS.field("_change"), pa.array(["delete"] * alone.num_rows, pa.utf8())
            ),
        ]
    )


def _messages(found: pa.Table) -> pa.Array:
    """Return a name for the message of each row."""
    channel, tick = found["_vchannel"].cast(pa.utf8()), found["_write_tick"].cast(pa.utf8())
    return pc.binary_join_element_wise(channel, tick, "@").combine_chunks()


def _removed(
    one: _Retraction,
    every: Sequence[_Retraction],
    rows: pa.Table,
    deletes: pa.Table,
    named: pa.Schema,
    target: pa.Schema,
) -> pa.Table:
    """Return a retraction as changes: one for each key with rows that were there before it."""
    hit = _within(rows, one)
    earlier = [each for each in every if each.tick < one.tick]
    for each in earlier:
        hit &= ~_within(rows, each)
    before = deletes.filter(pc.less(deletes["_time_tick"], one.tick))
    if before.num_rows:
        hit &= ~deleted_mask(rows, before, named.names)
    keys = rows.filter(pa.array(hit)).select(named.names)
    keys = keys.group_by(named.names).aggregate([]).select(named.names)
    count = keys.num_rows
    place = pa.table(
        {
            "_partition_id": pa.array([one.partition_id] * count, pa.int64()),
            "_vchannel": pa.array([one.vchannel] * count, pa.utf8()),
            "_time_tick": pa.array([one.tick] * count, pa.int64()),
            "_write_tick": pa.array([one.tick] * count, pa.int64()),
        }
    )
    for column in place.column_names:
        keys = keys.append_column(column, place[column])
    return _nullable(keys, target).append_column(
        HISTORY_COLUMNS.field("_change"), pa.array(["retract"] * count, pa.utf8())
    )


def _within(rows: pa.Table, one: _Retraction) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found = pc.equal(rows["_vchannel"].cast(pa.utf8()), one.vchannel).to_numpy().astype(bool)
    found &= rows["_time_tick"].to_numpy() < one.tick
    if one.partition_id:
        found &= rows["_partition_id"].to_numpy() == one.partition_id
    return found


def _nullable(found: pa.Table, target: pa.Schema) -> pa.Table:
    """Return `found` with the columns of `target`; those that it lacks are null."""
    values = [
        found[each.name].cast(each.type) if each.name in found.column_names else pa.nulls(found.num_rows, each.type)
        for each in target
    ]
    return pa.table(values, target)
