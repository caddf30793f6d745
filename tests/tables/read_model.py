"""What a read at a tick returns, the plain way: messages one by one in tick order into a list of rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from hypothesis import strategies as st

from millrace.message import builders
from millrace.message.bodies import parse_body
from millrace.message.payload.rows import decode_rows
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField, apply_change
from millrace.message.types import DML, MessageType
from millrace.node.flush.definition import flush_to_end
from tests.tables.wal_maker import SCHEMA, Collection, WalMaker

ADDED = FieldSpec("extra", "int32", True)

KEYS = st.integers(0, 5)
TXNS = st.sampled_from([0, 0, 1, 2])
OPERATIONS = st.one_of(
    st.tuples(st.just("insert"), st.lists(KEYS, min_size=1, max_size=3), st.sampled_from([1, 2]), TXNS),
    st.tuples(st.just("upsert"), st.lists(KEYS, min_size=1, max_size=3), st.sampled_from([1, 2]), TXNS),
    st.tuples(st.just("delete"), st.lists(KEYS, min_size=1, max_size=2), st.sampled_from([0, 1, 2]), TXNS),
    st.tuples(st.sampled_from(["begin", "commit", "rollback"]), st.integers(0, 3), st.sampled_from([1, 2])),
    st.tuples(st.sampled_from(["drop_partition", "create_partition"]), st.integers(0, 3), st.sampled_from([1, 2])),
    st.tuples(st.just("manual_flush"), st.integers(0, 3)),
    st.tuples(st.just("schema_change"), st.integers(0, 3)),
    st.tuples(
        st.just("import"),
        st.lists(st.tuples(KEYS, st.sampled_from([1, 2])), max_size=3),  # each with its partition
        st.booleans(),  # replace
    ),
    st.tuples(st.just("wal_commit"), st.just(0)),
    st.tuples(st.just("flush"), st.integers(0, 100)),
)
"""Keys are numbers of keys; "flush" carries how far, in percent of the ticks that are there."""


def do(collection: Collection, operation: tuple[Any, ...], number: int) -> None:
    """Append what `operation` says (all but "wal_commit" and "flush"); the chain may reject it, which is well."""
    kind, where, *rest = operation
    if kind in ("insert", "upsert", "delete"):
        partition, txn = rest
        for vchannel in collection.vchannels:
            mine = [key for key in where if collection.home(key) == vchannel]
            if mine and kind != "delete":
                rows = _rows(collection, vchannel, mine, number)
                upsert = kind == "upsert"
                message = collection.insert(rows, vchannel=vchannel, partition=partition, txn=txn, upsert=upsert)
            elif mine:
                message = collection.delete(mine, vchannel=vchannel, partition=partition, txn=txn)
            else:
                continue
            collection.append(vchannel, message)
        return
    if kind == "import":
        for vchannel in collection.vchannels:
            files = []
            for partition in (1, 2):
                keys = [key for key, wanted in where if wanted == partition and collection.home(key) == vchannel]
                if keys:
                    path = f"{number}/{vchannel}-{partition}.parquet"
                    rows = _rows(collection, vchannel, keys, number)
                    files.append(collection.stage(path, rows, partition=partition, group=1))
            if files or rest[0]:
                collection.append(vchannel, collection.imported(files, vchannel=vchannel, replace=rest[0]))
        return
    vchannel = collection.vchannels[where]
    place = {"vchannel": vchannel, "collection_id": collection.id, "term": 1}
    match kind:
        case "begin":
            collection.append(vchannel, collection.begin(vchannel, rest[0]))
        case "commit" | "rollback":
            collection.append(vchannel, collection.end(vchannel, rest[0], commit=kind == "commit"))
        case "drop_partition":
            collection.append(vchannel, builders.drop_partition(partition_id=rest[0], **place))
        case "create_partition":
            name = {number: name for name, number in collection.partitions.items()}[rest[0]]
            collection.append(vchannel, builders.create_partition(name, partition_id=rest[0], **place))
        case "manual_flush":
            collection.append(vchannel, builders.manual_flush(**place))
        case _:
            collection.changed.add(vchannel)
            collection.append(vchannel, builders.schema_change([AddField(ADDED)], schema_version=2, **place))


def play(
    collection: Collection,
    operations: Iterable[tuple[Any, ...]],
    *,
    flushed: Callable[[int], None] = lambda number: None,
) -> None:
    """Do all `operations`; call `flushed` after each flush with its number, from 1 on."""
    maker, flushes = collection.maker, 0
    for number, operation in enumerate(operations):
        if operation[0] == "wal_commit":
            maker.commit()
        elif operation[0] == "flush":
            flush_to_end(maker.settings, up_to_tick=maker.tick_at(operation[1]))
            flushes += 1
            flushed(flushes)
        else:
            do(collection, operation, number)


def _rows(collection: Collection, vchannel: str, keys: list[int], number: int) -> dict[str, list[object]]:
    """Rows of `keys`, of the schema that the VChannel has, which the collection's messages are of from here on."""
    newer = vchannel in collection.changed
    collection.schema = apply_change(SCHEMA, AddField(ADDED)) if newer else SCHEMA
    collection.schema_version = 2 if newer else 1
    rows: dict[str, list[object]] = {"id": list(keys), "body": [f"{number}:{key}" for key in keys]}
    return rows | ({ADDED.name: [number] * len(keys)} if newer else {})


