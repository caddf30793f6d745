"""``read_arrow``: a collection at a time tick as an Arrow table, without a JVM; and the rule for which deletes hit
which rows.

A delete at (t, w) hits the rows of its key, in its partition if it names one, whose (visible tick, write tick) is
smaller.
Inside a transaction, where visible ticks are equal, the order of writing decides.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from millrace.base.errors import InvalidArgument, TableDamaged
from millrace.base.predicate.arrow import pruning_expression
from millrace.base.predicate.language import (
    And,
    ColumnRef,
    Compare,
    Condition,
    Literal,
    column_names,
    conjuncts,
    rename_columns,
)
from millrace.base.settings import Settings
from millrace.message.ids import Moment
from millrace.message.keys import key_column
from millrace.message.stored_columns import key_schema, needed_columns, single_column, to_fields
from millrace.rpc.selection import ALL_ROWS, Selection
from millrace.storage.parquet_file import RowGroupFilter
from millrace.storage.pins import TablePins
from millrace.storage.table import TableHandle, table_at
from millrace.tables.collections.layout import TABLES, earlier_name, has_earlier_layout
from millrace.tables.read.plan import ReadPlan, plan_read, tick_span
from millrace.tables.read.pruning import WidenedComparison, may_match, row_group_filter
from millrace.wal.visible.collection_rows import ROW_COLUMNS, align_to_schema, deletes_file_schema, rows_read_schema

PIECE_BYTES: Final = 64 << 20
"""Approximate size of rows that a read in pieces holds at a time."""

PIN_AFTER_SECONDS: Final = 30.0
"""Time from which a read pins its versions: half of the least ``file_retention``, which shorter reads rely on."""

BATCH_ROWS: Final = 65_536
SORT_BYTES: Final = 1 << 30
"""Approximate size of rows that a sort without a limit may take. With a limit, twice the size of the limit's rows."""

_TICKS: Final = ("_time_tick", "_write_tick")
_PLACE: Final = ("_partition_id", *_TICKS)

_SPREAD: Final = 4
"""Integer keys need no hash table if their range is at most this many times their number."""

Int64s = npt.NDArray[np.int64]


def read_arrow(
    settings: Settings,
    collection_id: int,
    *,
    at: Moment | None = None,
    deadline: float | None = None,
    confirmed: Mapping[str, int] | None = None,
    uncommitted: Mapping[str, Sequence[pa.Table]] | None = None,
    selection: Selection = ALL_ROWS,
    with_ticks: bool = False,
) -> pa.Table:
    """Return the rows of a collection that are visible at `at` (default: the newest tick that all its channels have
    reached).

    Columns are the collection's fields at that tick, or those of `selection`. `with_ticks` adds the columns that locate
    a row (``_partition`` ...). Rows have no order unless `selection` asks for one. Memory: all selected rows, before
    deletes, and all deletes up to that tick. Raises TickNotReached, TickTooOld, CollectionNotFound, TableDamaged,
    InvalidArgument.
    """
    for last in (False, True):
        plan = plan_read(
            settings, collection_id, at=at, deadline=deadline, confirmed=confirmed, uncommitted=uncommitted
        )
        try:
            return pa.concat_tables(read_pieces(plan, selection=selection, with_ticks=with_ticks))
        except TableDamaged as error:
            if last or not error.missing:
                raise  # else VACUUM may have removed it during the read: a newer version names other files
    raise AssertionError("unreachable")


class ArrowFilter(NamedTuple):
    """A filter from an engine that reads for itself: an Arrow expression and the fields that it uses."""

    expression: pc.Expression
    fields: tuple[str, ...]


def read_stream(
    plan: ReadPlan, *, selection: Selection = ALL_ROWS, arrow_filter: ArrowFilter | None = None
) -> pa.RecordBatchReader:
    """Return the rows of a planned read, batch by batch.

    Memory: the deletes up to its tick, about PIECE_BYTES of rows, and the row groups of two files.
    Raises InvalidArgument. Its batches raise TableDamaged.
    """
    names = selection.names(plan.schema.arrow())
    schema = pa.schema([plan.schema.arrow().field(name) for name in names])
    pieces = read_pieces(plan, selection=selection, arrow_filter=arrow_filter, max_bytes=PIECE_BYTES)
    batches = (batch for piece in pieces for batch in piece.to_batches(max_chunksize=BATCH_ROWS))
    return pa.RecordBatchReader.from_batches(schema, batches)


