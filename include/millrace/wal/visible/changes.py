"""A collection's changes: inserts, deletes and retractions from visible WAL messages, as Arrow batches in order of
effect.

    reader = ChangeReader(pchannel, collection_id, start, imports=imports)
    for batch in reader.push(visible):  # rows that a Scanner or a TxnBuffer made visible, from the table or the tail
        ...  # batch.rows: the collection's columns and CHANGE_COLUMNS; batch.position

There are three kinds. ``insert`` is a row, written or imported. ``delete`` is a key as the log has it: it hits the rows
of that key on its VChannel, in its partition (0: in all), that precede it in (``_time_tick``, ``_write_tick``).
``retract`` has no columns: it removes all rows of its VChannel, in its partition (0: all), with a smaller
``_time_tick``. DropPartition, DropCollection and a replacing Import give one each, the last before its own rows.

Promises: folding the changes up to a tick gives the result of a read at that tick. Rows and their order are those of
the log, whatever the commits, flushes, compactions and batches were. A :class:`ChangePosition` permanently names a
place between two rows of that order, also inside an import or a transaction. Memory: the rows of one push, which its
source bounds, and about BATCH_BYTES of payload or one piece of a staged file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import CollectionNotFound, InvalidArgument, SchemaChanged
from millrace.message.bodies import ImportSource, parse_body
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import check_convertible, needed_columns, to_fields
from millrace.message.types import DML, MessageType
from millrace.wal.txn_buffer import VISIBLE_TICK
from millrace.wal.visible.catalog import CATALOG_TYPES, VChannelInfo, WalCatalog, newest_schema
from millrace.wal.visible.collection_rows import align_to_schema, collection_rows, imported_rows, split_by_bytes

BATCH_BYTES: Final = 16 << 20
"""Approximate payload bytes of messages per batch. Imports come in pieces of staged_files.BATCH_BYTES."""

ChangeKind = Literal["insert", "delete", "retract"]
CHANGE_KINDS: Final[tuple[ChangeKind, ...]] = ("insert", "delete", "retract")

CHANGE_COLUMNS: Final = pa.schema(
    [
        pa.field("_change", pa.dictionary(pa.int8(), pa.utf8())),
        pa.field("_partition_id", pa.int64()),  # 0: all partitions, of a delete and a retraction
        pa.field("_vchannel", pa.utf8()),
        pa.field("_time_tick", pa.int64()),  # from which on the change is visible
        pa.field("_write_tick", pa.int64()),  # the message's own: the order inside a transaction
    ]
)
"""Columns after a collection's fields in a batch of changes."""

PRINCIPAL_COLUMN: Final = pa.field("_principal", pa.utf8())
"""The last column of a batch of changes with principals: who wrote the change; null if its entry has no name."""

_DML: Final = pa.array([kind.name for kind in DML])
_EVENTS: Final = pa.array(CATALOG_TYPES)


class ChangePosition(NamedTuple):
    """A position in a collection's changes on one PChannel: after everything visible at `tick`, and the next `rows`
    rows.

    `rows` is 0 except inside what becomes visible as one at the next tick. Its JSON form is a list of two integers.
    """

    tick: int
    rows: int = 0


CHANGES_BEGIN: Final = ChangePosition(0)


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Changes of one collection on one PChannel, in order. Never empty."""

    pchannel: str
    collection_id: int
    schema: CollectionSchema
    """The collection's schema at the last row, whatever schema the rows were written with."""
    rows: pa.RecordBatch
    """Columns of change_schema(schema)."""
    position: ChangePosition
    """The position from which to continue after this batch."""


def change_schema(schema: CollectionSchema, *, principals: bool = False) -> pa.Schema:
    """Return the columns of a batch. All are nullable: a delete has only its key, a retraction not even that."""
    more = (PRINCIPAL_COLUMN,) if principals else ()
    return pa.schema([*(field.with_nullable(True) for field in schema.arrow()), *CHANGE_COLUMNS, *more])


@dataclass(slots=True)
class ChangeStart:
    """Start of a reader of changes, and the catalog there."""

    after: ChangePosition
    """No change up to this position is returned."""
    scan_after: int
    """The tick after which visible rows must be pushed; at or before that of `after`."""
    catalog: WalCatalog
    """The collection's VChannels on the PChannel, as of `catalog_ticks`."""
    catalog_ticks: dict[str, int]

    @classmethod
    def of(cls, after: ChangePosition, checkpoint: int, found: Mapping[str, VChannelInfo]) -> ChangeStart:
        """Return the start after `after`, from a checkpoint at that tick (0: none) with `found` of the collection."""
        # A collection created after the start comes with its CreateCollection.
        catalog = WalCatalog({name: info for name, info in found.items() if info.created_tick <= after.tick})
        return cls(after, min(after.tick, checkpoint), catalog, dict.fromkeys(catalog.vchannels, checkpoint))


