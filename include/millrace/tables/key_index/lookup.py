"""Lookups by a key index: the rows that deletes hit, and the rows of keys, by file and position.

Three steps, the cheapest first: the bounds of ticks and keys of each file, which cost nothing and leave out every old
file if keys grow with time; the index; and for what the index cannot decide, the columns of the candidates' row groups.
The hash alone never decides, unless it identifies the key (millrace.tables.key_index.hashes). Files that the index does
not cover are scanned. So the answers never depend on the index, only their cost does.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.keys import key_column
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import key_schema
from millrace.storage.table import TableHandle
from millrace.tables.key_index.hashes import KeyHashes, hash_keys, identifies_keys
from millrace.tables.key_index.index import Candidates, KeyIndex
from millrace.tables.key_index.run_file import Int64s, RunDamaged
from millrace.tables.read.deleted import PLACE, deleted_mask

SCAN_ROWS: Final = 1 << 20
"""Rows of uncovered files that are compared at once."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LookupWork:
    """The cost of a lookup."""

    files_excluded: int = 0
    """Files that bounds of ticks or keys left out."""
    blocks: int = 0
    """Blocks of runs that were read."""
    candidates: int = 0
    """Rows that the index named."""
    rows_read: int = 0
    """Rows of row groups that were read to compare candidates."""
    rows_scanned: int = 0
    """Rows of files that the index does not cover."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Rows that deletes hit."""

    positions: Mapping[str, Int64s]
    """Positions by file, ascending. Files without a hit are left out."""
    work: LookupWork

    @property
    def rows(self) -> int:
        return sum(map(len, self.positions.values()))


