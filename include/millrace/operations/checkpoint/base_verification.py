"""Verification of a base: compares a PChannel's part of each collection's tables with the WAL, from the last base to a
tick.

Digests of both sides are compared step by step, so each row of the WAL is read once for all bases together (their table
is :mod:`millrace.tables.collections.bases`). Compaction may already have folded deletes into the rows. Rows that are
dead at the fold are then excluded on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.settings import Settings
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import foldable_chains, key_columns, sql_columns
from millrace.storage.parquet_file import dataset, translate_read_errors
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.bases import VerifiedBase
from millrace.tables.collections.data_tables import FOLDED_APP, deletes_uri, earliest_readable_tick, rows_uri
from millrace.tables.collections.dead_rows import HiddenRanges, dead_mask, hidden_ranges_at
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.collections.staged_files import StagedFiles
from millrace.tables.wal.reader import WalSnapshot
from millrace.wal.txn_buffer import TxnBuffer
from millrace.wal.visible.catalog import CATALOG_TYPES, VChannelInfo, WalCatalog, newest_schema
from millrace.wal.visible.collection_rows import (
    align_to_schema,
    collection_rows,
    deletes_file_schema,
    rows_table_schema,
)

_MASK: Final = (1 << 64) - 1
_CATALOG_AND_DELETES: Final = (*CATALOG_TYPES, "BEGIN_TXN", "COMMIT_TXN", "ROLLBACK_TXN", "DELETE", "UPSERT")


class BaseMismatch(Exception):
    """The tables differ from the WAL. The message says where."""


@dataclass(slots=True)
class _Sum:
    """A row count, and the sum of a hash over all columns of each row."""

    rows: int = 0
    value: int = 0

    def add(self, db: duckdb.DuckDBPyConnection, rows: pa.Table, schema: CollectionSchema) -> None:
        if rows.num_rows:
            columns = sql_columns(rows.column_names, foldable_chains(schema))
            [(value,)] = db.execute(f"select sum(hash({columns})::hugeint) from rows").fetchall()
            self.rows += rows.num_rows
            self.value = (self.value + int(value)) & _MASK


@dataclass(slots=True)
class _Tables:
    """A collection's tables at pinned versions, and the dead rows in them."""

    schema: CollectionSchema
    vchannels: pa.Array
    rows: TableHandle | None
    deletes: TableHandle | None
    folded: int
    drops: HiddenRanges = field(default_factory=HiddenRanges)
    folded_deletes: pa.Table | None = None
    """Deletes in the WAL from the last base to the fold. None if nothing was folded."""

    def without_dead(self, rows: pa.Table) -> pa.Table:
        if self.folded_deletes is None:
            return rows
        return rows.filter(
            pa.array(~dead_mask(rows, self.folded_deletes, key=key_columns(self.schema), hidden=self.drops))
        )


def verify_base(
    settings: Settings,
    snapshot: WalSnapshot,
    checkpoint: Checkpoint,
    before: VerifiedBase,
    tick: int,
) -> VerifiedBase:
    """Verify and return the base at `tick`, which lies after `before` and not after the flusher's checkpoint.

    Raises BaseMismatch, and PositionTruncated if another run has trimmed the WAL beyond `before` meanwhile.
    """
    catalog, buffer = WalCatalog.from_bytes(before.catalog_bytes), TxnBuffer(after_tick=before.time_tick)
    numbers = {info.collection_id for info in checkpoint.catalog.vchannels.values()}
    pinned = {number: _pin(settings, number) for number in numbers}
    # Compaction may have folded in changes newer than `snapshot`. Read catalog and WAL after the tables, to know what
    # they hide.
    newest = read_checkpoints(open_table(settings.checkpoints_uri))
    later = WalSnapshot.open(settings.wal_uri) or snapshot
    infos = newest.get(before.pchannel, checkpoint).catalog
    tables = {
        number: _tables(settings, later, infos.collection_vchannels(number), before, number, *pinned[number])
        for number in numbers
    }
    wal: dict[tuple[int, bool], _Sum] = {}
    with duckdb.connect() as db:
        for messages in snapshot.messages(before.pchannel, start=before.confirmed, up_to_tick=tick):
            for stretch in catalog.apply(buffer.push(messages)):
                for part in collection_rows(stretch, catalog, imports=StagedFiles.of(settings)):
                    found = tables.get(part.collection_id)
                    if found is not None:
                        total = wal.setdefault((part.collection_id, part.is_delete), _Sum())
                        total.add(db, _comparable(part.rows, found, part.is_delete), found.schema)
        counts = dict(before.collections)
        for number, found in tables.items():
            if found is None:
                counts.pop(number, None)
                continue
            compared = [_compare(db, settings, number, found, wal, before, tick, deletes) for deletes in (False, True)]
            had = counts.get(number, (0, 0))
            counts[number] = (had[0] + compared[0], had[1] + compared[1])
    confirmed = snapshot.confirmed_at(before.pchannel, tick)
    return VerifiedBase(before.pchannel, tick, confirmed, catalog.to_bytes(), counts)


