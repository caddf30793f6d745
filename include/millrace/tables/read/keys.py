"""``read_keys``: the rows of some primary keys at a time tick, by the key index where there is one.

Returns what a read with a predicate on the key returns. Its cost follows the keys: of files that the index covers, it
reads the row groups with rows of these keys; of others, those whose bounds do not exclude the keys. If a version of at
most the read's tick is published, its deletion vectors tell which of these rows are dead, so only later deletes are
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.keys import key_column
from millrace.message.stored_columns import key_schema, needed_columns, to_fields
from millrace.rpc.selection import Selection
from millrace.storage.table import TableHandle
from millrace.tables.key_index.lookup import files_with_keys, find_keys
from millrace.tables.key_index.shared_index import request_index
from millrace.tables.read.arrow import hide_dropped
from millrace.tables.read.deleted import deleted_mask
from millrace.tables.read.open_tables import OpenTables
from millrace.tables.read.plan import ReadPlan
from millrace.wal.visible.collection_rows import align_to_schema, deletes_file_schema, rows_read_schema

_JUDGED_BY: Final = ("_partition_id", "_vchannel", "_time_tick", "_write_tick")
_JUDGED: Final = "_judged_tick"
"""A column of this read alone."""


def read_keys(
    plan: ReadPlan, keys: pa.RecordBatch, *, columns: Sequence[str] | None = None, tables: OpenTables | None = None
) -> pa.Table:
    """Return the rows of a planned read whose primary key is one of `keys`, with `columns` or all fields.

    `keys` has the key's fields in order; their names do not matter. Rows have no order. A key may have several rows, or
    none. `tables` are open already. Raises InvalidArgument, TableDamaged.
    """
    schema = plan.schema
    named = key_schema(schema)
    fields = schema.arrow()
    names = Selection(columns=None if columns is None else tuple(columns)).names(fields)
    wanted = pa.Table.from_batches([keys]).rename_columns(named.names).cast(named)
    chosen = [each for each in fields.names if each in {*names, *schema.key_names}]
    there = {each.name for each in needed_columns(schema, chosen)} | set(_JUDGED_BY)
    target = pa.schema([each for each in rows_read_schema(schema) if each.name in there])
    parts = [_judged(target.empty_table(), 0)]
    if plan.rows is not None:
        parts += _stored(plan.rows, tables or OpenTables(), plan, wanted, target)
    tail = (_of_keys(piece.select(target.names), wanted) for piece in plan.tail_rows(deletes=False))
    parts += [_judged(piece, 0) for piece in tail]
    rows = hide_dropped(pa.concat_tables(parts), plan)
    if rows.num_rows:
        deletes = deletes_of_keys(plan, wanted, int(pc.min(rows[_JUDGED]).as_py()))
        if deletes.num_rows:
            rows = rows.filter(pa.array(~deleted_mask(rows, deletes, named.names)))
    return to_fields(rows, schema, chosen).select(names)


def _stored(
    table: TableHandle, tables: OpenTables, plan: ReadPlan, wanted: pa.Table, target: pa.Schema
) -> list[pa.Table]:
    """Return the rows of the keys in the rows table up to the plan's tick, judged by the published version."""
    index = tables.key_index(plan.settings.key_index_path(plan.collection_id))
    places = find_keys(index, table, plan.schema, wanted, until=plan.tick)
    base = plan.base
    parts = []
    for path, positions in places.positions.items():
        rows, _ = table.take_rows(path, positions, columns=target.names)
        rows = align_to_schema(rows, target)
        masked = None if base is None else base.masked(path)
        if base is None or masked is None:
            parts.append(_judged(rows, 0))
            continue
        # A row of after the published tick is masked because it is not visible there yet.
        late = rows["_time_tick"].to_numpy() > base.tick
        shown = ~np.isin(positions, masked, assume_unique=True)
        parts.append(_judged(rows, base.tick).filter(pa.array(shown | late)))
    request_index(plan.settings, plan.collection_id, index, places.unknown_rows)
    if places.unknown:
        parts.append(_judged(rows_of_keys(table, places.unknown, wanted, target, last_tick=plan.tick), 0))
    early = (rows.filter(pc.less_equal(rows["_time_tick"], plan.tick)) for rows in parts)
    return [_of_keys(rows, wanted) for rows in early]


def _judged(rows: pa.Table, tick: int) -> pa.Table:
    """Return rows with the tick up to which no delete hits them: `tick`, or a row's own if that is later."""
    return rows.append_column(_JUDGED, pc.max_element_wise(rows["_time_tick"], pa.scalar(tick, pa.int64())))


def rows_of_keys(
    table: TableHandle,
    paths: Sequence[str],
    wanted: pa.Table,
    target: pa.Schema,
    *,
    first_tick: int = 0,
    last_tick: int,
) -> pa.Table:
    """Return rows of files that no index covers, by the bounds of their row groups: those of the keys, and others."""
    ticks = (pc.field("_time_tick") >= first_tick) & (pc.field("_time_tick") <= last_tick)
    rows = table.read_rows(paths, target, where=_matching(wanted) & ticks)
    return align_to_schema(rows, target)


def deletes_of_keys(plan: ReadPlan, wanted: pa.Table, first_tick: int) -> pa.Table:
    """Return the deletes of the keys from `first_tick` up to the plan's tick."""
    target = pa.schema(
        [*wanted.schema, *(each for each in deletes_file_schema(plan.schema) if each.name in _JUDGED_BY)]
    )
    parts = [target.empty_table()]
    if plan.deletes is not None:
        paths = files_with_keys(plan.deletes, wanted, first_tick=first_tick, last_tick=plan.tick)
        ticks = (pc.field("_time_tick") >= first_tick) & (pc.field("_time_tick") <= plan.tick)
        rows = plan.deletes.read_rows(paths, target, where=_matching(wanted) & ticks)
        parts.append(_of_keys(align_to_schema(rows, target), wanted))
    if plan.has_tail_deletes():
        parts += [_of_keys(piece.select(target.names), wanted) for piece in plan.tail_rows(deletes=True)]
    return pa.concat_tables(parts)


def _of_keys(rows: pa.Table, wanted: pa.Table) -> pa.Table:
    """Return the rows whose key is one of `wanted`."""
    names = wanted.column_names
    if not rows.num_rows:
        return rows
    keys = key_column(wanted, names)
    return rows.filter(pc.is_in(key_column(rows, names), keys.combine_chunks()))


def _matching(wanted: pa.Table) -> pc.Expression:
    """Return a filter that all rows of these keys pass, and that bounds of row groups can exclude."""
    found = pc.scalar(True)
    for name, values in zip(wanted.column_names, wanted.columns, strict=True):
        distinct = pc.unique(values)
        bounds = pc.min_max(distinct)
        found &= pc.field(name).isin(distinct)
        found &= (pc.field(name) >= bounds["min"]) & (pc.field(name) <= bounds["max"])
    return found