@dataclass(frozen=True, slots=True)
class KeyPlaces:
    """The places where rows of keys may be."""

    positions: Mapping[str, Int64s]
    """Positions by covered file, ascending: rows whose key has the hash of one of the keys."""
    unknown: tuple[str, ...]
    """Files that the index does not cover and that may have such rows."""
    unknown_rows: int
    """Rows of these files."""
    work: LookupWork


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Deletes or keys by hash: each hash once, with the last ticks of its deletes."""

    hashes: KeyHashes
    last: Int64s
    last_everywhere: Int64s
    """Last tick of the deletes that name no partition; -1 without any."""


def find_hits(
    index: KeyIndex,
    table: TableHandle,
    schema: CollectionSchema,
    deletes: pa.Table,
    *,
    files: Collection[str] | None = None,
) -> Hits:
    """Return the rows of a rows table that `deletes` hit, also those that earlier deletes hit already.

    `deletes` has the columns of ``deletes_file_schema(schema)``, ``_vchannel`` aside. A delete hits the rows of its
    key, in its partition if it names one, whose (visible tick, write tick) is smaller. `files` limits the answer to
    some of the table's live files. Raises TableDamaged.
    """
    found, unknown = covered_hits(index, table, schema, deletes, files=files)
    keys = key_schema(schema)
    columns = [*keys.names, *PLACE]
    deletes = deletes.select(columns).cast(_columns(keys))
    scanned: dict[str, list[Int64s]] = {}
    parts: list[tuple[str, Int64s, pa.Table]] = []
    held = 0
    for path in unknown:
        with table.open_file(path) as file:
            rows = file.read(columns=columns).select(columns)
        found.work.rows_scanned += rows.num_rows
        held += rows.num_rows
        parts.append((path, np.arange(rows.num_rows), rows))
        if held >= SCAN_ROWS:
            _compare(parts, deletes, keys, scanned)
            parts, held = [], 0
    _compare(parts, deletes, keys, scanned)
    return Hits({**found.positions, **_positions(scanned)}, found.work)


def covered_hits(
    index: KeyIndex,
    table: TableHandle,
    schema: CollectionSchema,
    deletes: pa.Table,
    *,
    files: Collection[str] | None = None,
) -> tuple[Hits, tuple[str, ...]]:
    """Return the rows of files that the index covers which `deletes` hit, and the other files that may have some.

    Arguments as in :func:`find_hits`. Raises TableDamaged.
    """
    work, found = LookupWork(), dict[str, list[Int64s]]()
    if deletes.num_rows == 0:
        return Hits({}, work), ()
    keys = key_schema(schema)
    columns = [*keys.names, *PLACE]
    deletes = deletes.select(columns).cast(_columns(keys))
    live = _reached(table, keys, deletes, int(pc.max(deletes["_time_tick"]).as_py()), files, work)
    wanted = _by_hash(deletes, keys)
    candidates, unknown = _candidates(index, wanted.hashes, live, work)
    candidates = candidates.filtered(candidates.tick <= wanted.last[candidates.key])
    certain = np.zeros(len(candidates.key), dtype=bool)
    if identifies_keys(keys):
        certain = candidates.tick < wanted.last_everywhere[candidates.key]
        for path, places in (sure := candidates.filtered(certain)).by_file():
            found.setdefault(path, []).append(sure.position[places])
    parts: list[tuple[str, Int64s, pa.Table]] = []
    for path, places in (doubtful := candidates.filtered(~certain)).by_file():
        positions = np.unique(doubtful.position[places])
        rows, read = table.take_rows(path, positions, columns=columns)
        work.rows_read += read
        parts.append((path, positions, rows.select(columns)))
    _compare(parts, deletes, keys, found)
    return Hits(_positions(found), work), unknown


def reachable_files(
    table: TableHandle, schema: CollectionSchema, deletes: pa.Table, *, files: Collection[str]
) -> set[str]:
    """Return those of the live `files` that may have a row that `deletes` hit, by the bounds of ticks and keys.

    `deletes` as in :func:`find_hits`.
    """
    if deletes.num_rows == 0:
        return set()
    last = int(pc.max(deletes["_time_tick"]).as_py())
    return set(_reached(table, key_schema(schema), deletes, last, files, LookupWork()))


def _positions(found: Mapping[str, list[Int64s]]) -> dict[str, Int64s]:
    return {path: np.unique(np.concatenate(each)) for path, each in found.items()}


def find_keys(
    index: KeyIndex, table: TableHandle, schema: CollectionSchema, keys: pa.Table, *, until: int, since: int = 0
) -> KeyPlaces:
    """Return where rows of `keys` with a tick from `since` to `until` may be in a rows table.

    `keys` has the columns of ``key_schema(schema)``. The caller compares the keys of what it reads there.
    """
    work = LookupWork()
    if keys.num_rows == 0:
        return KeyPlaces({}, (), 0, work)
    named = key_schema(schema)
    live = _reached(table, named, keys, until, None, work, first_tick=since)
    hashes = hash_keys(key_column(keys.select(named.names).cast(named), named.names))
    candidates, unknown = _candidates(index, hashes, live, work)
    candidates = candidates.filtered((candidates.tick >= since) & (candidates.tick <= until))
    positions = {path: np.unique(candidates.position[places]) for path, places in candidates.by_file()}
    return KeyPlaces(positions, unknown, sum(live[path] for path in unknown), work)


def files_with_keys(table: TableHandle, keys: pa.Table, *, first_tick: int, last_tick: int) -> list[str]:
    """Return the live files that may have entries of `keys` with a tick from `first_tick` to `last_tick`, by bounds."""
    actions = table.actions()
    selected = _within_ticks(actions, first_tick, last_tick)
    selected &= _within_bounds(actions, keys.schema.field(0), keys.column(0))
    return list(actions["path"].filter(pa.array(selected)).to_pylist())


def _candidates(
    index: KeyIndex, hashes: KeyHashes, live: Mapping[str, int], work: LookupWork
) -> tuple[Candidates, tuple[str, ...]]:
    """Return the rows of covered files with these hashes, and the files that the index does not cover."""
    while True:
        try:
            found = index.find(hashes, live)
            break
        except RunDamaged as error:  # the index dropped the run
            _log.warning("%s", error)
    covered = index.covered(live)
    work.blocks += found.blocks
    work.candidates += len(found.key)
    return found, tuple(path for path in live if path not in covered)


def _columns(keys: pa.Schema) -> pa.Schema:
    """Return the columns by which deletes hit rows."""
    return pa.schema([*keys, *(pa.field(name, pa.int64()) for name in PLACE)])


def _by_hash(deletes: pa.Table, keys: pa.Schema) -> _Wanted:
    hashes = hash_keys(key_column(deletes, keys.names))
    order = np.lexsort((hashes.low, hashes.high))
    high, low = hashes.high[order], hashes.low[order]
    starts = np.flatnonzero(np.r_[True, (high[1:] != high[:-1]) | (low[1:] != low[:-1])])
    tick = deletes["_time_tick"].to_numpy()[order]
    everywhere = np.where(deletes["_partition_id"].to_numpy()[order] == 0, tick, -1)
    return _Wanted(
        KeyHashes(high[starts], low[starts]),
        np.maximum.reduceat(tick, starts),
        np.maximum.reduceat(everywhere, starts),
    )


def _compare(
    parts: Iterable[tuple[str, Int64s, pa.Table]], deletes: pa.Table, keys: pa.Schema, found: dict[str, list[Int64s]]
) -> None:
    """Add to `found` the positions of rows that deletes hit by key, partition and ticks."""
    parts = list(parts)
    if not parts:
        return
    rows = pa.concat_tables(rows for _, _, rows in parts)
    hit = deleted_mask(rows.cast(_columns(keys)), deletes, keys.names)
    begin = 0
    for path, positions, each in parts:
        mine = hit[begin : begin + each.num_rows]
        begin += each.num_rows
        if mine.any():
            found.setdefault(path, []).append(positions[mine])


def _reached(
    table: TableHandle,
    keys: pa.Schema,
    wanted: pa.Table,
    last_tick: int,
    files: Collection[str] | None,
    work: LookupWork,
    *,
    first_tick: int = 0,
) -> dict[str, int]:
    """Return the live files (path: rows) that may have rows of the `wanted` keys with a tick within these bounds."""
    actions = table.actions()
    selected = np.ones(actions.num_rows, dtype=bool)
    if files is not None:
        selected = pc.is_in(actions["path"].cast(pa.utf8()), pa.array(list(files), pa.utf8())).to_numpy().astype(bool)
    asked = int(selected.sum())
    selected &= _within_ticks(actions, first_tick, last_tick)
    selected &= _within_bounds(actions, keys.field(0), wanted[keys.names[0]])
    work.files_excluded += asked - int(selected.sum())
    chosen = actions.filter(pa.array(selected))
    if chosen["num_records"].null_count:
        rows = {each.path: each.rows for each in table.describe_files()}
        return {path: rows[path] for path in chosen["path"].to_pylist()}
    return dict(zip(chosen["path"].to_pylist(), chosen["num_records"].to_pylist(), strict=True))


def _within_ticks(actions: pa.Table, first: int, last: int) -> npt.NDArray[np.bool_]:
    """Return for each file whether it may have rows with these ticks."""
    found = np.ones(actions.num_rows, dtype=bool)
    if {"min._time_tick", "max._time_tick"} <= set(actions.column_names):
        least, most = actions["min._time_tick"], actions["max._time_tick"]
        inside = pc.and_(pc.less_equal(least, last), pc.greater_equal(most, first))
        found &= pc.fill_null(inside, True).to_numpy().astype(bool)
    return found


def _within_bounds(actions: pa.Table, column: pa.Field, values: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Return for each file whether one of `values` lies between its bounds of a column, or it has none."""
    kind = column.type
    found = np.ones(actions.num_rows, dtype=bool)
    names = (f"min.{column.name}", f"max.{column.name}")
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date32(kind)):
        return found  # readers and writers round the bounds of others differently
    if not set(names) <= set(actions.column_names):
        return found
    least, most = (actions[name] for name in names)
    known = pc.and_(pc.is_valid(least), pc.is_valid(most))
    ordered = np.unique(_comparable(values, kind))
    low, high = (_comparable(each.filter(known), kind) for each in (least, most))
    inside = np.searchsorted(ordered, low, "left") < np.searchsorted(ordered, high, "right")
    found[known.to_numpy().astype(bool)] = inside
    return found


def _comparable(values: pa.ChunkedArray, kind: pa.DataType) -> npt.NDArray[Any]:
    """Return values that compare as the column's do: numbers, days since 1970, or texts by code point."""
    values = values.cast(kind)
    return (values.cast(pa.int32()) if pa.types.is_date32(kind) else values).to_numpy()
