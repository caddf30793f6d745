"""Deliveries: units, and the changes that they make to a collection's rows.

A unit is a message outside transactions or a whole committed transaction (:mod:`millrace.wal.scanner`). Its changes are
its rows and keys, the rows of the files that an Import names, and a retraction for what a drop or replacement removes.
Applying them in order yields the collection.

Memory: one message and the small messages decoded with it (:mod:`millrace.client.consume.batch_decoder`), or one piece
of a staged file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import pyarrow as pa

from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.batch_decoder import BatchDecoder
from millrace.message.bodies import ImportSource, VChannelImport, parse_body
from millrace.message.model import ImmutableMessage
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import convert_schema
from millrace.message.types import MessageType
from millrace.wal.scanner import ImmutableTxn, TypeFilter

OBJECT_BYTES: Final = 2 << 10
"""Approximate size of a message object, without its payload."""

SchemaMode: TypeAlias = Literal["written", "current"]
"""The schema of a change's rows: the one they were written with ("written"), or the collection's newest ("current").

The newest is the one known when the consumer started, and a newer one from the first row that was written with it.
"""

DefinitionLookup = Callable[[int, int], CollectionInfo]
"""(collection id, schema version) -> the definition of the collection, which includes that version."""

CHANGES: Final = TypeFilter(
    {
        MessageType.INSERT,
        MessageType.DELETE,
        MessageType.UPSERT,
        MessageType.IMPORT,
        MessageType.DROP_PARTITION,
        MessageType.DROP_COLLECTION,
    }
)
"""Filter for the units that change a collection's rows."""


@dataclass(frozen=True, slots=True)
class Change:
    """Inserted or imported rows (all columns), deleted keys (the primary key's columns), or a retraction.

    A retraction has no rows: everything that the VChannel had in that partition is gone, because a partition or the
    collection was dropped or an import replaced it. `partition_id` is 0 for a delete or a retraction in all partitions.
    """

    kind: Literal["insert", "delete", "retract"]
    vchannel: str
    partition_id: int
    rows: pa.RecordBatch
    key: str | tuple[str, ...]
    """The name or names of the primary key."""
    principal: str = ""
    """Who wrote it, as in the message; empty if its entry names nobody."""


@dataclass(slots=True)
class AckState:
    """What a consumer remembers of a delivered unit."""

    tick: int
    done: bool = False


@dataclass(slots=True, eq=False)
class Delivery:
    """A delivered unit, visible at `tick` on `pchannel`, `lag` seconds after it was appended to the log."""

    pchannel: str
    unit: ImmutableMessage | ImmutableTxn
    lag: float = 0.0
    _definitions: DefinitionLookup | None = None
    _files: ImportSource | None = None
    _schema: SchemaMode = "written"
    _decoder: BatchDecoder = field(default_factory=BatchDecoder)
    places: tuple[object, ...] = ()
    """Where its consumer keeps the progress of the lanes that it belongs to."""
    ack: AckState = field(init=False)

    def __post_init__(self) -> None:
        self.ack = AckState(self.unit.time_tick)

    @property
    def done(self) -> bool:
        """Whether the unit was acknowledged."""
        return self.ack.done

    @property
    def tick(self) -> int:
        return self.unit.time_tick

    @property
    def vchannel(self) -> str:
        return self.unit.vchannel

    @property
    def bodies(self) -> tuple[ImmutableMessage, ...]:
        """The messages of the unit, in order."""
        return self.unit.bodies if isinstance(self.unit, ImmutableTxn) else (self.unit,)

    @property
    def drops_collection(self) -> bool:
        """Whether the unit drops its VChannel's collection: nothing comes after it."""
        return isinstance(self.unit, ImmutableMessage) and self.unit.type is MessageType.DROP_COLLECTION

    @property
    def bytes(self) -> int:
        return sum(len(message.payload) for message in self.bodies)

    @property
    def held_bytes(self) -> int:
        """Approximate size in memory."""
        return self.bytes + OBJECT_BYTES * len(self.bodies)

    def changes(self) -> Iterator[Change]:
        """Yield the rows and keys that the unit inserts, deletes and retracts, in order.

        An import's rows come in pieces of bounded size. Flushes and other DDL have no changes.

        Raises Malformed, StagedFileDamaged, and PositionTruncated if retention has removed an import's files.
        """
        for message in self.bodies:
            if message.type in CHANGES.types and self._definitions is not None:
                version = max(1, message.schema_version)
                yield from self._changes(message, self._definitions(message.collection_id, version))

    def _changes(self, message: ImmutableMessage, collection: CollectionInfo) -> Iterator[Change]:
        written = collection.schemas[max(1, message.schema_version) - 1]
        given = collection.schema if self._schema == "current" else written

        def inserted(partition_id: int, rows: pa.RecordBatch) -> Change:
            found = rows if given == written else _batch(convert_schema(pa.table(rows), written, given))
            return Change("insert", message.vchannel, partition_id, found, given.primary_key, message.principal)

        def deleted(partition_id: int, keys: pa.RecordBatch) -> Change:
            # A key's fields keep their types and order, even if they are renamed.
            named = pa.RecordBatch.from_arrays(keys.columns, schema=given.key_arrow())
            return Change("delete", message.vchannel, partition_id, named, given.primary_key, message.principal)

        match message.type:
            case MessageType.INSERT:
                yield inserted(message.partition_id, self._decoder.rows(message, written.arrow()))
            case MessageType.UPSERT:
                rows = self._decoder.rows(message, written.arrow())
                yield deleted(0, rows.select(written.key_arrow().names))
                yield inserted(message.partition_id, rows)
            case MessageType.DELETE:
                yield deleted(message.partition_id, self._decoder.rows(message, written.key_arrow()))
            case MessageType.DROP_PARTITION:
                yield _retraction(message, given, message.partition_id)
            case MessageType.DROP_COLLECTION:
                yield _retraction(message, given)
            case _:
                body = parse_body(MessageType.IMPORT, message.payload)
                if body["replace"]:
                    yield _retraction(message, given)
                if self._files is not None:
                    named = VChannelImport(
                        message.vchannel, message.time_tick, body["files"], written, collection.vchannels
                    )
                    for partition_id, rows in self._files.rows(named):
                        yield inserted(partition_id, rows)


def _batch(rows: pa.Table) -> pa.RecordBatch:
    [batch] = rows.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
    return batch


def _retraction(message: ImmutableMessage, schema: CollectionSchema, partition_id: int = 0) -> Change:
    nothing = pa.RecordBatch.from_pylist([], schema.key_arrow())
    return Change("retract", message.vchannel, partition_id, nothing, schema.primary_key, message.principal)
