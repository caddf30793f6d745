"""Build the messages that clients or Millrace append: one function per type, each returning a MutableMessage.

A builder fills the header and the canonical body and checks whatever needs no channel state; the chain judges the rest.
An Upsert is built by :func:`insert`. Types that only the chain emits (CREATE_SEGMENT, FLUSH) have no builder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

import pyarrow as pa

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.bodies import ImportFile, encode_body, parse_body
from millrace.message.model import MutableMessage
from millrace.message.payload.rows import encode_rows
from millrace.message.schema import CollectionSchema
from millrace.message.types import MessageType

if TYPE_CHECKING:  # only programs that change schemas need it
    from millrace.message.schema_changes import SchemaChange


class CommonHeader(TypedDict, total=False):
    """Header fields of any message: the producer's position, and the tick that its own must exceed."""

    producer_id: int
    epoch: int
    sequence: int
    barrier_tick: int


DEFAULT_SCHEMA_VERSION: Final = 1


def insert(
    batch: pa.RecordBatch,
    *,
    vchannel: str,
    collection_id: int,
    partition_id: int,
    term: int,
    schema_version: int = DEFAULT_SCHEMA_VERSION,
    txn_id: int = 0,
    upsert: bool = False,
    **stamps: Unpack[CommonHeader],
) -> MutableMessage:
    """Build an Insert of `batch`, whose columns must be those of the collection's schema at `schema_version`, in order.

    With `upsert` it is an Upsert (chain version 4 and later): its rows replace older ones with their keys, in every
    partition of the VChannel; no key may occur twice.
    Every primary key must belong to `vchannel` (:func:`millrace.message.keys.vchannel_index`).
    """
    return MutableMessage(
        type=MessageType.UPSERT if upsert else MessageType.INSERT,
        vchannel=vchannel,
        term=term,
        collection_id=collection_id,
        partition_id=partition_id,
        schema_version=schema_version,
        rows=batch.num_rows,
        txn_id=txn_id,
        payload=encode_rows(batch),
        **stamps,
    )


def delete(
    keys: pa.RecordBatch | pa.Array | Sequence[Any],
    *,
    schema: CollectionSchema,
    vchannel: str,
    collection_id: int,
    term: int,
    partition_id: int = 0,
    schema_version: int = DEFAULT_SCHEMA_VERSION,
    txn_id: int = 0,
    **stamps: Unpack[CommonHeader],
) -> MutableMessage:
    """Build a Delete by primary key; partition 0 means all partitions.

    `keys` are rows of the key's fields or, if the key has one field, its values.
    Raises InvalidArgument if keys have another type, or there are none.
    """
    arrow = schema.key_arrow()
    try:
        if not isinstance(keys, pa.RecordBatch):
            values = keys if isinstance(keys, pa.Array) else pa.array(keys, arrow.field(0).type)
            keys = pa.RecordBatch.from_arrays([values], names=schema.key_names)
        rows = keys.cast(arrow)
    except (pa.ArrowException, OverflowError, ValueError) as error:
        wanted = ", ".join(f"{field.name} {field.type}" for field in schema.key_fields)
        raise InvalidArgument(f"these are no keys ({wanted}): {error}") from None
    if any(column.null_count for column in rows.columns):
        raise InvalidArgument("a primary key is never null")
    return MutableMessage(
        type=MessageType.DELETE,
        vchannel=vchannel,
        term=term,
        collection_id=collection_id,
        partition_id=partition_id,
        schema_version=schema_version,
        rows=rows.num_rows,
        txn_id=txn_id,
        payload=encode_rows(rows),
        **stamps,
    )


def create_collection(
    name: str,
    schema: CollectionSchema,
    *,
    vchannel: str,
    vchannels: Sequence[str],
    collection_id: int,
    partitions: Mapping[str, int],
    term: int,
    **stamps: Unpack[CommonHeader],
) -> MutableMessage:
    """Build the part of a CreateCollection for `vchannel`.

    `vchannels` are all of the collection's; `partitions` maps names to ids.
    """
    if vchannel not in vchannels:
        raise InvalidArgument(f"{vchannel!r} is none of the collection's VChannels")
    body = {
        "name": name,
        "vchannels": list(vchannels),
        "schema": schema.to_json(),
        "partitions": dict(partitions),
    }
    return _control(
        MessageType.CREATE_COLLECTION,
        body,
        vchannel=vchannel,
        collection_id=collection_id,
        schema_version=1,
        term=term,
        stamps=stamps,
    )


