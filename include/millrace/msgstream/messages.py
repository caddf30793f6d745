"""Messages: a class for each type that Millrace interprets, GenericMsg for the others.

Each is a dataclass whose ``marshal`` and ``unmarshal`` are inverse. docs/msgstream.md specifies the bodies. Rows and
keys are Arrow payloads of docs/wire-form.md with their schema, so a message is self-describing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

import pyarrow as pa

from millrace.base.errors import InvalidArgument, Malformed, UnsupportedMessageType
from millrace.message.bodies import encode_body, parse_body
from millrace.message.schema import CollectionSchema
from millrace.msgstream import wire
from millrace.msgstream.pack import MsgPosition
from millrace.msgstream.protocol import MsgType
from millrace.msgstream.rows import RowsBody, read_rows, write_rows

_IDS: Final = struct.Struct("<qqq")
KEY_COLUMN: Final = "key"
"""The one column of a delete's keys."""


@dataclass(slots=True, kw_only=True)
class BaseMsg:
    """Fields of every message. ``end_ts`` 0 means equal to ``begin_ts``. Equality ignores the position."""

    TYPE: ClassVar[MsgType] = MsgType.UNDEFINED

    id: int = 0
    begin_ts: int = 0
    end_ts: int = 0
    source_id: int = 0
    hash_keys: tuple[int, ...] = ()
    trace_ctx: Mapping[str, str] = field(default_factory=dict)
    position: MsgPosition | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.end_ts = self.end_ts or self.begin_ts
        self.hash_keys = tuple(self.hash_keys)

    @property
    def type(self) -> MsgType:
        """Type of this message."""
        return self.TYPE

    def marshal(self) -> bytes:
        """Return the wire form.

        Raises InvalidArgument for values that it cannot hold.
        """
        return wire.write(
            wire.Envelope(
                self.type,
                self.id,
                self.begin_ts,
                self.end_ts,
                self.source_id,
                self.hash_keys,
                self.trace_ctx,
                memoryview(self._body()),
            )
        )

    @classmethod
    def unmarshal(cls, data: bytes | memoryview) -> Self:
        """Inverse of :meth:`marshal`.

        Raises Malformed (also for a message of another type), UnsupportedVersion.
        """
        envelope = wire.read(data)
        if envelope.type != cls.TYPE:
            raise Malformed(f"the message is of type {envelope.type}, not {cls.TYPE.name}")
        return cls._of(envelope, cls._parse(wire.ByteReader(envelope.body)))

    @classmethod
    def _of(cls, envelope: wire.Envelope, fields: dict[str, Any]) -> Self:
        return cls(
            id=envelope.id,
            begin_ts=envelope.begin_ts,
            end_ts=envelope.end_ts,
            source_id=envelope.source_id,
            hash_keys=envelope.hash_keys,
            trace_ctx=envelope.trace_ctx,
            **fields,
        )

    def _body(self) -> bytes:
        return b""

    @classmethod
    def _parse(cls, body: wire.ByteReader) -> dict[str, Any]:
        body.end()
        return {}


@dataclass(slots=True, kw_only=True)
class TimeTickMsg(BaseMsg):
    """No message with a timestamp up to ``end_ts`` follows on this channel."""

    TYPE: ClassVar[MsgType] = MsgType.TIME_TICK


@dataclass(slots=True, kw_only=True)
class GenericMsg(BaseMsg):
    """A message of any type with an opaque payload."""

    msg_type: MsgType = MsgType.UNDEFINED
    payload: bytes = b""

    @property
    def type(self) -> MsgType:
        """Type of this message."""
        return self.msg_type

    @classmethod
    def unmarshal(cls, data: bytes | memoryview) -> Self:
        """Inverse of marshal.

        Raises Malformed, UnsupportedVersion, UnsupportedMessageType for an unknown type number.
        """
        envelope = wire.read(data)
        return cls._of(envelope, {"msg_type": msg_type(envelope.type), "payload": bytes(envelope.body)})

    def _body(self) -> bytes:
        return self.payload


@dataclass(slots=True, kw_only=True)
class _CollectionMsg(BaseMsg):
    """A message about a collection, a partition or a segment (0: none, or all)."""

    collection_id: int = 0
    partition_id: int = 0
    segment_id: int = 0

    def _body(self) -> bytes:
        try:
            return _IDS.pack(self.collection_id, self.partition_id, self.segment_id)
        except struct.error as error:
            raise InvalidArgument(f"ids must be 64-bit integers ({error})") from None

    @classmethod
    def _parse(cls, body: wire.ByteReader) -> dict[str, Any]:
        fields = cls._parse_ids(body)
        body.end()
        return fields

    @classmethod
    def _parse_ids(cls, body: wire.ByteReader) -> dict[str, Any]:
        collection_id, partition_id, segment_id = _IDS.unpack(body.raw(_IDS.size))
        return {"collection_id": collection_id, "partition_id": partition_id, "segment_id": segment_id}


@dataclass(slots=True, kw_only=True)
class DropCollectionMsg(_CollectionMsg):
    """The collection is dropped."""

    TYPE: ClassVar[MsgType] = MsgType.DROP_COLLECTION


@dataclass(slots=True, kw_only=True)
class DropPartitionMsg(_CollectionMsg):
    """The partition is dropped."""

    TYPE: ClassVar[MsgType] = MsgType.DROP_PARTITION