def visible(
    messages: Iterable[dict[str, Any]], tick: int, schemas: list[CollectionSchema], staged: Path
) -> list[tuple[Any, ...]]:
    """(key, body, extra) of the rows that one PChannel's accepted messages leave at `tick`."""
    rows: list[tuple[str, int, tuple[Any, ...]]] = []  # VChannel, partition, values
    open_txns: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def apply(message: dict[str, Any]) -> None:
        nonlocal rows
        schema = schemas[message["schema_version"] - 1]
        channel, partition = message["vchannel"], message["partition_id"]
        if message["type"] in ("INSERT", "UPSERT"):
            new = decode_rows(message["payload"], schema.arrow()).to_pylist()
            gone = {row["id"] for row in new} if message["type"] == "UPSERT" else set()
            rows = [row for row in rows if row[0] != channel or row[2][0] not in gone]
            for row in new:
                rows.append((channel, partition, (row["id"], row["body"], row.get(ADDED.name))))
        else:
            keys = set(decode_rows(message["payload"], schema.key_arrow()).column(0).to_pylist())
            rows = [row for row in rows if row[0] != channel or row[2][0] not in keys or partition not in (0, row[1])]

    for message in messages:
        if message["time_tick"] > tick:
            break
        kind = MessageType[message["type"]]
        txn = (message["vchannel"], message["txn_id"])
        if kind is MessageType.BEGIN_TXN:
            open_txns[txn] = []
        elif kind in DML:
            open_txns[txn].append(message) if message["txn_id"] else apply(message)
        elif kind in (MessageType.COMMIT_TXN, MessageType.ROLLBACK_TXN):
            for body in open_txns.pop(txn):
                if kind is MessageType.COMMIT_TXN:
                    apply(body)
        elif kind is MessageType.IMPORT:
            body = json.loads(message["payload"])
            if body["replace"]:
                rows = [row for row in rows if row[0] != message["vchannel"]]
            for file in body["files"]:
                for row in pq.read_table(staged / file["path"]).to_pylist():
                    values = (row["id"], row["body"], row.get(ADDED.name))
                    rows.append((message["vchannel"], file["partition_id"], values))
        elif kind is MessageType.DROP_PARTITION:
            rows = [row for row in rows if row[:2] != (message["vchannel"], message["partition_id"])]
    return [row[2] for row in rows]


def expected(maker: WalMaker, tick: int, base: CollectionSchema) -> Counter[tuple[Any, ...]]:
    """The rows of a maker's only collection at `tick`."""
    schemas = [base, apply_change(base, AddField(ADDED))]
    staged = maker.settings.staged_path
    return Counter(row for name in maker.pchannels for row in visible(maker.accepted[name], tick, schemas, staged))


def schema_known(maker: WalMaker, tick: int) -> bool:
    """Whether the added field is there at `tick` on any PChannel."""
    return any(
        message["type"] == "SCHEMA_CHANGE"
        and message["time_tick"] <= tick
        and parse_body(MessageType.SCHEMA_CHANGE, message["payload"])
        for name in maker.pchannels
        for message in maker.accepted[name]
    )
