"""``read_keys``: the rows of some primary keys at a time tick, by the key index where there is one.

Returns what a read with a predicate on the key returns. Its cost follows the keys: of files that the index covers, it
reads the row groups with rows of these keys; of others, those whose bounds do not exclude the keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.keys import key_column
from millrace.message.stored_columns import key_schema, needed_columns, to_fields
from millrace.rpc.selection import Selection
from millrace.storage.table import TableHandle
from millrace.tables.key_index.index import KeyIndex
from millrace.tables.key_index.lookup import files_with_keys, find_keys
from millrace.tables.read.arrow import deleted_mask, hide_dropped
from millrace.tables.read.plan import ReadPlan
from millrace.wal.visible.collection_rows import align_to_schema, deletes_file_schema, rows_read_schema

_JUDGED_BY = ("_partition_id", "_vchannel", "_time_tick", "_write_tick")


def read_keys(
    plan: ReadPlan, keys: pa.RecordBatch, *, columns: Sequence[str] | None = None, index: KeyIndex | None = None
) -> pa.Table:
    """Return the rows of a planned read whose primary key is one of `keys`, with `columns` or all fields.

    `keys` has the key's fields in order; their names do not matter. Rows have no order. A key may have several rows, or
    none. `index` is the collection's key index if it is open already. Raises InvalidArgument, TableDamaged.
    """
    schema = plan.schema
    named = key_schema(schema)
    fields = schema.arrow()
    names = Selection(columns=None if columns is None else tuple(columns)).names(fields)
    wanted = pa.Table.from_batches([keys]).rename_columns(named.names).cast(named)
    chosen = [each for each in fields.names if each in {*names, *schema.key_names}]
    there = {each.name for each in needed_columns(schema, chosen)} | set(_JUDGED_BY)
    target = pa.schema([each for each in rows_read_schema(schema) if each.name in there])
    parts = [target.empty_table()]
    if plan.rows is not None:
        index = index or KeyIndex.open(plan.settings.key_index_path(plan.collection_id))
        parts += _stored(plan.rows, index, plan, wanted, target)
    parts += [_of_keys(piece.select(target.names), wanted) for piece in plan.tail_rows(deletes=False)]
    rows = hide_dropped(pa.concat_tables(parts), plan)
    if rows.num_rows:
        deletes = _deletes(plan, wanted, int(pc.min(rows["_time_tick"]).as_py()))
        if deletes.num_rows:
            rows = rows.filter(pa.array(~deleted_mask(rows, deletes, named.names)))
    return to_fields(rows, schema, chosen).select(names)


def _stored(table: TableHandle, index: KeyIndex, plan: ReadPlan, wanted: pa.Table, target: pa.Schema) -> list[pa.Table]:
    """Return the rows of the keys in the rows table up to the plan's tick."""
    places = find_keys(index, table, plan.schema, wanted, until=plan.tick)
    parts = []
    for path, positions in places.positions.items():
        rows, _ = table.take_rows(path, positions, columns=target.names)
        parts.append(align_to_schema(rows, target))
    if places.unknown:
        rows = table.read_rows(places.unknown, target, where=_matching(wanted))
        parts.append(align_to_schema(rows, target))
    early = (rows.filter(pc.less_equal(rows["_time_tick"], plan.tick)) for rows in parts)
    return [_of_keys(rows, wanted) for rows in early]


def _deletes(plan: ReadPlan, wanted: pa.Table, first_tick: int) -> pa.Table:
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