@dataclass(slots=True, kw_only=True)
class FlushMsg(_CollectionMsg):
    """Segments are to be flushed, or were: segment ``segment_id``, or all of the partition or collection."""

    TYPE: ClassVar[MsgType] = MsgType.FLUSH


@dataclass(slots=True, kw_only=True)
class CreatePartitionMsg(_CollectionMsg):
    """A partition is created."""

    TYPE: ClassVar[MsgType] = MsgType.CREATE_PARTITION

    name: str

    def _body(self) -> bytes:
        # Unqualified super() does not work in a dataclass with slots, which is a new class.
        return _CollectionMsg._body(self) + encode_body({"name": self.name})

    @classmethod
    def _parse(cls, body: wire.ByteReader) -> dict[str, Any]:
        fields = cls._parse_ids(body)
        return fields | parse_body(MsgType.CREATE_PARTITION, bytes(body.rest()))


@dataclass(slots=True, kw_only=True)
class CreateCollectionMsg(_CollectionMsg):
    """A collection is created, with its VChannels, schema, and partition ids by name."""

    TYPE: ClassVar[MsgType] = MsgType.CREATE_COLLECTION

    name: str
    vchannels: list[str]
    schema: CollectionSchema
    partitions: dict[str, int] = field(default_factory=dict)

    def _body(self) -> bytes:
        body = {
            "name": self.name,
            "vchannels": self.vchannels,
            "schema": self.schema.to_json(),
            "partitions": self.partitions,
        }
        return _CollectionMsg._body(self) + encode_body(body)

    @classmethod
    def _parse(cls, body: wire.ByteReader) -> dict[str, Any]:
        fields = cls._parse_ids(body)
        return fields | parse_body(MsgType.CREATE_COLLECTION, bytes(body.rest()))


@dataclass(slots=True, kw_only=True)
class InsertMsg(_CollectionMsg):
    """Rows of a collection. ``hash_keys``: one per row, or one for all. ``timestamps`` and ``row_ids``: one per row, if
    given.

    ``begin_ts`` and ``end_ts`` default to the minimum and the maximum of ``timestamps``.
    """

    TYPE: ClassVar[MsgType] = MsgType.INSERT

    rows: pa.RecordBatch
    shard_name: str = ""
    timestamps: pa.UInt64Array | None = None
    row_ids: pa.Int64Array | None = None

    def __post_init__(self) -> None:
        _stamp(self, self.timestamps)
        BaseMsg.__post_init__(self)

    def _body(self) -> bytes:
        rows = RowsBody(self.rows, self.shard_name, self.timestamps, self.row_ids)
        return _CollectionMsg._body(self) + write_rows(rows)

    @classmethod
    def _parse(cls, body: wire.ByteReader) -> dict[str, Any]:
        fields = cls._parse_ids(body)
        return fields | read_rows(body)._asdict()


@dataclass(slots=True, kw_only=True)
class DeleteMsg(_CollectionMsg):
    """Keys of rows to delete (int64 or string). ``hash_keys``: one per key, or one for all. ``timestamps``:
    one per key.
    """

    TYPE: ClassVar[MsgType] = MsgType.DELETE

    primary_keys: pa.Array
    shard_name: str = ""
    timestamps: pa.UInt64Array | None = None

    def __post_init__(self) -> None:
        _stamp(self, self.timestamps)
        BaseMsg.__post_init__(self)

    def _body(self) -> bytes:
        schema = pa.schema([pa.field(KEY_COLUMN, self.primary_keys.type, nullable=False)])
        batch = pa.RecordBatch.from_arrays([self.primary_keys], schema=schema)
        return _CollectionMsg._body(self) + write_rows(RowsBody(batch, self.shard_name, self.timestamps, None))

    @classmethod
    def _parse(cls, body: wire.ByteReader) -> dict[str, Any]:
        fields = cls._parse_ids(body)
        rows, shard_name, timestamps, row_ids = read_rows(body)
        if (
            rows.schema.names != [KEY_COLUMN]
            or rows.schema.types[0] not in (pa.int64(), pa.utf8())
            or row_ids is not None
        ):
            raise Malformed(f"a delete must have one column {KEY_COLUMN!r} of int64 or string, and no row ids")
        if rows.schema.field(0).nullable:
            raise Malformed("a delete's keys must not be null")
        return fields | {"primary_keys": rows.column(0), "shard_name": shard_name, "timestamps": timestamps}


def _stamp(msg: BaseMsg, timestamps: pa.UInt64Array | None) -> None:
    if timestamps is not None and len(timestamps) and not msg.begin_ts and not msg.end_ts:
        values = timestamps.to_numpy(zero_copy_only=False)
        msg.begin_ts, msg.end_ts = int(values.min()), int(values.max())


def msg_type(number: int) -> MsgType:
    """Return the type of a number.

    Raises UnsupportedMessageType for an unknown one.
    """
    found = _TYPES.get(number)
    if found is None:
        raise UnsupportedMessageType(f"{number} is not a message type")
    return found


_TYPES: Final[dict[int, MsgType]] = {member.value: member for member in MsgType}

CLASSES: Final[dict[MsgType, type[BaseMsg]]] = {
    kind.TYPE: kind
    for kind in (
        CreateCollectionMsg,
        CreatePartitionMsg,
        DeleteMsg,
        DropCollectionMsg,
        DropPartitionMsg,
        FlushMsg,
        InsertMsg,
        TimeTickMsg,
    )
}
"""The class of each type that has one; messages of other types are GenericMsg."""
