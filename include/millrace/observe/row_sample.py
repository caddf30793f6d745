"""A sample of a collection's rows at a time tick, in bounded memory: newest files first, deletes looked up by key.

Uses the plan and the delete rule of ``read_arrow`` (millrace.tables). It reads only as many of the table's newest rows
as the sample needs, and only the deletes that name one of their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument, MillraceError
from millrace.base.settings import Settings
from millrace.message.ids import tick_physical_ms
from millrace.message.keys import key_column
from millrace.message.stored_columns import key_columns, to_fields
from millrace.observe.models import RowSample
from millrace.observe.payloads import row_objects
from millrace.tables.read.arrow import count_rows
from millrace.tables.read.deleted import deleted_mask
from millrace.tables.read.plan import ReadPlan, plan_read
from millrace.wal.visible.collection_rows import align_to_schema, deletes_file_schema, rows_read_schema

MAX_SAMPLE_ROWS: Final = 200
MAX_TAIL_BYTES: Final = 64 << 20
"""Limit of the WAL's tail. A flusher that lags further must catch up before a page reads rows."""
BATCH_ROWS: Final = 4096
CANDIDATES_PER_ROW: Final = 8
"""Candidate rows per row of the sample. If a larger share is deleted, the sample is incomplete."""
WAIT_SECONDS: Final = 2.0
"""Seconds to wait for a tick that is not reached yet."""


def sample_rows(
    settings: Settings, collection_id: int, name: str, *, at: int | None, limit: int, seconds: float = WAIT_SECONDS
) -> RowSample:
    """Return up to `limit` of the newest visible rows at the tick `at` (default: the newest readable tick).

    Raises TickNotReached, TickTooOld, CollectionNotFound, and InvalidArgument if the flusher lags too far.
    """
    if not 1 <= limit <= MAX_SAMPLE_ROWS:
        raise InvalidArgument(f"a sample has 1 to {MAX_SAMPLE_ROWS} rows, not {limit}")
    plan = plan_read(settings, collection_id, at=at, deadline=seconds)
    tail_bytes = plan.tail_bytes()
    if tail_bytes > MAX_TAIL_BYTES:
        raise InvalidArgument(
            f"{tail_bytes >> 20} MiB of the WAL are not flushed yet: wait for the flusher, or read with `millrace read`"
        )
    wanted = limit * CANDIDATES_PER_ROW
    stored = rows_read_schema(plan.schema)
    rows = _newest([*plan.tail_rows(deletes=False)], wanted, stored)
    if rows.num_rows < wanted:
        rows = _newest([rows, *_table_rows(plan, wanted - rows.num_rows)], wanted, stored)
    looked = rows.num_rows
    rows = _without_hidden(rows, plan)
    if rows.num_rows:
        key = key_columns(plan.schema)
        rows = rows.filter(pa.array(~deleted_mask(rows, _deletes(plan, rows, key), key)))
    shown = to_fields(rows.slice(0, limit), plan.schema)
    note = ""
    if shown.num_rows < limit and looked >= wanted:
        note = f"Only these of the newest {looked:,} rows are not deleted."
    columns = ["_partition", "_segment_id", "_time_tick", *plan.schema.arrow().names]
    values, _ = row_objects(shown.select(columns))
    return RowSample(
        collection=name,
        tick=str(plan.tick),
        time=tick_physical_ms(plan.tick) / 1000,
        columns=columns,
        types=["string", "int64", "int64", *(field.type for field in plan.schema.fields)],
        rows=[[each[column] for column in columns] for each in values],
        note=note,
    )


def count_visible(settings: Settings, collection_id: int) -> int | None:
    """Return the number of rows that a read returns now; None if the collection cannot be read now."""
    try:
        plan = plan_read(settings, collection_id, deadline=0.0)
        return None if plan.tail_bytes() > MAX_TAIL_BYTES else count_rows(plan)
    except MillraceError:
        return None


