"""Documents as Debezium's events: key, envelope and schemas of the rows of a collection.

    writer = EventWriter(declared, lambda: columns_of(settings, declared.collection))
    found, failures = writer.encoded(documents)

A document becomes an event whose key is the row's primary key as an object. `before` is null, since a collection's
changes do not have it; of a delete it is the key. A tombstone may follow a delete.

Without schemas, values are those of the document: times in ISO 8601, decimals as text, bytes in base64. With schemas,
they have the types that Debezium gives them (docs/capture.md has the table).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, localcontext
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from millrace.base.errors import SinkRefused
from millrace.base.package import VERSION
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import read_collection
from millrace.flows.debezium.model import DebeziumEvents
from millrace.flows.documents import Digits, decoded, encoded
from millrace.flows.records import OPERATION, TASK_PUT, Action, Failure
from millrace.message.field_types import FieldType
from millrace.message.schema import CollectionSchema

CONNECTOR: Final = "millrace"
_STEP: Final = "debezium"
_TEXTS: Final = frozenset({"string", "uuid", "json"})
_OPERATIONS: Final = frozenset("crud")
_DAY: Final = date(1970, 1, 1)
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a moment without a zone
_MAX_DIGITS: Final = 76

Convert: TypeAlias = Callable[[Any], Any]
Schema: TypeAlias = dict[str, Any]

_SCALARS: Final[Mapping[str, Schema]] = {
    "bool": {"type": "boolean"},
    "int8": {"type": "int8"},
    "int16": {"type": "int16"},
    "int32": {"type": "int32"},
    "int64": {"type": "int64"},
    "float32": {"type": "float"},
    "float64": {"type": "double"},
    "string": {"type": "string"},
    "binary": {"type": "bytes"},
    "date": {"type": "int32", "name": "io.debezium.time.Date", "version": 1},
    "timestamp": {"type": "string", "name": "io.debezium.time.ZonedTimestamp", "version": 1},
    "timestamp_ntz": {"type": "int64", "name": "io.debezium.time.MicroTimestamp", "version": 1},
    "uuid": {"type": "string", "name": "io.debezium.data.Uuid", "version": 1},
    "json": {"type": "string", "name": "io.debezium.data.Json", "version": 1},
}
_SOURCE: Final[Sequence[Schema]] = (
    {"type": "string", "optional": False, "field": "version"},
    {"type": "string", "optional": False, "field": "connector"},
    {"type": "string", "optional": False, "field": "name"},
    {"type": "int64", "optional": False, "field": "ts_ms"},
    {"type": "string", "optional": True, "field": "snapshot"},
    {"type": "string", "optional": False, "field": "db"},
    {"type": "string", "optional": False, "field": "table"},
    {"type": "int64", "optional": False, "field": "tick"},
)


class _Form(NamedTuple):
    """The form of rows of one schema."""

    key_names: tuple[str, ...]
    key_kinds: tuple[str, ...]
    names: frozenset[str]
    required: frozenset[str]
    conversions: tuple[tuple[str, Convert], ...]
    key_schema: bytes
    value_schema: bytes


class EventWriter:
    """Turns the documents of one flow into events. Not thread-safe."""

    def __init__(
        self,
        declared: DebeziumEvents,
        columns: Callable[[], CollectionSchema],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`columns` returns the collection's present columns (:func:`columns_of`)."""
        self._declared, self._columns, self._clock = declared, columns, clock
        self._schema: CollectionSchema | None = None
        self._form: _Form | None = None
        quoted = [encoded(each).decode() for each in (VERSION, CONNECTOR, declared.name or CONNECTOR)]
        names = '"version":{},"connector":{},"name":{}'.format(*quoted)
        place = f'"db":"{CONNECTOR}","table":{encoded(declared.collection).decode()}'
        self._source = f'{{{names},{place},"snapshot":'.encode()

    def open(self) -> None:
        """Read the columns again. Raises the errors of reading them."""
        found = self._columns()
        if found != self._schema:
            self._schema, self._form = found, _form_of(found, self._declared)

    def encoded(self, documents: Iterable[Action]) -> tuple[list[Action], list[Failure]]:
        """Return the messages of `documents` in order, and a failure for each one that is not a row of the collection.

        A message is an action whose id is its key, and whose body is its value (None for a tombstone). Raises as
        `open`.
        """
        self.open()
        assert self._form is not None, "opened"
        now = b"%d" % int(self._clock() * 1000)
        made: list[Action] = []
        failures: list[Failure] = []
        for each in documents:
            try:
                made += self._event(each, self._form, now)
            except (ValueError, TypeError, ArithmeticError, msgspec.MsgspecError, RecursionError) as error:
                failures.append(Failure(each.record, TASK_PUT, _STEP, "ROW", str(error)[:500]))
        return made, failures

    def _event(self, action: Action, form: _Form, now: bytes) -> list[Action]:
        values = _key_values(action.id, form)
        key = dict(zip(form.key_names, values, strict=True))
        operation = _operation(action, self._declared.upserts)
        after = b"null" if action.body is None else action.body
        schemas = self._declared.schemas
        if schemas:
            key = _converted(key, form)
            if action.body is not None:
                after = encoded(_converted(_row(action.body, form), form))
        key_text = encoded(key)
        before = b"null"
        if action.body is None:
            before = encoded({**dict.fromkeys(sorted(form.names)), **key}) if schemas else key_text
        source = b'%b%b,"ts_ms":%d,"tick":%d}' % (
            self._source,
            b'"true"' if operation == b"r" else b'"false"',
            action.record.timestamp,
            action.record.offset,
        )
        value = b'{"before":%b,"after":%b,"source":%b,"op":"%b","ts_ms":%b,"transaction":null}' % (
            before,
            after,
            source,
            operation,
            now,
        )
        if schemas:
            value = b'{"schema":%b,"payload":%b}' % (form.value_schema, value)
            key_text = b'{"schema":%b,"payload":%b}' % (form.key_schema, key_text)
        name = key_text.decode()
        found = [action._replace(id=name, body=value)]
        if action.body is None and self._declared.tombstones:
            found.append(action._replace(id=name))
        return found


