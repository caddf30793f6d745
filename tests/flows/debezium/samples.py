"""Events as connectors write them, made after the examples in Debezium's documents and in public issues.

They have the forms of Debezium 3: the order and the names of fields, and what a connector fills in `source`.
"""

from __future__ import annotations

import json
from typing import Any

from millrace.flows.records import Record

POSTGRES_SOURCE = {
    "version": "3.5.0.Final",
    "connector": "postgresql",
    "name": "shop",
    "ts_ms": 1_559_033_904_863,
    "snapshot": "false",
    "db": "postgres",
    "sequence": '["24023119","24023128"]',
    "ts_us": 1_559_033_904_863_123,
    "ts_ns": 1_559_033_904_863_123_000,
    "schema": "public",
    "table": "customers",
    "txId": 555,
    "lsn": 24_023_128,
    "xmin": None,
}
MYSQL_SOURCE = {
    "version": "1.9.7.Final",
    "connector": "mysql",
    "name": "shop",
    "ts_ms": 1_695_277_757_000,
    "snapshot": "false",
    "db": "inventory",
    "sequence": None,
    "table": "orders",
    "server_id": 223_344,
    "gtid": None,
    "file": "binlog.000008",
    "pos": 3_693,
    "row": 0,
    "thread": 7,
    "query": None,
}
CUSTOMERS = (
    {"type": "int32", "optional": False, "default": 0, "field": "id"},
    {"type": "string", "optional": False, "field": "first_name"},
    {"type": "string", "optional": True, "field": "email"},
)
ORDERS = (
    {"type": "int64", "optional": False, "field": "number"},
    {"type": "int32", "optional": False, "name": "io.debezium.time.Date", "version": 1, "field": "day"},
    {
        "type": "bytes",
        "optional": True,
        "name": "org.apache.kafka.connect.data.Decimal",
        "version": 1,
        "parameters": {"scale": "2", "connect.decimal.precision": "15"},
        "field": "total",
    },
    {
        "type": "string",
        "optional": True,
        "name": "io.debezium.data.Enum",
        "version": 1,
        "parameters": {"allowed": "new,paid"},
        "field": "state",
    },
    {"type": "bytes", "optional": True, "field": "note"},
)


def with_schema(payload: Any, fields: tuple[dict[str, Any], ...], name: str = "shop.public.t") -> dict[str, Any]:
    """An event as the JSON converter writes it with its schema."""
    row = {"type": "struct", "fields": list(fields), "optional": True, "name": f"{name}.Value"}
    source = {"type": "struct", "fields": [], "optional": False, "name": "io.debezium.connector.Source"}
    parts = [{**row, "field": "before"}, {**row, "field": "after"}, {**source, "field": "source"}]
    parts += [{"type": "string", "optional": False, "field": "op"}]
    schema = {"type": "struct", "fields": parts, "optional": False, "name": f"{name}.Envelope", "version": 2}
    return {"schema": schema, "payload": payload}


def key_with_schema(key: dict[str, Any], fields: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    named = [each for each in fields if each["field"] in key]
    return {"schema": {"type": "struct", "fields": named, "optional": False, "name": "Key"}, "payload": key}


def event(op: str, before: Any = None, after: Any = None, source: Any = POSTGRES_SOURCE, **more: Any) -> dict[str, Any]:
    made = {"before": before, "after": after, "source": source, "op": op}
    return {**made, "ts_ms": 1_559_033_904_961, "transaction": None, **more}


def record(value: Any, key: Any = None, *, offset: int = 7, headers: Any = (), partition: int = 0) -> Record:
    """A record of the topic; None stays None, and bytes and texts are taken as they are."""

    def of(part: Any) -> bytes | None:
        if part is None or isinstance(part, bytes):
            return part
        return json.dumps(part, separators=(",", ":")).encode()

    return Record("shop.t", partition, offset, of(key), of(value), 1_700_000_000_000, headers)