def _newest(parts: list[pa.Table], count: int, schema: pa.Schema) -> pa.Table:
    """Return the `count` newest rows of some tables, newest first."""
    rows = pa.concat_tables([schema.empty_table(), *parts])
    return rows.sort_by([("_time_tick", "descending"), ("_write_tick", "descending")]).slice(0, count)


def _table_rows(plan: ReadPlan, count: int) -> Iterator[pa.Table]:
    """Yield the table's newest rows up to the plan's tick.

    Stops once `count` rows are read and no unread file can hold newer ones.
    """
    if plan.rows is None:
        return
    actions = plan.rows.actions()
    names = set(actions.column_names)
    columns = [
        actions[name].to_pylist() if name in names else [None] * actions.num_rows
        for name in ("path", "min._time_tick", "max._time_tick")
    ]
    files = sorted(
        ((last if last is not None else plan.tick, path) for path, first, last in zip(*columns, strict=True)
         if first is None or first <= plan.tick),
        reverse=True,
    )  # fmt: skip
    schema = rows_read_schema(plan.schema)
    best = schema.empty_table()
    for place, (_, path) in enumerate(files):
        with plan.rows.open_file(path) as parquet:
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS):
                part = pa.Table.from_batches([batch])
                part = part.filter(pc.less_equal(part["_time_tick"], plan.tick))
                if part.num_rows:
                    best = _newest([best, align_to_schema(part, schema)], count, schema)
        following = files[place + 1][0] if place + 1 < len(files) else 0
        if best.num_rows >= count and best["_time_tick"][count - 1].as_py() > following:
            break
    yield best


def _without_hidden(rows: pa.Table, plan: ReadPlan) -> pa.Table:
    """Drop rows of partitions dropped by then, rows replaced by an Import, and rows of an earlier collection."""
    for name, number, tick in plan.partition_drops:
        mine = pc.and_(pc.equal(rows["_vchannel"], name), pc.equal(rows["_partition_id"], number))
        rows = rows.filter(pc.invert(pc.and_(mine, pc.less(rows["_time_tick"], tick))))
    for name, info in plan.vchannels.items():
        early = pc.and_(
            pc.equal(rows["_vchannel"], name), pc.less(rows["_time_tick"], info.first_visible_tick(plan.tick))
        )
        rows = rows.filter(pc.invert(early))
    return rows


def _deletes(plan: ReadPlan, rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the deletes up to the plan's tick that name a key of `rows`. Opens only files with such keys and ticks."""
    schema = deletes_file_schema(plan.schema)
    first, keys = key[0], pc.unique(key_column(rows, key))
    oldest = pc.min(rows["_time_tick"]).as_py()
    least, most = pc.min(rows[first]).as_py(), pc.max(rows[first]).as_py()
    parts = [schema.empty_table()]

    def take(part: pa.Table) -> None:
        part = part.filter(pc.and_(pc.is_in(key_column(part, key), keys), pc.less_equal(part["_time_tick"], plan.tick)))
        if part.num_rows:
            parts.append(align_to_schema(part, schema))

    for tail in plan.tail_rows(deletes=True) if plan.has_tail_deletes() else ():
        take(tail)
    if plan.deletes is not None:
        for action in plan.deletes.actions().to_pylist():
            if _outside(action, first, least, most) or (action.get("max._time_tick") or plan.tick) < oldest:
                continue
            with plan.deletes.open_file(action["path"]) as parquet:
                for batch in parquet.iter_batches(batch_size=16 * BATCH_ROWS):
                    take(pa.Table.from_batches([batch]))
    return pa.concat_tables(parts)


def _outside(action: dict[str, Any], key: str, least: Any, most: Any) -> bool:
    """Return whether a file's statistics exclude all keys of the sample.

    Strings may be truncated there and are not used.
    """
    low, high = action.get(f"min.{key}"), action.get(f"max.{key}")
    return isinstance(low, int) and isinstance(high, int) and (high < least or low > most)