class ChangeReader:
    """Makes changes of visible rows, pushed in order from ``start.scan_after`` on. Takes ownership of the start's
    catalog.

    With a `schema`, all batches have it; otherwise each batch has the schema at its last row's tick. With
    `raise_on_schema_change`, rows that became visible under a newer schema raise SchemaChanged instead of being
    converted. With `principals`, batches end with PRINCIPAL_COLUMN.
    """

    def __init__(
        self,
        pchannel: str,
        collection_id: int,
        start: ChangeStart,
        *,
        imports: ImportSource,
        schema: CollectionSchema | None = None,
        raise_on_schema_change: bool = False,
        principals: bool = False,
    ) -> None:
        self._pchannel = pchannel
        self._schema = schema
        self._to_its_end = raise_on_schema_change
        self._principals = principals
        self._collection_id = collection_id
        self._after = start.after
        self._catalog = start.catalog
        self._known = start.catalog_ticks
        self._imports = imports
        self._skip = start.after.rows
        self._unit = (0, 0)
        """The tick of the last row, and the number of rows of that tick so far."""

    def push(self, visible: pa.Table) -> Iterator[ChangeBatch]:
        """Yield the changes of the next visible rows (ROW_SCHEMA with ``visible_tick``). Consume them before the next
        push.

        Raises Malformed if the WAL was altered; StagedFileDamaged; CollectionNotFound; and InvalidArgument if the start
        is not a position of this collection, or rows do not fit the requested schema.
        """
        mine = visible.filter(pc.equal(visible["collection_id"], self._collection_id))
        if mine.num_rows == 0:
            return
        start = 0
        for place in np.flatnonzero(pc.is_in(mine["type"].cast(pa.utf8()), _EVENTS).to_numpy()).tolist():
            yield from self._rows(mine.slice(start, place - start))
            yield from self._event(mine.slice(place, 1))
            start = place + 1
        yield from self._rows(mine.slice(start))

    def _rows(self, stretch: pa.Table) -> Iterator[ChangeBatch]:
        """Yield the changes of a slice without DDL."""
        wanted = pc.and_(
            pc.is_in(stretch["type"].cast(pa.utf8()), _DML), pc.greater(stretch[VISIBLE_TICK], self._after.tick)
        )
        messages = stretch.filter(wanted)
        if messages.num_rows == 0:
            return
        for channel in pc.unique(messages["vchannel"].cast(pa.utf8())).to_pylist():
            self._info(channel, messages[VISIBLE_TICK][0].as_py())
        messages = messages.unify_dictionaries().combine_chunks()
        ends = messages[VISIBLE_TICK].to_numpy()
        stop = 0
        for part in split_by_bytes(messages, BATCH_BYTES):
            stop += part.num_rows
            whole = stop == len(ends) or ends[stop] > ends[stop - 1]
            schema = self._schema_at(self._catalog.vchannels.values(), int(ends[stop - 1]))
            rows = self._in_order(part, schema)
            yield from self._batches(schema, self._named(rows, part) if self._principals else rows, whole=whole)

    def _in_order(self, part: pa.Table, schema: CollectionSchema) -> pa.Table:
        found = collection_rows(part, self._catalog, imports=self._imports)
        table = pa.concat_tables(
            [
                _as_fields(_of_kind(each.rows, "delete" if each.is_delete else "insert"), each.schema, schema)
                for each in found
            ]
        )
        # Each message has its own write tick, and its rows are in order already, deletes first.
        # The last key is the primary one: by visible tick, then by write tick.
        order = np.lexsort([table[name].to_numpy() for name in ("_write_tick", "_time_tick")])
        return table if (np.diff(order) == 1).all() else table.take(pa.array(order))

    def _named(self, rows: pa.Table, messages: pa.Table) -> pa.Table:
        """Return `rows` with the principals of their messages, which their write ticks name."""
        places = pc.index_in(rows["_write_tick"], value_set=messages["time_tick"])
        return rows.append_column(PRINCIPAL_COLUMN, messages["principal"].cast(pa.utf8()).take(places))

    def _event(self, table: pa.Table) -> Iterator[ChangeBatch]:
        [row] = table.to_pylist()
        tick, vchannel = row[VISIBLE_TICK], row["vchannel"]
        # The catalog of the start has the DDL up to its checkpoint already.
        if tick > self._known.get(vchannel, 0):
            if row["type"] != MessageType.CREATE_COLLECTION.name:
                self._info(vchannel, tick)
            for _ in self._catalog.apply(table):
                pass
        if tick <= self._after.tick:
            return
        info = self._info(vchannel, tick)
        given: Pieces = iter(())
        match MessageType[row["type"]]:
            case MessageType.DROP_COLLECTION:
                given = iter([_retraction(row, self._schema_at([info], tick))])
            case MessageType.DROP_PARTITION:
                given = iter([_retraction(row, self._schema_at([info], tick), row["partition_id"])])
            case MessageType.IMPORT:
                given = self._imported(row, self._schema_at([info], tick))
        piece = next(given, None)
        while piece is not None:
            following = next(given, None)  # one piece ahead, to detect the last one
            schema, rows = piece
            yield from self._batches(
                schema, self._named(rows, table) if self._principals else rows, whole=following is None
            )
            piece = following

    def _imported(self, row: dict[str, Any], schema: CollectionSchema) -> Pieces:
        if parse_body(MessageType.IMPORT, row["payload"])["replace"]:
            yield _retraction(row, schema)
        for each in imported_rows(row, self._catalog, self._imports):
            yield schema, _as_fields(_of_kind(each.rows, "insert"), each.schema, schema)

    def _batches(self, schema: CollectionSchema, rows: pa.Table, *, whole: bool) -> Iterator[ChangeBatch]:
        """Yield the batch of the next rows, without those that the start skips.

        `whole`: the last unit ends with them.
        """
        ticks = rows["_time_tick"].to_numpy()
        if self._skip and ticks[0] > self._after.tick + 1:
            raise InvalidArgument(
                f"{self._after} is not a position of collection {self._collection_id} on {self._pchannel}: "
                "fewer rows become"
                f" visible after tick {self._after.tick}. Continue from the position of a batch of this collection"
            )
        last = int(ticks[-1])
        count = int((ticks == last).sum()) + (self._unit[1] if self._unit[0] == last else 0)
        self._unit = (last, count)
        skipped = min(self._skip, rows.num_rows)
        self._skip -= skipped
        if skipped < rows.num_rows:
            # Inside a unit the position names the tick before it and the rows to skip: a reader that continues must
            # not take the unit for complete.
            position = ChangePosition(last) if whole else ChangePosition(last - 1, count)
            [batch] = rows.slice(skipped).combine_chunks().to_batches()
            yield ChangeBatch(self._pchannel, self._collection_id, schema, batch, position)

    def _schema_at(self, infos: Collection[VChannelInfo], tick: int) -> CollectionSchema:
        """Return the schema for what became visible at `tick`."""
        if self._schema is None:
            return newest_schema(infos, tick)
        for info in infos if self._to_its_end else ():
            known = [schema for _, schema in info.schemas]
            if self._schema in known and info.version_at(tick) > known.index(self._schema) + 1:
                raise SchemaChanged(
                    f"the schema of {info.name!r} was changed at tick "
                    f"{info.schemas[known.index(self._schema) + 1][0]}, and this"
                    " reader has the previous one: open a new reader at the current position"
                )
        return self._schema

    def _info(self, vchannel: str, tick: int) -> VChannelInfo:
        info = self._catalog.vchannels.get(vchannel)
        if info is None:
            raise CollectionNotFound(
                f"the collection that {vchannel} had at tick {tick} was dropped, and another one made under "
                "its id: read"
                " its changes from the beginning, or from after its drop"
            )
        return info


