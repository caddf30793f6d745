"""``read_arrow``: a collection at a time tick as an Arrow table, without a JVM.

What a published version masks is left out by position (millrace.tables.read.base), and so are rows that later deletes
hit, where the key index finds them. Other rows are judged by their keys and ticks (millrace.tables.read.deleted).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

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
from millrace.message.stored_columns import key_schema, needed_columns, single_column, to_fields
from millrace.rpc.selection import ALL_ROWS, Selection
from millrace.storage.deletion_vectors import NO_POSITIONS, Positions
from millrace.storage.parquet_file import RowGroupFilter
from millrace.storage.pins import TablePins
from millrace.storage.table import TableHandle, table_at
from millrace.tables.collections.layout import TABLES, earlier_name, has_earlier_layout
from millrace.tables.key_index.index import KeyIndex
from millrace.tables.key_index.lookup import covered_hits, find_keys, reachable_files
from millrace.tables.key_index.shared_index import request_index
from millrace.tables.read.deleted import PLACE, TICKS, deleted_mask, name_no_partition
from millrace.tables.read.open_tables import OpenTables
from millrace.tables.read.plan import ReadPlan, plan_read
from millrace.tables.read.pruning import WidenedComparison, has_bounds, may_match, row_group_filter, wanted_keys
from millrace.wal.visible.collection_rows import ROW_COLUMNS, align_to_schema, deletes_file_schema, rows_read_schema

PIECE_BYTES: Final = 64 << 20
"""Approximate size of rows that a read in pieces holds at a time."""

PIN_AFTER_SECONDS: Final = 30.0
"""Time from which a read pins its versions: half of the least ``file_retention``, which shorter reads rely on."""

BATCH_ROWS: Final = 65_536
SORT_BYTES: Final = 1 << 30
"""Approximate size of rows that a sort without a limit may take. With a limit, twice the size of the limit's rows."""


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
    tables: OpenTables | None = None,
    use_published: bool = True,
) -> pa.Table:
    """Return the rows of a collection that are visible at `at` (default: the newest tick that all its channels have
    reached).

    Columns are the collection's fields at that tick, or those of `selection`. `with_ticks` adds the columns that locate
    a row (``_partition`` ...). Rows have no order unless `selection` asks for one. `tables` and `use_published` are
    those of :func:`plan_read`. Memory: all selected rows, and the deletes since the newest published version up to
    that tick, or all deletes if none is published. Raises TickNotReached, TickTooOld, CollectionNotFound, TableDamaged,
    InvalidArgument.
    """
    for last in (False, True):
        plan = plan_read(
            settings,
            collection_id,
            at=at,
            deadline=deadline,
            confirmed=confirmed,
            uncommitted=uncommitted,
            tables=tables,
            use_published=use_published,
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

    Memory: the deletes since the newest published version, about PIECE_BYTES of rows, and the row groups of two files.
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
    """Yield the rows of a planned read in few pieces, or in pieces of about `max_bytes`; at least one, maybe empty.

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
    """Return the number of rows of a planned read, from the tables' logs and vectors alone if they tell."""
    look = _Look(plan, Selection(where=where), [])
    stored = look.stored_rows()
    pieces = look.rows(PIECE_BYTES) if stored is None else look.tail_rows()
    return (stored or 0) + sum(piece.num_rows for piece in pieces)


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of the rows table that are read in one way."""

    actions: pa.Table
    """The files, in the form of :meth:`TableHandle.actions`."""
    hidden: Mapping[str, Positions]
    """Rows to leave out, by file."""
    judged: bool
    """Whether no delete hits one of the other rows."""


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
        self._stored = rows_read_schema(plan.schema)
        self._coarse = pruning_expression(And(tuple(self._conjuncts)), self._stored) if self._conjuncts else None
        if arrow_filter is not None:
            self._exact = _both(self._exact, arrow_filter.expression)
            if all(self._says_bounds(name) for name in arrow_filter.fields):
                self._coarse = _both(self._coarse, arrow_filter.expression)
        self._candidates: Mapping[str, Positions] = {}
        """For each file, the only rows that may have the wanted keys."""
        files = self._chosen_files()
        masked = {} if plan.base is None or files is None else plan.base.judged(files)
        since = self._judged_until(files, masked)
        stored_deletes = self._deletes_after(since)
        self._deletes = to_fields(stored_deletes, plan.schema, self._keys)
        self._files = [] if files is None else self._ways(files, masked, stored_deletes)
        begins = [info.first_visible_tick(plan.tick) for info in plan.vchannels.values()]
        self._hides = any(tick > since for tick in (*begins, *(tick for _, _, tick in plan.partition_drops)))
        self._names = list(dict.fromkeys([*names, *(name for name, _ in selection.order_by)]))
        self._wanted = {*names, *selection.referenced_columns}
        self._wanted |= set() if arrow_filter is None else set(arrow_filter.fields)
        self._judged_by = [*TICKS] if name_no_partition(self._deletes) else [*PLACE]
        if self._hides:
            self._wanted |= {"_vchannel", "_partition_id", "_time_tick"}

    def _says_bounds(self, name: str) -> bool:
        """Return whether an expression on a field can be pushed to the files: same name, and no NaN, which bounds
        ignore.
        """
        if self._places.get(name) != name:
            return False
        kind = self._plan.schema.arrow().field(name).type
        return not (pa.types.is_nested(kind) or pa.types.is_floating(kind))

    def _chosen_files(self) -> pa.Table | None:
        """Return the files of the rows table that may have selected rows; None without a table."""
        plan, table = self._plan, self._plan.rows
        if table is None:
            return None
        files = files_within(table, self._stored, self._after, self._until, self._conjuncts)
        bounded = {name for each in self._conjuncts for name in column_names(each) if has_bounds(self._stored, name)}
        if plan.base is not None and files.num_rows and bounded:
            files = files.filter(may_match(plan.base.bounds(files, bounded), self._stored, self._conjuncts))
        keys = wanted_keys(self._conjuncts, key_schema(plan.schema))
        if keys is None or self._after > 0:
            return files
        path = plan.settings.key_index_path(plan.collection_id)
        index = KeyIndex.open(path) if plan.base is None else plan.base.index
        places = find_keys(index, table, plan.schema, keys, until=self._until)
        request_index(plan.settings, plan.collection_id, index, places.unknown_rows)
        self._candidates = places.positions
        names = pa.array([*places.positions, *places.unknown], pa.utf8())
        return files.filter(pc.is_in(files["path"].cast(pa.utf8()), names))

    def _judged_until(self, files: pa.Table | None, masked: Mapping[str, Positions]) -> int:
        """Return the tick up to which nothing is left to judge: no delete and no drop up to it hides a row of these
        files or of the tails that is not masked.
        """
        plan = self._plan
        found = [plan.tick, *(tail.first_tick() - 1 for tail in plan.tails)]
        if plan.base is not None and masked:
            found.append(plan.base.tick)
        if files is not None and len(masked) < files.num_rows:
            if "min._time_tick" not in files.column_names:
                return 0
            for path, tick in zip(files["path"].to_pylist(), files["min._time_tick"].to_pylist(), strict=True):
                if path not in masked:
                    found.append((tick or 1) - 1)
        return max(0, min(found))

    def _ways(self, files: pa.Table, masked: Mapping[str, Positions], deletes: pa.Table) -> list[_Files]:
        """Return the files whose dead rows are known by their positions, and those whose rows are to be judged."""
        plan = self._plan
        paths: list[str] = files["path"].to_pylist()
        hidden = {path: positions for path, positions in masked.items() if len(positions)}
        assert plan.rows is not None
        doubtful: set[str] = set()
        if deletes.num_rows and len(masked) < len(paths):
            others = [path for path in paths if path not in masked]
            doubtful |= reachable_files(plan.rows, plan.schema, deletes, files=others)
        if plan.base is not None and masked:
            late = deletes.filter(pc.greater(deletes["_time_tick"], plan.base.tick))
            hits, unknown = covered_hits(plan.base.index, plan.rows, plan.schema, late, files=masked)
            doubtful.update(unknown)
            for path, positions in hits.positions.items():
                hidden[path] = np.union1d(masked[path], positions)
        open_ = np.array([path in doubtful for path in paths], dtype=bool)
        return [
            _Files(files.filter(pa.array(~open_)), hidden, judged=True),
            _Files(files.filter(pa.array(open_)), hidden, judged=False),
        ]

    def _fields(self, *, judged: bool) -> list[str]:
        """Return the fields to read; with those by which deletes hit rows, unless they are `judged`."""
        wanted = self._wanted if judged or not self._deletes.num_rows else {*self._wanted, *self._keys}
        return [each for each in self._plan.schema.arrow().names if each in wanted]

    def _columns(self, *, judged: bool) -> list[str]:
        """Return the columns to read."""
        plan, wanted = self._plan, self._wanted
        if not judged and self._deletes.num_rows:
            wanted = {*wanted, *self._judged_by}
        there = {each.name for each in needed_columns(plan.schema, self._fields(judged=judged))}
        there |= wanted & set(ROW_COLUMNS.names)
        return [each for each in self._stored.names if each in there] or ["_time_tick"]

    def rows(self, max_bytes: int | None) -> Iterator[pa.Table]:
        """Yield the rows with the columns of the selection and those that it sorts by, in at least one piece."""
        table = self._plan.rows
        for files in self._files:
            if table is None:
                continue
            files, taken = self._split(files)
            for path in taken:
                yield self._selected_rows(table, path, files)
            if not files.actions.num_rows:
                continue
            living = None if files.judged or max_bytes is not None else self._living(files)
            stored = [living] if living is not None else self._scanned(table, files, max_bytes)
            for piece in stored:
                yield self._shown(piece, judged=files.judged or living is not None)
        yield from self.tail_rows()

    def _split(self, files: _Files) -> tuple[_Files, list[str]]:
        """Return the files to scan, and those of which some rows are taken by their positions."""
        taken = [path for path in files.actions["path"].to_pylist() if path in self._candidates]
        if not taken:
            return files, []
        rest = pc.invert(pc.is_in(files.actions["path"].cast(pa.utf8()), pa.array(taken, pa.utf8())))
        return replace(files, actions=files.actions.filter(rest)), taken

    def _selected_rows(self, table: TableHandle, path: str, files: _Files) -> pa.Table:
        """Return the selected rows of a file among the candidates. Reads only their row groups."""
        names = self._columns(judged=files.judged)
        target = pa.schema([self._stored.field(name) for name in names])
        positions = np.setdiff1d(self._candidates[path], files.hidden.get(path, NO_POSITIONS), assume_unique=True)
        rows = target.empty_table()
        if len(positions):
            rows = align_to_schema(table.take_rows(path, positions, columns=names)[0], target)
        return self._shown(rows, judged=files.judged)

    def tail_rows(self) -> Iterator[pa.Table]:
        """Yield the rows of the tails as :meth:`rows` does, in at least one piece."""
        columns = self._columns(judged=False)
        yield self._shown(self._stored.empty_table().select(columns), judged=False)
        for piece in self._plan.tail_rows(deletes=False):
            yield self._shown(self._between(piece).select(columns), judged=False)

    def _scanned(self, table: TableHandle, files: _Files, max_bytes: int | None) -> Iterator[pa.Table]:
        return _rows_of_files(
            table,
            files.actions,
            self._stored,
            self._until,
            max_bytes,
            after=self._after,
            columns=self._columns(judged=files.judged),
            where=self._coarse,
            groups=self._groups,
            hidden=files.hidden,
        )

    def _shown(self, piece: pa.Table, *, judged: bool) -> pa.Table:
        """Return the selected rows of a piece. `judged`: no delete hits one of them."""
        piece = to_fields(piece, self._plan.schema, self._fields(judged=judged))
        if self._exact is not None:
            piece = piece.filter(self._exact)
        if self._hides:
            piece = hide_dropped(piece, self._plan)
        if not judged and self._deletes.num_rows and piece.num_rows:
            piece = piece.filter(pa.array(~deleted_mask(piece, self._deletes, self._plan.schema.key_names)))
        return piece.select(self._names)

    def _living(self, files: _Files) -> pa.Table | None:
        """Return the rows of files that no delete hits, found by key and location; None if the read needs a filtered
        scan.

        Reads the other columns only of row groups with such rows.
        """
        table, paths = self._plan.rows, files.actions["path"].to_pylist()
        filtered = self._coarse is not None or self._groups is not None or self._after > 0
        last = _last_tick(files.actions)
        if (
            table is None
            or filtered
            or last is None
            or last > self._until
            or any(path in files.hidden for path in paths)
        ):
            return None
        key = key_schema(self._plan.schema).names

        def is_live(rows: pa.Table) -> npt.NDArray[np.bool_]:
            named = to_fields(rows, self._plan.schema, self._keys)
            return ~deleted_mask(named, self._deletes, self._plan.schema.key_names)

        columns = self._columns(judged=True)
        rows = table.read_filtered(
            paths, self._stored, columns=columns, filter_columns=[*key, *self._judged_by], keep=is_live
        )
        return align_to_schema(rows.select(columns), pa.schema([self._stored.field(name) for name in columns]))

    def _between(self, piece: pa.Table) -> pa.Table:
        if self._after == 0 and self._until == self._plan.tick:
            return piece
        ticks = piece["_time_tick"].to_numpy()
        return piece.filter(pa.array((ticks > self._after) & (ticks <= self._until)))

    def stored_rows(self) -> int | None:
        """Return the number of the table's rows that are shown, from the logs and what is masked; None if they do not
        tell.
        """
        if self._exact is not None or self._hides:
            return None
        count = 0
        for files in self._files:
            actions = files.actions
            if not actions.num_rows:
                continue
            last = _last_tick(actions)
            if not files.judged or last is None or last > self._until or actions["num_records"].null_count:
                return None
            hidden = sum(len(files.hidden.get(path, ())) for path in actions["path"].to_pylist())
            count += int(pc.sum(actions["num_records"]).as_py()) - hidden
        return count

    def _deletes_after(self, since: int) -> pa.Table:
        """Return the deletes after `since` up to the tick, except those of keys that the predicate excludes anyway.

        Columns are those of the deletes table.
        """
        plan = self._plan
        schema = deletes_file_schema(plan.schema)
        keys = key_schema(plan.schema)
        mine = [each for each in self._conjuncts if column_names(each) <= set(keys.names)]
        where = pruning_expression(And(tuple(mine)), keys) if mine else None
        wanted = [*keys.names, *PLACE]
        found = [
            *stored_table_rows(
                plan.deletes, schema, plan.tick, None, after=since, columns=wanted, where=where, conjuncts=mine
            )
        ]
        if plan.has_tail_deletes():
            found += [piece.select(wanted) for piece in plan.tail_rows(deletes=True)]
        return pa.concat_tables(found)


def files_within(
    table: TableHandle, schema: pa.Schema, after: int, tick: int, conjuncts: Sequence[Condition] = ()
) -> pa.Table:
    """Return the live files (TableHandle.actions) that may have rows after `after` up to `tick` that satisfy all
    `conjuncts`, by the bounds in the log.

    `schema` has the columns of the files.
    """
    actions = table.actions()
    ticks = ColumnRef(("_time_tick",))
    wanted = [Compare("<=", ticks, Literal(tick)), *conjuncts]
    if after:
        wanted.append(Compare(">", ticks, Literal(after)))
    return actions.filter(may_match(actions, schema, wanted))


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
) -> Iterator[pa.Table]:
    """Yield rows of a rows or deletes table after `after` up to `tick`, pruned by statistics, in pieces.

    `schema` has the columns of its files. Without `max_bytes`, one piece. Raises TableDamaged.
    """
    names = schema.names if columns is None else list(columns)
    if table is None or not table.actions().num_rows:
        yield pa.schema([schema.field(name) for name in names]).empty_table()
        return
    files = files_within(table, schema, after, tick, conjuncts)
    yield from _rows_of_files(table, files, schema, tick, max_bytes, after=after, columns=names, where=where)


def _rows_of_files(
    table: TableHandle,
    files: pa.Table,
    schema: pa.Schema,
    tick: int,
    max_bytes: int | None,
    *,
    after: int,
    columns: Sequence[str],
    where: pc.Expression | None,
    groups: RowGroupFilter | None = None,
    hidden: Mapping[str, Positions] = MappingProxyType({}),
) -> Iterator[pa.Table]:
    """Yield rows of `files` (TableHandle.actions) after `after` up to `tick`, without those at `hidden` positions."""
    target = pa.schema([schema.field(name) for name in columns])
    last = _last_tick(files) if files.num_rows else 0
    limits = []
    if after:
        limits.append(pc.field("_time_tick") > after)
    if last is None or last > tick:
        limits.append(pc.field("_time_tick") <= tick)
    for each in limits:
        where = each if where is None else each & where
    paths = files["path"].to_pylist()
    if not paths or (max_bytes is None and not any(path in hidden for path in paths)):
        yield align_to_schema(table.read_rows(paths, schema, columns=columns, where=where, groups=groups), target)
        return
    held: list[pa.RecordBatch] = []
    for batch in table.scan_rows(
        paths, schema, columns=columns, where=where, batch_rows=BATCH_ROWS, groups=groups, hidden=hidden
    ):
        held.append(batch)
        if max_bytes is not None and sum(each.nbytes for each in held) >= max_bytes:
            yield align_to_schema(pa.Table.from_batches(held), target)
            held = []
    yield align_to_schema(pa.Table.from_batches(held, held[0].schema) if held else target.empty_table(), target)


def _last_tick(files: pa.Table) -> int | None:
    """Return the last tick of any of some files; None if that is unknown."""
    if "max._time_tick" not in files.column_names or files["max._time_tick"].null_count:
        return None
    return int(pc.max(files["max._time_tick"]).as_py())


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
