"""Avro events, their schemas in a registry.

The registry is a small server of this test that answers as Confluent's API says: no real one runs here. Messages are
written by fastavro with logical types, as Confluent's converter has them.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fastavro
import pytest

from millrace.base.errors import InvalidSettings, LogUnavailable
from millrace.flows.debezium.events import Events, Rules
from millrace.flows.debezium.model import Registry
from millrace.flows.debezium.registry import SchemaRegistry, column_of
from millrace.flows.documents import Refused
from tests.flows.debezium.samples import POSTGRES_SOURCE, record

DECIMAL = {
    "type": "bytes",
    "scale": 2,
    "precision": 15,
    "connect.version": 1,
    "connect.parameters": {"scale": "2", "connect.decimal.precision": "15"},
    "connect.name": "org.apache.kafka.connect.data.Decimal",
    "logicalType": "decimal",
}
VARIABLE = {
    "type": "record",
    "name": "VariableScaleDecimal",
    "namespace": "io.debezium.data",
    "fields": [{"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}],
    "connect.version": 1,
    "connect.name": "io.debezium.data.VariableScaleDecimal",
}
ROW = {
    "type": "record",
    "name": "Value",
    "fields": [
        {"name": "id", "type": {"type": "int", "connect.default": 0}, "default": 0},
        {"name": "day", "type": {"type": "int", "connect.version": 1, "connect.name": "io.debezium.time.Date"}},
        {"name": "total", "type": ["null", DECIMAL], "default": None},
        {"name": "exact", "type": ["null", VARIABLE], "default": None},
        {"name": "note", "type": ["null", "bytes"], "default": None},
        {"name": "tags", "type": ["null", {"type": "array", "items": ["null", "string"]}], "default": None},
    ],
    "connect.name": "shop.public.orders.Value",
}
SOURCE = {
    "type": "record",
    "name": "Source",
    "namespace": "io.debezium.connector.postgresql",
    "fields": [
        {"name": "connector", "type": "string"},
        {"name": "name", "type": "string"},
        {"name": "ts_ms", "type": "long"},
        {"name": "snapshot", "type": ["null", "string"]},
        {"name": "sequence", "type": ["null", "string"]},
        {"name": "lsn", "type": ["null", "long"]},
    ],
    "connect.name": "io.debezium.connector.postgresql.Source",
}
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "namespace": "shop.public.orders",
    "fields": [
        {"name": "before", "type": ["null", ROW], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "source", "type": SOURCE},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"], "default": None},
    ],
    "connect.version": 2,
    "connect.name": "shop.public.orders.Envelope",
}
KEY = {
    "type": "record",
    "name": "Key",
    "namespace": "shop.public.orders",
    "fields": [{"name": "id", "type": "int"}],
    "connect.name": "shop.public.orders.Key",
}


class Server:
    """Schemas by number, and what was asked."""

    def __init__(self) -> None:
        self.schemas: dict[int, Any] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.answer: tuple[int, bytes] | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append((self.path, self.headers.get("Authorization")))
                number = int(self.path.rpartition("/")[2])
                found = server.schemas.get(number)
                status, body = 200, json.dumps({"schema": json.dumps(found)}).encode()
                if found is None:
                    status, body = 404, b'{"error_code":40403,"message":"Schema not found"}'
                status, body = server.answer or (status, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def message(self, schema: Any, value: Any) -> bytes:
        """Write `value`, and register `schema` if it is new."""
        number = next((each for each, known in self.schemas.items() if known is schema), len(self.schemas) + 1)
        self.schemas[number] = schema
        body = io.BytesIO()
        fastavro.schemaless_writer(body, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
        return b"\0" + number.to_bytes(4, "big") + body.getvalue()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def _event(op: str, row: Any) -> dict[str, Any]:
    source = {name: POSTGRES_SOURCE[name] for name in ("connector", "name", "ts_ms", "snapshot", "sequence", "lsn")}
    return {"before": None, "after": row, "source": source, "op": op, "ts_ms": 1}


ORDER = {
    "id": 7,
    "day": 19_782,
    "total": Decimal("-12.30"),
    "exact": {"scale": 3, "value": b"\x01"},
    "note": b"\0\xff",
    "tags": ["a", None],
}


def test_an_event_in_avro_is_that_in_json(server: Server) -> None:
    events = Events(Rules(versions=True), SchemaRegistry(Registry(url=server.url + "/apis/ccompat/v7/")))
    key = server.message(KEY, {"id": 7})
    made = events.change(record(server.message(ENVELOPE, _event("c", ORDER)), key, offset=1))
    assert made is not None
    assert made.document == {
        "id": 7,
        "day": "2024-02-29",
        "total": -12.3,
        "exact": 0.001,
        "note": "AP8=",
        "tags": ["a", None],
    }
    assert (made.record.key, made.version) == (b"7", POSTGRES_SOURCE["lsn"])
    assert ("millrace.base64", b"note") in made.record.headers
    again = events.change(record(server.message(ENVELOPE, _event("c", ORDER)), key, offset=2))
    assert again is None, "it was sent again"
    gone = events.change(record(server.message(ENVELOPE, _event("d", None)), key, offset=3))
    assert gone is not None
    assert gone.document is None
    assert events.change(record(None, key, offset=4)) is None
    assert sorted(server.asked) == [("/apis/ccompat/v7/schemas/ids/1", None), ("/apis/ccompat/v7/schemas/ids/2", None)]


def test_an_unwrapped_row_in_avro(server: Server) -> None:
    row = {**ROW, "fields": [*ROW["fields"], {"name": "__deleted", "type": ["null", "string"]}]}  # type: ignore[misc]
    events = Events(Rules(unwrapped=True), SchemaRegistry(Registry(url=server.url)))
    key = server.message(KEY, {"id": 7})
    made = events.change(record(server.message(row, {**ORDER, "__deleted": "false"}), key))
    gone = events.change(record(server.message(row, {**ORDER, "__deleted": "true"}), key, offset=8))
    assert made is not None
    assert gone is not None
    assert (made.document or {})["day"] == "2024-02-29"
    assert (gone.document, gone.record.key) == (None, b"7")


def _refused(events: Events, value: bytes) -> str:
    with pytest.raises(Refused) as error:
        events.change(record(value, {"id": 1}))
    return error.value.kind


def test_a_message_that_is_no_avro_is_refused_alone(server: Server) -> None:
    events = Events(Rules(), SchemaRegistry(Registry(url=server.url)))
    good = server.message(ENVELOPE, _event("c", ORDER))
    assert _refused(events, good[:-3]) == "NO_AVRO"
    assert _refused(events, good + b"more") == "NO_AVRO"
    assert _refused(events, b"\0\0") == "NO_AVRO"
    assert _refused(events, b"\0" + (99).to_bytes(4, "big") + good[5:]) == "SCHEMA"
    asked = len(server.asked)
    assert _refused(events, b"\0" + (99).to_bytes(4, "big") + good[5:]) == "SCHEMA"
    assert len(server.asked) == asked, "a number that is unknown is not asked for with each record"
    server.answer = (200, json.dumps({"schemaType": "PROTOBUF", "schema": "syntax"}).encode())
    assert _refused(events, b"\0" + (98).to_bytes(4, "big")) == "SCHEMA"
    server.answer = (200, json.dumps({"schema": "no json"}).encode())
    assert _refused(events, b"\0" + (97).to_bytes(4, "big")) == "SCHEMA"
    server.answer = None
    assert events.change(record(good, {"id": 7}, offset=9)) is not None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((503, b""), LogUnavailable),
        ((429, b"{}"), LogUnavailable),
        ((401, b"{}"), InvalidSettings),
        ((404, b"<html>"), InvalidSettings),
        ((200, b"[]"), InvalidSettings),
        ((302, b""), InvalidSettings),
    ],
)
def test_trouble_of_the_registry_is_no_records_fault(server: Server, answer: tuple[int, bytes], error: type) -> None:
    server.answer = answer
    events = Events(Rules(), SchemaRegistry(Registry(url=server.url)))
    with pytest.raises(error, match="registry"):
        events.change(record(server.message(ENVELOPE, _event("c", ORDER)), {"id": 7}))
    server.answer = None
    assert events.change(record(server.message(ENVELOPE, _event("c", ORDER)), {"id": 7})) is not None


def test_a_registry_that_is_gone_may_come_back(server: Server) -> None:
    server.close()
    with pytest.raises(LogUnavailable, match="127"):
        SchemaRegistry(Registry(url=server.url)).decode(b"\0\0\0\0\1")


def test_a_user_is_told_to_the_registry(server: Server) -> None:
    declared = Registry(url=server.url, user="me", password="hush")  # type: ignore[arg-type]
    message = server.message(KEY, {"id": 7})
    assert SchemaRegistry(declared).decode(message).value == {"id": 7}
    assert server.asked[0][1] == f"Basic {base64.b64encode(b'me:hush').decode()}"


def test_schemas_that_are_no_connectors_are_refused() -> None:
    deep: Any = "int"
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    for wrong in (["int", "string"], deep, {"type": "record", "name": "R", "fields": [{"name": "r", "type": "R"}]}):
        with pytest.raises(Refused):
            column_of(wrong)
