"""``read_arrow``: a collection at a time tick as an Arrow table, without a JVM; and the rule of which deletes hit what.

A delete at (t, w) hits the rows of its key, in its partition if it names one, whose (visible tick, write tick) is smaller:
inside a transaction, where the visible ticks are equal, the order of writing decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import TableDamaged
from millrace.base.settings import Settings
from millrace.message.ids import Moment
from millrace.storage.table import Table
from millrace.tables.collections.table import delete_file_schema, file_schema
from millrace.tables.collections.visible_rows import conform
from millrace.tables.read.plan import ReadPlan, plan_read

PIECE_BYTES: Final = 64 << 20
"""Of files that a read in pieces holds at a time, about; one file at least."""

Int64s = npt.NDArray[np.int64]


def read_arrow(
    settings: Settings,
    collection_id: int,
    *,
    at: Moment | None = None,
    deadline: float | None = None,
    confirmed: Mapping[str, int] | None = None,
    with_ticks: bool = False,
) -> pa.Table:
    """The rows of a collection that are visible at `at` (default: the newest tick all its channels have reached).

    Columns are the collection's fields at that tick; `with_ticks` adds those that place a row (``_partition`` ...). The
    order of rows is not promised. Memory: the collection's rows at that tick and its deletes up to it, both in whole.
    Raises TickNotReached, TickTooOld, CollectionNotFound, TableDamaged.
    """
    for last in (False, True):
        plan = plan_read(settings, collection_id, at=at, deadline=deadline, confirmed=confirmed)
        try:
            return pa.concat_tables(pieces_of(plan, with_ticks=with_ticks))
        except TableDamaged as error:
            if last or not error.missing:
                raise  # else VACUUM may have taken it while it was read: the newer version names others
    raise AssertionError("unreachable")


def pieces_of(plan: ReadPlan, *, with_ticks: bool = False, most_bytes: int | None = None) -> Iterator[pa.Table]:
    """The rows of a planned read: at once, or in pieces of about `most_bytes` of files; at least one, which may be empty."""
    rows = _table_rows(plan.rows, file_schema(plan.schema), plan.tick, most_bytes)
    deletes = pa.concat_tables(
        [
            *_table_rows(plan.deletes, delete_file_schema(plan.schema), plan.tick, None),
            *(plan.tail_rows(deletes=True) if plan.has_tail_deletes() else ()),
        ]
    )
    whole = chain(rows, plan.tail_rows(deletes=False))
    for piece in [pa.concat_tables(whole)] if most_bytes is None else whole:
        piece = _hide_dropped(piece, plan)
        if deletes.num_rows and piece.num_rows:
            piece = piece.filter(pa.array(~deleted(piece, deletes, plan.schema.primary_key)))
        yield piece if with_ticks else piece.select(plan.schema.arrow().names)


def _table_rows(table: Table | None, schema: pa.Schema, tick: int, most_bytes: int | None) -> Iterator[pa.Table]:
    """Rows up to `tick` of one version of a table: the files its log names, pruned by their statistics, some at a time."""
    if table is None:
        yield schema.empty_table()
        return
    actions = table.actions()
    if actions.num_rows and "min._time_tick" in actions.column_names:
        early = pc.or_kleene(pc.less_equal(actions["min._time_tick"], tick), pc.is_null(actions["min._time_tick"]))
        actions = actions.filter(early)
    paths = actions["path"].to_pylist()
    ends = np.cumsum(actions["size_bytes"].to_numpy()) if most_bytes is not None else np.zeros(len(paths))
    group = (ends // (most_bytes or 1)).tolist()
    for _, chosen in groupby(zip(group, paths, strict=True), key=lambda each: each[0]) if paths else [(0, [])]:
        rows = table.read_rows([path for _, path in chosen], schema, where=pc.field("_time_tick") <= tick)
        yield conform(rows, schema)


def _hide_dropped(rows: pa.Table, plan: ReadPlan) -> pa.Table:
    """Without the rows of partitions dropped by then, those that an Import replaced, and those of an earlier collection."""
    hidden = np.zeros(rows.num_rows, dtype=bool)
    ticks = rows["_time_tick"].to_numpy()
    for name, number, tick in plan.partition_drops:
        mine = pc.and_(pc.equal(rows["_vchannel"], name), pc.equal(rows["_partition_id"], number)).to_numpy()
        hidden |= mine & (ticks < tick)
    for name, info in plan.vchannels.items():
        begin = info.begin_at(plan.tick)
        if rows.num_rows and begin > ticks.min():
            hidden |= pc.equal(rows["_vchannel"], name).to_numpy() & (ticks < begin)
    return rows.filter(pa.array(~hidden)) if hidden.any() else rows


def deleted(rows: pa.Table, deletes: pa.Table, key: str) -> npt.NDArray[np.bool_]:
    """Which of `rows` any of `deletes` hits: shape ``(rows,)``."""
    keys = pc.unique(deletes[key])
    place = pc.index_in(rows[key], keys).to_numpy()  # NaN where no delete has the key
    result = np.zeros(rows.num_rows, dtype=bool)
    hit = np.flatnonzero(~np.isnan(place)) if place.dtype.kind == "f" else np.arange(rows.num_rows)
    if len(hit) == 0:
        return result
    row_key = place[hit].astype(np.int64)
    delete_key: Int64s = pc.index_in(deletes[key], keys).to_numpy().astype(np.int64)

    def column(table: pa.Table, name: str) -> Int64s:
        values: Int64s = table[name].to_numpy()
        return values

    d_partition, d_time, d_write = (column(deletes, name) for name in ("_partition_id", "_time_tick", "_write_tick"))
    r_partition, r_time, r_write = (column(rows, name)[hit] for name in ("_partition_id", "_time_tick", "_write_tick"))
    # Of each (key, partition) the last delete hits whatever any of them hits.
    order = np.lexsort((d_write, d_time, d_partition, delete_key))
    k, p, t, w = (values[order] for values in (delete_key, d_partition, d_time, d_write))
    last = np.ones(len(k), dtype=bool)
    last[:-1] = (k[1:] != k[:-1]) | (p[1:] != p[:-1])
    k, p, t, w = k[last], p[last], t[last], w[last]
    partitions = np.unique(np.concatenate([p, r_partition, [0]]))
    code = k * len(partitions) + np.searchsorted(partitions, p)
    struck = np.zeros(len(hit), dtype=bool)
    for wanted in (np.zeros_like(r_partition), r_partition):
        sought = row_key * len(partitions) + np.searchsorted(partitions, wanted)
        found: Any = np.minimum(np.searchsorted(code, sought), len(code) - 1)
        same = code[found] == sought
        struck |= same & ((t[found] > r_time) | ((t[found] == r_time) & (w[found] > r_write)))
    result[hit] = struck
    return result