Pieces = Iterator[tuple[CollectionSchema, pa.Table]]


def _of_kind(rows: pa.Table, kind: ChangeKind) -> pa.Table:
    codes = pa.array(np.full(rows.num_rows, CHANGE_KINDS.index(kind), dtype=np.int8))
    return rows.append_column("_change", pa.DictionaryArray.from_arrays(codes, pa.array(CHANGE_KINDS)))


def _as_fields(rows: pa.Table, written: CollectionSchema, schema: CollectionSchema) -> pa.Table:
    """Convert rows from the columns of the schema they were written with to fields of `schema`."""
    check_convertible(written, schema)
    columns = pa.schema([*(each.with_nullable(True) for each in needed_columns(schema)), *CHANGE_COLUMNS])
    return align_to_schema(to_fields(align_to_schema(rows, columns), schema), change_schema(schema))


def _retraction(
    row: dict[str, Any], schema: CollectionSchema, partition_id: int = 0
) -> tuple[CollectionSchema, pa.Table]:
    values = {
        "_partition_id": partition_id,
        "_vchannel": row["vchannel"],
        "_time_tick": row[VISIBLE_TICK],
        "_write_tick": row["time_tick"],
    }
    one = pa.Table.from_pylist([values], pa.schema([field for field in CHANGE_COLUMNS if field.name in values]))
    return schema, align_to_schema(_of_kind(one, "retract"), change_schema(schema))