def _compare(
    db: duckdb.DuckDBPyConnection,
    settings: Settings,
    number: int,
    found: _Tables,
    wal: Mapping[tuple[int, bool], _Sum],
    before: VerifiedBase,
    tick: int,
    deletes: bool,
) -> int:
    """Return the number of rows (or deletes) that both sides have. Raises BaseMismatch."""
    table = found.deletes if deletes else found.rows
    stored, expected = _Sum(), wal.get((number, deletes), _Sum())
    for rows in _stored(table, found, before.time_tick, tick, deletes):
        stored.add(db, _comparable(rows, found, deletes), found.schema)
    if (stored.rows, stored.value) != (expected.rows, expected.value):
        what = "deletes" if deletes else "rows"
        raise BaseMismatch(
            f"collection {number}, {before.pchannel}, ticks {before.time_tick} to {tick}: its table holds "
            f"{stored.rows} {what} with digest {stored.value:016x}, the WAL {expected.rows} with {expected.value:016x}"
        )
    return expected.rows


def _pin(settings: Settings, number: int) -> tuple[TableHandle | None, TableHandle | None]:
    """Pin a collection's deletes, then its rows: compaction removes a delete after the rows that it hit."""
    deletes = open_table(deletes_uri(settings, number))
    return deletes, open_table(rows_uri(settings, number))


def _tables(
    settings: Settings,
    snapshot: WalSnapshot,
    infos: Mapping[str, VChannelInfo],
    before: VerifiedBase,
    number: int,
    deletes: TableHandle | None,
    rows: TableHandle | None,
) -> _Tables | None:
    """Return a collection's tables and the dead rows in them, or None if it is dropped.

    A table that does not exist has no rows: it is made with the first one.
    """
    if any(info.dropped_tick for info in infos.values()):
        return None
    schema = newest_schema(infos.values())
    folded = 0 if rows is None else max(earliest_readable_tick(rows), rows.app_version(FOLDED_APP))
    found = _Tables(schema, pa.array(sorted(infos), pa.utf8()), rows, deletes, folded)
    if folded > before.time_tick:
        found.drops = hidden_ranges_at(infos, folded)
        found.folded_deletes = _deletes_before_fold(settings, snapshot, before, number, schema, folded)
    return found


def _deletes_before_fold(
    settings: Settings, snapshot: WalSnapshot, before: VerifiedBase, number: int, schema: Any, folded: int
) -> pa.Table:
    """Return the deletes of a collection from the last base to the fold, from the WAL."""
    catalog, buffer = WalCatalog.from_bytes(before.catalog_bytes), TxnBuffer(after_tick=before.time_tick)
    parts = [deletes_file_schema(schema).empty_table()]
    for messages in snapshot.messages(
        before.pchannel, start=before.confirmed, up_to_tick=folded, types=_CATALOG_AND_DELETES
    ):
        for stretch in catalog.apply(buffer.push(messages)):
            found = collection_rows(stretch, catalog, imports=StagedFiles.of(settings), deletes=True)
            parts += [part.rows for part in found if part.collection_id == number]
    return pa.concat_tables(parts)


def _comparable(rows: pa.Table, found: _Tables, deletes: bool) -> pa.Table:
    """Return the rows that both sides must have, in one schema."""
    if deletes:
        later = pc.greater(rows["_time_tick"], found.folded)
        return align_to_schema(rows.filter(later), deletes_file_schema(found.schema))
    return found.without_dead(align_to_schema(rows, rows_table_schema(found.schema)))


def _stored(table: TableHandle | None, found: _Tables, after: int, up_to: int, deletes: bool) -> Iterator[pa.Table]:
    """Yield the stored rows of the PChannel that became visible in (after, up_to]. Opens no other files."""
    if table is None:
        return
    actions = table.actions()
    if actions.num_rows and "min._time_tick" in actions.column_names:
        early = pc.less_equal(pc.fill_null(actions["min._time_tick"], 0), up_to)
        late = pc.greater(pc.fill_null(actions["max._time_tick"], up_to), after)
        actions = actions.filter(pc.and_(early, late))
    files = actions["path"].to_pylist() if actions.num_rows else []
    if not files:
        return
    schema = deletes_file_schema(found.schema) if deletes else rows_table_schema(found.schema)
    tick = pc.field("_time_tick")
    with translate_read_errors(table.store):
        for batch in dataset(table.store, files, schema).to_batches(filter=(tick > after) & (tick <= up_to)):
            # Not in the scan: Arrow cannot compare the bounds of a string column that delta-rs wrote as a view.
            mine = batch.filter(pc.is_in(batch["_vchannel"], found.vchannels))
            if mine.num_rows:
                yield pa.Table.from_batches([mine])