def drop_collection(*, vchannel: str, collection_id: int, term: int, **stamps: Unpack[CommonHeader]) -> MutableMessage:
    """Build the part of a DropCollection for `vchannel`."""
    return _control(
        MessageType.DROP_COLLECTION, None, vchannel=vchannel, collection_id=collection_id, term=term, stamps=stamps
    )


def create_partition(
    name: str, *, vchannel: str, collection_id: int, partition_id: int, term: int, **stamps: Unpack[CommonHeader]
) -> MutableMessage:
    """Build the part of a CreatePartition for `vchannel`."""
    return _control(
        MessageType.CREATE_PARTITION,
        {"name": name},
        vchannel=vchannel,
        collection_id=collection_id,
        partition_id=partition_id,
        term=term,
        stamps=stamps,
    )


def drop_partition(
    *, vchannel: str, collection_id: int, partition_id: int, term: int, **stamps: Unpack[CommonHeader]
) -> MutableMessage:
    """Build the part of a DropPartition for `vchannel`."""
    return _control(
        MessageType.DROP_PARTITION,
        None,
        vchannel=vchannel,
        collection_id=collection_id,
        partition_id=partition_id,
        term=term,
        stamps=stamps,
    )


def schema_change(
    changes: Sequence[SchemaChange],
    *,
    vchannel: str,
    collection_id: int,
    schema_version: int,
    term: int,
    **stamps: Unpack[CommonHeader],
) -> MutableMessage:
    """Build a SchemaChange; `schema_version` is the new version: the current one plus 1.

    A single added field uses the form that every chain version knows.
    """
    from millrace.message.schema_changes import AddField, change_to_json

    for each in changes:
        if isinstance(each, AddField) and not each.field.nullable:
            raise InvalidArgument(
                f"field {each.field.name!r}: only a nullable field can be added, for the rows that are there have none"
            )
    match changes:
        case [AddField(field)] if field.default is None and field.computed is None:
            body: dict[str, object] = {"add": field.to_json()}
        case _:
            body = {"changes": [change_to_json(each) for each in changes]}
    return _control(
        MessageType.SCHEMA_CHANGE,
        body,
        vchannel=vchannel,
        collection_id=collection_id,
        schema_version=schema_version,
        term=term,
        stamps=stamps,
    )


def begin_txn(
    txn_id: int,
    *,
    vchannel: str,
    collection_id: int,
    term: int,
    keepalive_ms: int | None = None,
    **stamps: Unpack[CommonHeader],
) -> MutableMessage:
    """Build a BeginTxn of `txn_id` (chosen by the producer, not 0).

    `keepalive_ms` is the lease; None: the chain's default.
    """
    body = None if keepalive_ms is None else {"keepalive_ms": keepalive_ms}
    return _txn(MessageType.BEGIN_TXN, txn_id, body, vchannel, collection_id, term, stamps)


def commit_txn(
    txn_id: int, *, vchannel: str, collection_id: int, term: int, **stamps: Unpack[CommonHeader]
) -> MutableMessage:
    """Build a CommitTxn, which makes the transaction's messages visible atomically."""
    return _txn(MessageType.COMMIT_TXN, txn_id, None, vchannel, collection_id, term, stamps)


def rollback_txn(
    txn_id: int, *, vchannel: str, collection_id: int, term: int, **stamps: Unpack[CommonHeader]
) -> MutableMessage:
    """Build a RollbackTxn, which discards the transaction's messages."""
    return _txn(MessageType.ROLLBACK_TXN, txn_id, None, vchannel, collection_id, term, stamps)


def keep_alive(
    txn_id: int, *, vchannel: str, collection_id: int, term: int, **stamps: Unpack[CommonHeader]
) -> MutableMessage:
    """Build a KeepAlive, which renews the transaction's lease."""
    return _txn(MessageType.KEEP_ALIVE, txn_id, None, vchannel, collection_id, term, stamps)


def manual_flush(
    *,
    vchannel: str,
    collection_id: int,
    term: int,
    partition_id: int = 0,
    segment_id: int | None = None,
    **stamps: Unpack[CommonHeader],
) -> MutableMessage:
    """Build a ManualFlush of growing segments on `vchannel`: all, those of one partition, or one segment."""
    body = None if segment_id is None else {"segment_id": segment_id}
    return _control(
        MessageType.MANUAL_FLUSH,
        body,
        vchannel=vchannel,
        collection_id=collection_id,
        partition_id=partition_id,
        term=term,
        stamps=stamps,
    )