def read_pieces(
    plan: ReadPlan,
    *,
    selection: Selection = ALL_ROWS,
    arrow_filter: ArrowFilter | None = None,
    with_ticks: bool = False,
    max_bytes: int | None = None,
    ticks: tuple[int, int] | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of a planned read at once, or in pieces of about `max_bytes`; at least one, which may be empty.

    With `ticks` (after, up to), only rows that became visible in between.
    """
    names = selection.names(plan.schema.arrow())
    began = time.time()
    if with_ticks:
        names = [*names, *ROW_COLUMNS.names]
    pieces = _Look(plan, selection, names, arrow_filter, ticks).rows(max_bytes)
    if selection.order_by:
        pieces = iter([_sorted(pieces, selection)])
    elif selection.limit is not None:
        pieces = _first(pieces, selection.limit)
    with ExitStack() as stack:
        pinned = False
        for piece in pieces:
            if not pinned and time.time() - began > PIN_AFTER_SECONDS:
                stack.enter_context(TablePins(plan.settings.pins_uri).pinned(int(began * 1000)))
                pinned = True
            yield piece.select(names)


def stored_dataset(settings: Settings, name: str) -> ds.Dataset:
    """Return the Delta table `name` (``wal``, ``tables/3/_rows``) as it is stored now.

    Raises TableNotFound, and InvalidArgument for a published table: a dataset would not hide its deleted rows.
    """
    if re.fullmatch(rf"{TABLES}/[^/]+", name):
        raise InvalidArgument(
            f"{name} is a published table, whose deletion vectors a dataset does not apply: use the collection's"
            " read(), or give its folder to an engine that reads Delta"
        )
    if has_earlier_layout(settings):
        name = earlier_name(name)
    return table_at(settings.table_uri(name)).dataset()


def count_rows(plan: ReadPlan, *, where: str | None = None) -> int:
    """Return the number of rows of a planned read, from the tables' logs alone if nothing hides a row."""
    look = _Look(plan, Selection(where=where), [])
    stored = look.stored_rows()
    if stored is not None:
        return stored + sum(rows.num_rows for rows in plan.tail_rows(deletes=False))
    return sum(piece.num_rows for piece in look.rows(PIECE_BYTES))


class _Look:
    """The parts of a planned read's files that a selection needs."""

    def __init__(
        self,
        plan: ReadPlan,
        selection: Selection,
        names: Sequence[str],
        arrow_filter: ArrowFilter | None = None,
        ticks: tuple[int, int] | None = None,
    ) -> None:
        self._plan = plan
        self._after, until = ticks or (0, plan.tick)
        self._until = min(until, plan.tick)
        found = selection.condition
        self._keys = plan.schema.key_arrow().names
        self._exact = selection.expression(plan.schema.arrow())
        # A field with several columns is filtered after the files are read.
        self._places = {each: at for each in plan.schema.arrow().names if (at := single_column(plan.schema, each))}
        self._conjuncts = [
            rename_columns(each, self._places)
            for each in (() if found is None else conjuncts(found))
            if column_names(each) <= set(self._places)
        ]
        whole = () if found is None else conjuncts(found)
        wide = [each for part in whole if (each := WidenedComparison.of(part, plan.schema)) is not None]
        self._groups = row_group_filter(wide) if wide else None
        stored = rows_read_schema(plan.schema)
        self._coarse = pruning_expression(And(tuple(self._conjuncts)), stored) if self._conjuncts else None
        if arrow_filter is not None:
            self._exact = _both(self._exact, arrow_filter.expression)
            if all(self._says_bounds(name) for name in arrow_filter.fields):
                self._coarse = _both(self._coarse, arrow_filter.expression)
        self._deletes = self._all_deletes()
        first = plan.first_ticks()
        self._replaced = any(first[name] < info.first_visible_tick(plan.tick) for name, info in plan.vchannels.items())
        self._hides = bool(plan.partition_drops) or self._replaced
        wanted = {*names, *selection.referenced_columns, *(() if arrow_filter is None else arrow_filter.fields)}
        self._judged_by = [*_TICKS] if _name_no_partition(self._deletes) else [*_PLACE]
        if self._deletes.num_rows:
            wanted |= {*self._keys, *self._judged_by}
        if self._hides:
            wanted |= {"_vchannel", "_partition_id", "_time_tick"}
        self._fields = [each for each in plan.schema.arrow().names if each in wanted]
        there = {each.name for each in needed_columns(plan.schema, self._fields)} | (wanted & set(ROW_COLUMNS.names))
        self._columns = [each for each in stored.names if each in there] or ["_time_tick"]

    def _says_bounds(self, name: str) -> bool:
        """Return whether an expression on a field can be pushed to the files: same name, and no NaN, which bounds
        ignore.
        """
        if self._places.get(name) != name:
            return False
        kind = self._plan.schema.arrow().field(name).type
        return not (pa.types.is_nested(kind) or pa.types.is_floating(kind))

    def rows(self, max_bytes: int | None) -> Iterator[pa.Table]:
        """Yield the rows with the columns that the selection needs, and perhaps more."""
        schema = rows_read_schema(self._plan.schema)
        tail = (self._between(piece).select(self._columns) for piece in self._plan.tail_rows(deletes=False))
        if max_bytes is None and (living := self._living(schema)) is not None:
            yield self._shown(living)
            for piece in tail:
                yield self._shown(piece, judged=True)
            return
        stored = stored_table_rows(
            self._plan.rows,
            schema,
            self._until,
            max_bytes,
            after=self._after,
            columns=self._columns,
            where=self._coarse,
            conjuncts=self._conjuncts,
            groups=self._groups,
        )
        whole = chain(stored, tail)
        for piece in [pa.concat_tables(whole)] if max_bytes is None else whole:
            yield self._shown(piece, judged=True)

    def _shown(self, piece: pa.Table, *, judged: bool = False) -> pa.Table:
        """Return the selected rows of a piece. `judged`: without those that a delete hits."""
        piece = to_fields(piece, self._plan.schema, self._fields)
        if self._exact is not None:
            piece = piece.filter(self._exact)
        if self._hides:
            piece = hide_dropped(piece, self._plan)
        if judged and self._deletes.num_rows and piece.num_rows:
            piece = piece.filter(pa.array(~deleted_mask(piece, self._deletes, self._plan.schema.key_names)))
        return piece

    def _living(self, schema: pa.Schema) -> pa.Table | None:
        """Return the table's rows that no delete hits, found by key and location; None if the read needs a filtered
        scan.

        Reads the other columns only of row groups with such rows. Also None if there are no deletes.
        """
        table = self._plan.rows
        filtered = self._coarse is not None or self._groups is not None or self._after > 0
        if table is None or not self._deletes.num_rows or filtered or tick_span(table)[1] > self._until:
            return None
        key = key_schema(self._plan.schema).names

        def kept(rows: pa.Table) -> npt.NDArray[np.bool_]:
            named = to_fields(rows, self._plan.schema, self._keys)
            return ~deleted_mask(named, self._deletes, self._plan.schema.key_names)

        rows = table.read_filtered(
            table.actions()["path"].to_pylist(),
            schema,
            columns=self._columns,
            filter_columns=[*key, *self._judged_by],
            keep=kept,
        )
        return align_to_schema(rows.select(self._columns), pa.schema([schema.field(name) for name in self._columns]))

    def _between(self, piece: pa.Table) -> pa.Table:
        if self._after == 0 and self._until == self._plan.tick:
            return piece
        ticks = piece["_time_tick"].to_numpy()
        return piece.filter(pa.array((ticks > self._after) & (ticks <= self._until)))

    def stored_rows(self) -> int | None:
        """Return the table's row count from its files' statistics; None if they do not tell."""
        table, tick = self._plan.rows, self._plan.tick
        if self._exact is not None or self._hides or self._deletes.num_rows:
            return None
        actions = None if table is None else table.actions()
        if actions is None or not actions.num_rows:
            return 0
        if tick_span(table)[1] > tick or actions["num_records"].null_count:
            return None
        return int(pc.sum(actions["num_records"]).as_py())

    def _all_deletes(self) -> pa.Table:
        """Return the deletes up to the tick, except those of keys that the predicate excludes anyway."""
        plan = self._plan
        schema = deletes_file_schema(plan.schema)
        keys = key_schema(plan.schema)
        mine = [each for each in self._conjuncts if column_names(each) <= set(keys.names)]
        where = pruning_expression(And(tuple(mine)), keys) if mine else None
        wanted = [*keys.names, *_PLACE]
        found = [*stored_table_rows(plan.deletes, schema, plan.tick, None, columns=wanted, where=where, conjuncts=mine)]
        if plan.has_tail_deletes():
            found += [piece.select(wanted) for piece in plan.tail_rows(deletes=True)]
        return to_fields(pa.concat_tables(found), plan.schema, self._keys)


def stored_table_rows(
    table: TableHandle | None,
    schema: pa.Schema,
    tick: int,
    max_bytes: int | None,
    *,
    after: int = 0,
    columns: Sequence[str] | None = None,
    where: pc.Expression | None = None,
    conjuncts: Sequence[Condition] = (),
    groups: RowGroupFilter | None = None,
) -> Iterator[pa.Table]:
    """Yield rows of a rows or deletes table after `after` up to `tick`, pruned by statistics, in pieces.

    `schema` has the columns of its files. Without `max_bytes`, one piece. Raises TableDamaged.
    """
    names = schema.names if columns is None else list(columns)
    target = pa.schema([schema.field(name) for name in names])
    actions = None if table is None else table.actions()
    if table is None or actions is None or not actions.num_rows:
        yield target.empty_table()
        return
    actions = actions.filter(
        may_match(actions, schema, [Compare("<=", ColumnRef(("_time_tick",)), Literal(tick)), *conjuncts])
    )
    if after:
        actions = actions.filter(may_match(actions, schema, [Compare(">", ColumnRef(("_time_tick",)), Literal(after))]))
        late = pc.field("_time_tick") > after
        where = late if where is None else late & where
    latest = actions["max._time_tick"] if "max._time_tick" in actions.column_names else None
    if latest is None or latest.null_count or pc.any(pc.greater(latest, tick)).as_py():
        early = pc.field("_time_tick") <= tick
        where = early if where is None else early & where
    paths = actions["path"].to_pylist()
    if max_bytes is None or not paths:
        yield align_to_schema(table.read_rows(paths, schema, columns=names, where=where, groups=groups), target)
        return
    held: list[pa.RecordBatch] = []
    for batch in table.scan_rows(paths, schema, columns=names, where=where, batch_rows=BATCH_ROWS, groups=groups):
        held.append(batch)
        if sum(each.nbytes for each in held) >= max_bytes:
            yield align_to_schema(pa.Table.from_batches(held), target)
            held = []
    yield align_to_schema(pa.Table.from_batches(held, held[0].schema) if held else target.empty_table(), target)


def _both(one: pc.Expression | None, other: pc.Expression) -> pc.Expression:
    return other if one is None else one & other


def _first(pieces: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Yield the first `rows` rows. Reads nothing after the piece with the last one."""
    for piece in pieces:
        yield piece.slice(0, rows)
        rows -= piece.num_rows
        if rows <= 0:
            return


def _sorted(pieces: Iterator[pa.Table], selection: Selection) -> pa.Table:
    """Return all rows in order, or the first `limit`; nulls last. Raises InvalidArgument above SORT_BYTES."""
    keys = [(name, "descending" if descends else "ascending") for name, descends in selection.order_by]
    held: list[pa.Table] = []

    def settled() -> pa.Table:
        rows = pa.concat_tables(held)
        try:
            order = pc.sort_indices(rows, sort_keys=keys)
        except (pa.ArrowException, TypeError) as error:
            raise InvalidArgument(f"cannot sort by these columns: {error}") from None
        return rows.take(order.slice(0, rows.num_rows if selection.limit is None else selection.limit))

    for piece in pieces:
        held.append(piece)
        if sum(each.nbytes for each in held) > SORT_BYTES:
            held = [settled()]
            if held[0].nbytes > SORT_BYTES // 2:
                raise InvalidArgument(
                    f"cannot sort more than {SORT_BYTES >> 20} MiB of rows: set a limit, select fewer columns, "
                    "or sort the result"
                )
    return settled()


def hide_dropped(rows: pa.Table, plan: ReadPlan) -> pa.Table:
    """Remove rows of dropped partitions, of replacing imports, and of an earlier collection."""
    hidden = np.zeros(rows.num_rows, dtype=bool)
    ticks = rows["_time_tick"].to_numpy()
    for name, number, tick in plan.partition_drops:
        mine = pc.and_(pc.equal(rows["_vchannel"], name), pc.equal(rows["_partition_id"], number)).to_numpy()
        hidden |= mine & (ticks < tick)
    for name, info in plan.vchannels.items():
        begin = info.first_visible_tick(plan.tick)
        if rows.num_rows and begin > ticks.min():
            hidden |= pc.equal(rows["_vchannel"], name).to_numpy() & (ticks < begin)
    return rows.filter(pa.array(~hidden)) if hidden.any() else rows


def deleted_mask(rows: pa.Table, deletes: pa.Table, key: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return a mask of `rows` that `deletes` hit by the fields `key`: shape ``(rows,)``."""
    place, delete_key, span = _numbered(key_column(rows, key), key_column(deletes, key))
    result = np.zeros(rows.num_rows, dtype=bool)
    hit = np.flatnonzero(place >= 0)
    if len(hit) == 0:
        return result
    some = len(hit) < rows.num_rows

    def of_rows(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values[hit] if some else values

    row_key = of_rows(place)
    d_partition, d_time, d_write = (deletes[name].to_numpy() for name in _PLACE)
    r_time, r_write = (of_rows(rows[name].to_numpy()) for name in _TICKS)
    # For each (key, partition), the last delete hits whatever any of them hits.
    order = _in_order(d_time, d_write)
    order = np.arange(len(delete_key)) if order is None else order
    last = np.full(span, -1, dtype=np.int64)
    struck = np.zeros(len(hit), dtype=bool)
    groups = {} if _name_no_partition(deletes) else _by_value(of_rows(rows["_partition_id"].to_numpy()))
    alone = bool((d_partition == d_partition[0]).all())
    for number, mine in _by_value(d_partition[:1] if alone else d_partition[order]).items():
        among = slice(None) if number == 0 else groups.get(number)
        if among is None:
            continue
        places = order[mine]
        theirs = delete_key[places]
        last[theirs] = places  # the last delete of a repeated key wins
        found = last[row_key[among]]
        time, written = d_time[found], r_time[among]
        later = time > written
        if (same := time == written).any():
            later |= same & (d_write[found] > r_write[among])
        struck[among] |= (found >= 0) & later
        last[theirs] = -1
    result[hit] = struck
    return result


def _name_no_partition(deletes: pa.Table) -> bool:
    """Return whether all deletes apply to every partition, so that the partition of a row does not matter."""
    return not deletes["_partition_id"].to_numpy().any()


def _numbered(row_keys: Any, delete_keys: Any) -> tuple[Int64s, Int64s, int]:
    """Number the keys. Returns the rows' numbers (-1 without a delete), the deletes' numbers, and their upper bound."""
    if pa.types.is_int64(delete_keys.type) and len(delete_keys):
        theirs = delete_keys.to_numpy()
        low, high = int(theirs.min()), int(theirs.max())
        if high - low < _SPREAD * (len(row_keys) + len(theirs)):  # dense numbers are their own indices
            mine = row_keys.to_numpy()
            inside = (mine >= low) & (mine <= high)
            return (mine - low if inside.all() else np.where(inside, mine - low, -1)), theirs - low, high - low + 1
    keys = pc.unique(delete_keys)
    place, number = pc.index_in(row_keys, keys), pc.index_in(delete_keys, keys)
    return pc.fill_null(place, -1).to_numpy().astype(np.int64), number.to_numpy().astype(np.int64), len(keys)


def _in_order(times: Int64s, writes: Int64s) -> Int64s | None:
    """Return the order by time and write; None if they are sorted, as a deletes table usually is."""
    behind = (times[1:] > times[:-1]) | ((times[1:] == times[:-1]) & (writes[1:] >= writes[:-1]))
    return None if behind.all() else np.lexsort((writes, times))


def _by_value(values: Int64s) -> dict[int, slice | Int64s]:
    """Return the indices of each value, in order."""
    if len(values) and (values == values[0]).all():
        return {int(values[0]): slice(None)}
    order = np.argsort(values, kind="stable")
    found, begins = np.unique(values[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, begins[1:]), strict=True))
