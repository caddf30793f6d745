"""Typed builders: what they write is what the chain reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest

from millrace.base.errors import InvalidArgument
from millrace.message import builders
from millrace.message.bodies import ImportFile, parse_body
from millrace.message.model import MutableMessage
from millrace.message.payload.rows import decode_rows
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.types import BEHAVIOUR, Flag, MessageType
from millrace.message.wire.decode import decode_entries
from millrace.message.wire.encode import encode_entry
from tests.message.samples import HEADER, entries

STAGED: ImportFile = {"path": "load/0.parquet", "partition_id": 1, "rows": 3, "bytes": 900, "digest": "0a" * 32}
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("carrier", "string", True)), "id")
ROWS = pa.RecordBatch.from_pylist([{"id": 1, "carrier": "UA"}, {"id": 2, "carrier": None}], schema=SCHEMA.arrow())
VCHANNEL, TERM, COLLECTION = "pc0_7v0", 3, 7

ONE_OF_EACH = [
    builders.insert(
        ROWS,
        vchannel=VCHANNEL,
        collection_id=COLLECTION,
        partition_id=1,
        schema_version=2,
        term=TERM,
        producer_id=5,
        epoch=1,
        sequence=9,
    ),
    builders.delete([1, 2, 3], schema=SCHEMA, vchannel=VCHANNEL, collection_id=COLLECTION, term=TERM, txn_id=4),
    builders.insert(ROWS, vchannel=VCHANNEL, collection_id=COLLECTION, partition_id=1, term=TERM, upsert=True),
    builders.create_collection(
        "flights",
        SCHEMA,
        vchannel=VCHANNEL,
        vchannels=[VCHANNEL, "pc1_7v1"],
        collection_id=COLLECTION,
        partitions={"JFK": 1},
        term=TERM,
    ),
    builders.drop_collection(vchannel=VCHANNEL, collection_id=COLLECTION, term=TERM),
    builders.create_partition("EWR", vchannel=VCHANNEL, collection_id=COLLECTION, partition_id=2, term=TERM),
    builders.drop_partition(vchannel=VCHANNEL, collection_id=COLLECTION, partition_id=2, term=TERM),
    builders.schema_change(
        [AddField(FieldSpec("tail", "string", True))],
        vchannel=VCHANNEL,
        collection_id=COLLECTION,
        schema_version=2,
        term=TERM,
    ),
    builders.begin_txn(4, vchannel=VCHANNEL, collection_id=COLLECTION, term=TERM, keepalive_ms=500),
    builders.commit_txn(4, vchannel=VCHANNEL, collection_id=COLLECTION, term=TERM),
    builders.rollback_txn(4, vchannel=VCHANNEL, collection_id=COLLECTION, term=TERM),
    builders.keep_alive(4, vchannel=VCHANNEL, collection_id=COLLECTION, term=TERM),
    builders.manual_flush(vchannel=VCHANNEL, collection_id=COLLECTION, term=TERM, segment_id=11),
    builders.flush_all(term=TERM),
    builders.time_tick(term=TERM, barrier_tick=99),
    builders.term_opening(term=TERM, chain_version=1, config={"segment_rows": 10}),
    builders.config({"segment_rows": 10}, term=TERM),
    builders.alter_wal(term=TERM, generation=1, log="kafka://broker:9092/millrace"),
    builders.import_files("load", [STAGED], vchannel=VCHANNEL, collection_id=COLLECTION, term=TERM, producer_id=5),
]


def test_every_type_that_may_be_appended_has_a_builder() -> None:
    built = {message.type for message in ONE_OF_EACH}
    assert built == {kind for kind, flags in BEHAVIOUR.items() if not flags & Flag.EMITTED}


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: MessageType(message.type).name)
def test_what_a_builder_makes_survives_the_wire_and_parses(message: MutableMessage) -> None:
    (row,) = decode_entries(entries([encode_entry([message])])).to_pylist()
    assert MutableMessage(**{name: row[name] for name in HEADER}) == message
    assert message.term == TERM
    kind = MessageType(message.type)
    if not BEHAVIOUR[kind] & Flag.DML:
        parse_body(kind, message.payload)


def test_an_insert_carries_its_rows_and_says_how_many() -> None:
    message = ONE_OF_EACH[0]
    assert (message.rows, message.schema_version, message.partition_id, message.sequence) == (2, 2, 1, 9)
    assert decode_rows(message.payload, SCHEMA.arrow()).equals(ROWS)


def test_a_delete_carries_the_keys_alone() -> None:
    message = ONE_OF_EACH[1]
    assert (message.rows, message.partition_id, message.txn_id) == (3, 0, 4)
    assert decode_rows(message.payload, SCHEMA.key_arrow()).column("id").to_pylist() == [1, 2, 3]
    columns = builders.delete(
        pa.array([1, 2, 3], pa.int16()), schema=SCHEMA, vchannel=VCHANNEL, collection_id=7, term=TERM, txn_id=4
    )
    assert columns == message


def delete(keys: object) -> MutableMessage:
    return builders.delete(keys, schema=SCHEMA, vchannel=VCHANNEL, collection_id=COLLECTION, term=TERM)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "build",
    [
        lambda: delete(["a"]),
        lambda: delete([1 << 63]),
        lambda: delete([None]),
        lambda: delete([]),
        lambda: builders.insert(ROWS.slice(0, 0), vchannel=VCHANNEL, collection_id=7, partition_id=1, term=TERM),
        lambda: builders.begin_txn(0, vchannel=VCHANNEL, collection_id=7, term=TERM),
        lambda: builders.begin_txn(1, vchannel=VCHANNEL, collection_id=7, term=TERM, keepalive_ms=-1),
        lambda: builders.create_partition("", vchannel=VCHANNEL, collection_id=7, partition_id=1, term=TERM),
        lambda: builders.create_collection(
            "flights", SCHEMA, vchannel="elsewhere", vchannels=[VCHANNEL], collection_id=7, partitions={}, term=TERM
        ),
        lambda: builders.schema_change(
            [AddField(FieldSpec("x", "int64", False))], vchannel=VCHANNEL, collection_id=7, schema_version=2, term=TERM
        ),
        lambda: builders.import_files("load", [], vchannel=VCHANNEL, collection_id=7, term=TERM),
        lambda: builders.import_files(
            "load", [{**STAGED, "path": "../x"}], vchannel=VCHANNEL, collection_id=7, term=TERM
        ),
        lambda: builders.config({"a": "b"}, term=TERM),  # type: ignore[dict-item]
    ],
)
def test_what_the_chain_would_find_malformed_is_refused_before_it_is_appended(
    build: Callable[[], MutableMessage],
) -> None:
    with pytest.raises(InvalidArgument):
        build()


def test_a_changed_copy_leaves_the_message_as_it_was() -> None:
    message = builders.flush_all(term=1)
    assert replace(message, term=2).term == 2
    assert message.term == 1
