"""Makes the test vectors of the wire form: ``python -m tests.message.vectors > docs/wire-form-vectors.json``.

Each vector of `entries` is a log entry in hex and what it decodes to; `payloads` are record batches in hex with
their schema and rows; `keys` and `encoded_keys` are primary keys with their hash. Run it with `include` on
PYTHONPATH, from the root of the tree.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from millrace.base.errors import EntryTooLarge
from millrace.message import builders
from millrace.message.bodies import encode_body
from millrace.message.field_types import parse_type
from millrace.message.keys import KEY_HASH_VERSION, encode_keys, key_hash
from millrace.message.model import MutableMessage
from millrace.message.payload.rows import encode_rows
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.types import BEHAVIOUR
from millrace.message.wire.decode import decode_entries
from millrace.message.wire.encode import encode_entry
from millrace.message.wire.layout import COLUMNS, VERSIONS
from millrace.message.wire.stamp import stamp_entries
from millrace.rpc.wire import NotAccepted, failure_to_bytes
from tests.message.samples import HEADER, entries
from tests.message.wire.test_hostile import WRONG

SCHEMA = CollectionSchema(
    (FieldSpec("id", "int64", False), FieldSpec("carrier", "string", True), FieldSpec("delay", "float64", True)), "id"
)
ROWS: list[dict[str, Any]] = [
    {"id": 1, "carrier": "UA", "delay": 2.0},
    {"id": -2, "carrier": None, "delay": None},
    {"id": 3, "carrier": "é", "delay": -4.5},
]
KEYS: list[int | str] = [0, 1, -1, (1 << 63) - 1, -(1 << 63), "", "a", "foobar", "é", "N14228", "x" * 300]
ENCODED: list[tuple[dict[str, str], list[Any]]] = [
    ({"symbol": "string", "day": "date"}, ["ACME", "2026-11-24"]),
    ({"symbol": "string", "day": "date"}, ["A\0B", "1969-12-31"]),
    ({"a": "string", "b": "string"}, ["", ""]),
    ({"a": "string", "b": "string"}, ["é", "x"]),
    ({"id": "int64", "part": "int8"}, [-1, 127]),
    ({"id": "int32"}, [7]),
    ({"id": "uuid", "part": "int16"}, ["9f1c0ab2-5a04-4f4f-9e0e-0a1b2c3d4e5f", 0]),
    ({"at": "timestamp"}, ["2026-11-24T01:02:03.000004Z"]),
    ({"price": "decimal(10,2)", "id": "int64"}, ["-1.50", 3]),
    ({"price": "decimal(38,0)"}, ["99999999999999999999999999999999999999"]),
]
"""Keys with the types of their fields, as JSON has their values."""
LONGEST_WRONG = 1024


def good_entries() -> dict[str, list[MutableMessage]]:
    """Messages of each good vector."""
    insert = builders.insert(
        pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA.arrow()),
        vchannel="pc0_7v0",
        collection_id=7,
        partition_id=1,
        term=1,
        producer_id=9,
        sequence=41,
    )
    return {
        "one TimeTick": [builders.time_tick(term=1)],
        "one Insert of three rows": [insert],
        "one Upsert": [replace(insert, type=404, sequence=42)],
        "a producer's run: ramp in sequence": [
            replace(insert, sequence=41 + place, payload=b"p%d" % place) for place in range(4)
        ],
        "arrays, two VChannels, payloads of other lengths": [
            MutableMessage(type=400, vchannel="pc0_7v1", term=2, collection_id=7, rows=5, payload=b"abc"),
            MutableMessage(type=401, vchannel="pc0_7v0", term=2, collection_id=7, rows=1, barrier_tick=1 << 60),
            MutableMessage(type=1308, vchannel="pc0_7v1", term=2, collection_id=7, txn_id=77, epoch=3),
        ],
        "many messages without bodies: columns in full to reach 16 bytes a message": [builders.time_tick(term=1)] * 12,
        "greatest values": [
            MutableMessage(
                type=65535,
                vchannel="v" * 255,
                epoch=(1 << 31) - 1,
                schema_version=(1 << 31) - 1,
                **dict.fromkeys(("term", "collection_id", "partition_id", "rows", "txn_id"), (1 << 63) - 1),
                **dict.fromkeys(("producer_id", "sequence", "barrier_tick"), (1 << 63) - 1),
            )
        ],
        "bodies: CreateCollection": [
            builders.create_collection(
                "flights",
                SCHEMA,
                vchannel="pc0_7v0",
                vchannels=["pc0_7v0", "pc1_7v1"],
                collection_id=7,
                partitions={"JFK": 1},
                term=1,
            )
        ],
        "bodies: Import": [
            builders.import_files(
                "flights of May",
                [{"path": "may/000000.parquet", "partition_id": 1, "rows": 3, "bytes": 999, "digest": "0a" * 32}],
                vchannel="pc0_7v0",
                collection_id=7,
                term=1,
                replace=True,
            )
        ],
        "bodies: TermOpening and Config": [
            builders.term_opening(term=2, chain_version=1, config={"segment_rows": 1000}),
            builders.config({"segment_rows": 2000}, term=2),
        ],
    }


def decoded(value: bytes) -> list[dict[str, Any]]:
    """The messages of an entry as the vectors state them: payloads in hex."""
    rows = decode_entries(entries([value])).to_pylist()
    return [{name: row[name].hex() if name == "payload" else row[name] for name in HEADER} for row in rows]


FAILURES: Final = [
    (NotAccepted(), 3, None),
    (
        EntryTooLarge("an entry has at most 16 bytes"),
        2,
        {"code": "ENTRY_TOO_LARGE", "message": "an entry has at most 16 bytes", "attributes": {}},
    ),
]


def key_of(types: dict[str, str], values: list[Any]) -> pa.RecordBatch:
    """A key as a row, of its values as JSON has them."""
    arrays = [
        pa.array([value]).cast(parse_type(kind).arrow) for kind, value in zip(types.values(), values, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=list(types))


def encoded_key(types: dict[str, str], values: list[Any]) -> dict[str, Any]:
    (data,) = encode_keys(key_of(types, values).columns).to_pylist()
    hashed = {"hash": f"{key_hash(data):016x}", "index_of_7": key_hash(data) % 7}
    return {"types": list(types.values()), "key": values, "hex": data.hex(), **hashed}


def vectors() -> dict[str, Any]:
    """The whole file."""
    values = {name: encode_entry(messages) for name, messages in good_entries().items()}
    insert = good_entries()["one Insert of three rows"]
    stamped = {
        "an asserted stamp": ("etl", encode_entry(insert, principal="etl")),
        "a server's stamp, which replaces it": (
            "é.writer",
            stamp_entries(pa.array([encode_entry(insert, principal="etl")], pa.large_binary()), "é.writer")[0].as_py(),
        ),
    }
    batch = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA.arrow())
    return {
        "versions": list(VERSIONS),
        "columns": [column.name for column in COLUMNS],
        "entries": [{"name": name, "hex": value.hex(), "messages": decoded(value)} for name, value in values.items()],
        "stamped": [
            {"name": name, "hex": value.hex(), "principal": principal, "messages": decoded(value)}
            for name, (principal, value) in stamped.items()
        ],
        "malformed": [
            {"name": name, "hex": value.hex()} for name, (value, _) in WRONG.items() if len(value) <= LONGEST_WRONG
        ],
        "payloads": [{"schema": SCHEMA.to_json(), "rows": ROWS, "hex": encode_rows(batch).hex()}],
        "bodies": [{"value": {"b": 1, "a": "é"}, "hex": encode_body({"b": 1, "a": "é"}).hex()}],
        "types": {kind.name: int(kind) for kind in sorted(BEHAVIOUR)},
        "frames": [
            {"hex": failure_to_bytes(error).hex(), "status": status, "error": said} for error, status, said in FAILURES
        ],
        "key_hash_version": KEY_HASH_VERSION,
        "encoded_keys": [encoded_key(types, values) for types, values in ENCODED],
        "keys": [{"key": key, "hash": f"{key_hash(key):016x}", "index_of_7": key_hash(key) % 7} for key in KEYS],
    }


def text() -> str:
    """The file's text."""
    return json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