def columns_of(settings: Settings, collection: str) -> CollectionSchema:
    """Return the columns of `collection`. Raises SinkRefused if there is no such collection."""
    found = read_collection(settings.data_dir, collection)
    if found is None or found.state != "active":
        raise SinkRefused(
            f"there is no collection {collection!r}, whose columns the events have: create it, or correct"
            " debezium.collection"
        )
    return found.schema


def _operation(action: Action, upserts: str) -> bytes:
    if action.body is None:
        return b"d"
    operation = next((value or b"" for name, value in reversed(action.record.headers) if name == OPERATION), b"")
    found = operation.decode() if operation.decode(errors="replace") in _OPERATIONS - {"d"} else "u"
    return (upserts if found == "u" else found).encode()


def _key_values(name: str, form: _Form) -> list[Any]:
    """Return the values of an id: a single column's text or JSON value, or a JSON list of several.

    Raises ValueError.
    """
    if len(form.key_names) == 1:
        kind = form.key_kinds[0]
        written = kind not in _TEXTS and (kind.startswith(("int", "float", "bool")) or name.startswith('"'))
        return [decoded(name.encode()) if written else name]
    values = decoded(name.encode())
    if not isinstance(values, list) or len(values) != len(form.key_names):
        raise ValueError(f"the key must be a JSON list of {', '.join(form.key_names)}, not {name[:80]!r}")
    return values


def _row(body: bytes, form: _Form) -> dict[str, Any]:
    row = decoded(body)
    more = row.keys() - form.names
    if more:
        raise ValueError(f"the collection has no column {sorted(more)[0]!r}")
    missing = [name for name in form.required if row.get(name) is None]
    if missing:
        raise ValueError(f"the document has no {sorted(missing)[0]!r}, which is never null")
    for name in form.names - row.keys():
        row[name] = None
    found: dict[str, Any] = row
    return found


def _converted(row: dict[str, Any], form: _Form) -> dict[str, Any]:
    for name, convert in form.conversions:
        value = row.get(name)
        if value is not None:
            try:
                row[name] = convert(value)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise ValueError(f"{name}: {str(value)[:80]!r} is not a value of its type: {error}") from None
    return row