def flush_all(*, term: int, **stamps: Unpack[CommonHeader]) -> MutableMessage:
    """Build a FlushAll, which seals and flushes all growing segments of the PChannel."""
    return _control(MessageType.FLUSH_ALL, None, term=term, stamps=stamps)


def time_tick(*, term: int, barrier_tick: int = 0, source_id: int = 0) -> MutableMessage:
    """Build a TimeTick, which moves the PChannel's clock, past `barrier_tick` if given.

    `source_id` identifies the requester, for people to read.
    The chain stores it as a WAL row only if another message came since the last tick.
    :meth:`millrace.node.append.host.AppendHost.tick` with `persist` False appends none at all.
    """
    return MutableMessage(type=MessageType.TIME_TICK, term=term, barrier_tick=barrier_tick, producer_id=source_id)


def term_opening(*, term: int, chain_version: int, config: Mapping[str, int]) -> MutableMessage:
    """Build a TermOpening, which fences older terms and sets the chain's version and config."""
    return _control(
        MessageType.TERM_OPENING, {"chain_version": chain_version, "config": dict(config)}, term=term, stamps={}
    )


def config(values: Mapping[str, int], *, term: int) -> MutableMessage:
    """Build a Config, which sets keys of the chain's config."""
    return _control(MessageType.CONFIG, dict(values), term=term, stamps={})


def alter_wal(*, term: int, generation: int, log: str) -> MutableMessage:
    """Build an AlterWal, the last message of a PChannel's log: the log continues in `generation`, at the backend `log`.

    `log` is a URL without credentials. The message must be the last of its entry, too: what follows it in the same
    backend is outside of the log.
    """
    return _control(MessageType.ALTER_WAL, {"generation": generation, "log": log}, term=term, stamps={})


def import_files(
    import_id: str,
    files: Sequence[ImportFile],
    *,
    vchannel: str,
    collection_id: int,
    term: int,
    replace: bool = False,
    schema_version: int = DEFAULT_SCHEMA_VERSION,
    **stamps: Unpack[CommonHeader],
) -> MutableMessage:
    """Build an Import of staged `files` into `vchannel`, to which every primary key in them must belong.

    `replace` removes the VChannel's previous rows at the message's tick. Sync the files before you append the message
    (:func:`millrace.tables.collections.staged_files.sync_staged_files`): its acknowledgement covers their rows. Only
    one Import may name a file, because the file is removed once the WAL is trimmed past the message.
    """
    body = {"import_id": import_id, "files": [dict(each) for each in files], "replace": replace}
    return _control(
        MessageType.IMPORT,
        body,
        vchannel=vchannel,
        collection_id=collection_id,
        schema_version=schema_version,
        rows=sum(each["rows"] for each in files),
        term=term,
        stamps=stamps,
    )


def _txn(
    type: MessageType,
    txn_id: int,
    body: Mapping[str, object] | None,
    vchannel: str,
    collection_id: int,
    term: int,
    stamps: CommonHeader,
) -> MutableMessage:
    if txn_id == 0:
        raise InvalidArgument("a transaction's id is not 0: 0 is outside any transaction")
    return _control(type, body, vchannel=vchannel, collection_id=collection_id, txn_id=txn_id, term=term, stamps=stamps)


def _control(
    type: MessageType,
    body: Mapping[str, object] | None,
    *,
    term: int,
    stamps: CommonHeader,
    vchannel: str = "",
    collection_id: int = 0,
    partition_id: int = 0,
    schema_version: int = 0,
    rows: int = 0,
    txn_id: int = 0,
) -> MutableMessage:
    payload = b"" if body is None else encode_body(body)
    try:
        parse_body(type, payload)
    except Malformed as error:
        # Refuse what the chain would reject as malformed before anything is appended.
        raise InvalidArgument(str(error)) from None
    return MutableMessage(
        type=type,
        vchannel=vchannel,
        term=term,
        collection_id=collection_id,
        partition_id=partition_id,
        schema_version=schema_version,
        rows=rows,
        txn_id=txn_id,
        payload=payload,
        **stamps,
    )