def _form_of(schema: CollectionSchema, declared: DebeziumEvents) -> _Form:
    keys = schema.key_names
    types = {field.name: field.parsed_type for field in schema.fields}
    conversions = [(name, found) for name, kind in types.items() if (found := _converter(kind)) is not None]
    nullable = {field.name: field.nullable and field.name not in keys for field in schema.fields}
    columns = [{**_schema(kind), "optional": nullable[name], "field": name} for name, kind in types.items()]
    name = f"{declared.name or CONNECTOR}.{declared.collection}"
    old = [{**each, "optional": each["field"] not in keys} for each in columns]
    parts: list[Schema] = [
        {"type": "struct", "fields": old, "optional": True, "name": f"{name}.Before", "field": "before"},
        {"type": "struct", "fields": columns, "optional": True, "name": f"{name}.Value", "field": "after"},
        {
            "type": "struct",
            "fields": list(_SOURCE),
            "optional": False,
            "name": "io.millrace.connector.Source",
            "field": "source",
        },
        {"type": "string", "optional": False, "field": "op"},
        {"type": "int64", "optional": True, "field": "ts_ms"},
        {"type": "struct", "fields": [], "optional": True, "name": "event.block", "field": "transaction"},
    ]
    envelope = {"type": "struct", "fields": parts, "optional": False, "name": f"{name}.Envelope", "version": 2}
    by_name = {each["field"]: each for each in columns}
    key = {"type": "struct", "fields": [by_name[each] for each in keys], "optional": False, "name": f"{name}.Key"}
    return _Form(
        key_names=tuple(keys),
        key_kinds=tuple(types[each].kind for each in keys),
        names=frozenset(types),
        required=frozenset(name for name, null in nullable.items() if not null),
        conversions=tuple(conversions),
        key_schema=msgspec.json.encode(key),
        value_schema=msgspec.json.encode(envelope),
    )


def _schema(kind: FieldType) -> Schema:
    """Return the schema of a type in the form of Connect's JSON converter."""
    match kind.kind:
        case "decimal":
            parameters = {"scale": str(kind.scale), "connect.decimal.precision": str(kind.precision)}
            name = "org.apache.kafka.connect.data.Decimal"
            return {"type": "bytes", "name": name, "version": 1, "parameters": parameters}
        case "list":
            return {"type": "array", "items": {**_schema(kind.children[0]), "optional": True}}
        case "map":
            keys, values = (_schema(each) for each in kind.children)
            return {"type": "map", "keys": {**keys, "optional": False}, "values": {**values, "optional": True}}
        case "struct":
            fields = [
                {**_schema(each), "optional": True, "field": name}
                for name, each in zip(kind.names, kind.children, strict=True)
            ]
            return {"type": "struct", "fields": fields}
        case _:
            return dict(_SCALARS[kind.kind])


def _converter(kind: FieldType) -> Convert | None:
    """Return a function that converts a document's value to the schema's type; None if it has that type already."""
    match kind.kind:
        case "date":
            return lambda value: (date.fromisoformat(value) - _DAY).days
        case "timestamp_ntz":
            return _micros
        case "decimal":
            return lambda value: _unscaled(value, kind.scale)
        case "list":
            inner = _converter(kind.children[0])
            return None if inner is None else _of_list(inner)
        case "map":
            return _of_map(_converter(kind.children[0]), _converter(kind.children[1]))
        case "struct":
            parts = [
                (name, found)
                for name, each in zip(kind.names, kind.children, strict=True)
                if (found := _converter(each)) is not None
            ]
            return _of_struct(parts) if parts else None
        case _:
            return None


def _micros(value: Any) -> int:
    moment = datetime.fromisoformat(value)
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC).replace(tzinfo=None)
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _unscaled(value: Any, scale: int) -> str:
    """Return a decimal in Connect's form: its digits as a whole number, in bytes, in base64. Raises ValueError."""
    text = value.text if isinstance(value, Digits) else str(value)
    with localcontext() as context:
        context.prec = _MAX_DIGITS
        scaled = Decimal(text).scaleb(scale)
        if scaled.adjusted() > _MAX_DIGITS:
            raise ValueError(f"more than {_MAX_DIGITS} digits")
        whole = int(scaled)
        if whole != scaled:
            raise ValueError(f"more than {scale} digits after the point")
    return base64.b64encode(whole.to_bytes(whole.bit_length() // 8 + 1, "big", signed=True)).decode()


def _of_list(convert: Convert) -> Convert:
    return lambda value: [None if each is None else convert(each) for each in value]


def _of_map(keys: Convert | None, values: Convert | None) -> Convert:
    """Return a converter of maps to Connect's JSON: an object if all keys are texts, else a list of pairs."""

    def convert(value: Any) -> Any:
        pairs = list(value.items()) if isinstance(value, dict) else [tuple(each) for each in value]
        done = [
            (keys(key) if keys is not None else key, values(each) if values is not None and each is not None else each)
            for key, each in pairs
        ]
        return dict(done) if all(isinstance(key, str) for key, _ in done) else [list(each) for each in done]

    return convert


def _of_struct(parts: Sequence[tuple[str, Convert]]) -> Convert:
    def convert(value: Any) -> Any:
        return {**value, **{name: made(value[name]) for name, made in parts if value.get(name) is not None}}

    return convert
