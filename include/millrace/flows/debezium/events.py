"""Debezium's events as changes: the effect of a topic's record on a row.

    change = Events(rules).change(record)      # None for no change, such as a heartbeat or a repeated event

A record is JSON with its schema (``schemas.enable``) or without, or Avro with its schema in a registry; each record
shows which. The row is the `after` of an envelope, or the value itself if the connector unwraps its events
(ExtractNewRecordState).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from millrace.flows.debezium.repeats import Repeats, Source
from millrace.flows.debezium.types import (
    UNAVAILABLE_MARKS,
    Column,
    Convert,
    converter_of,
    declared_converter,
    is_unavailable,
)
from millrace.flows.documents import Document, Refused, decoded, encoded
from millrace.flows.records import BINARY, OPERATION, Record

_PLANS: Final = 256
"""Schemas that are cached. Connectors have one for each table and each of its versions."""
_LANES: Final = 1024
_OPERATIONS: Final[Mapping[str, tuple[str, bytes]]] = {each: (OPERATION, each.encode()) for each in "crudt"}
_NOTHING: Final = (b"", b"null")
_CONTROL: Final = ("Heartbeat", "TransactionMetadataValue", "SchemaChangeValue", "Notification", "SignalValue")
"""Suffixes of the names of schemas whose records change no row."""


class Rules(NamedTuple):
    """The parts of a declaration about events, without secrets."""

    unwrapped: bool = False
    key: tuple[str, ...] = ()
    types: tuple[tuple[str, str], ...] = ()
    truncates: str = "error"
    versions: bool = False
    """Whether versions are positions of the source."""
    repeats: int = 65_536


class Change(NamedTuple):
    """The effect of a record on a row."""

    record: Record
    """The record with the row's key as text, and without a value if it removes a row, or all rows."""
    document: Document | None
    """The row after the change; None if it was deleted."""
    version: int | None
    """The position of the change in the order of the source; None unless requested."""


class AvroValue(NamedTuple):
    """A decoded Avro message."""

    number: int
    """The number of its schema."""
    column: Column
    value: Any


class Schemas(Protocol):
    """A source of Avro schemas."""

    def decode(self, message: bytes, /) -> AvroValue:
        """Return the value of a message with its schema. Raises Refused, LogUnavailable, InvalidSettings."""
        ...


class _Outer(msgspec.Struct):
    """An envelope, or a value with an envelope in its payload."""

    schema: msgspec.Raw = msgspec.Raw()
    payload: msgspec.Raw = msgspec.Raw()
    op: Any = msgspec.UNSET
    before: msgspec.Raw = msgspec.Raw()
    after: msgspec.Raw = msgspec.Raw()
    source: Source | None = None


class _Schemed(msgspec.Struct):
    """A value that may come with its schema."""

    schema: msgspec.Raw = msgspec.Raw()
    payload: msgspec.Raw = msgspec.Raw()


_outer: Final = msgspec.json.Decoder(_Outer).decode
_schemed: Final = msgspec.json.Decoder(_Schemed).decode
_column: Final = msgspec.json.Decoder(Column).decode


class _Row:
    """The conversion of rows of one schema to documents."""

    def __init__(self, column: Column | None, declared: Mapping[str, tuple[Convert, bool]], *, lax: bool) -> None:
        fields = () if column is None else column.fields
        self.names = frozenset(each.field for each in fields) if fields and not lax else None
        found: dict[str, Convert] = {}
        binary = [each.field for each in fields if each.is_binary]
        for each in fields:
            convert = converter_of(each)
            if convert is not None:
                found[each.field] = convert
        for name, (convert, is_bytes) in declared.items():
            if name not in found:
                found[name] = convert
                binary += [name] if is_bytes else []
        self.conversions = tuple(found.items())
        self.header = (BINARY, ",".join(binary).encode()) if binary else None

    def apply(self, row: Any, part: str) -> Document:
        """Convert `row` in place. Raises Refused."""
        if type(row) is not dict:
            raise Refused("NO_ROW", f"{part} is not an object: {str(row)[:80]!r}")
        if self.names is not None and row.keys() != self.names:
            missing, more = sorted(self.names - row.keys()), sorted(row.keys() - self.names)
            words = (
                f"lacks {', '.join(missing)}" if missing else f"has {', '.join(more)}, which its schema does not have"
            )
            raise Refused("SCHEMA", f"{part} {words}"[:500])
        for name, convert in self.conversions:
            value = row.get(name)
            if value is not None:
                try:
                    row[name] = convert(value)
                except (ValueError, TypeError, OverflowError) as error:
                    raise Refused("VALUE", f"{name}: {error}"[:500]) from None
        return row


class _Plan(NamedTuple):
    """The meaning of records of one schema."""

    kind: str
    """envelope, row, or control."""
    row: _Row


class Events:
    """Turns records into changes. Not thread-safe."""

    def __init__(self, rules: Rules, schemas: Schemas | None = None) -> None:
        """`schemas` has the schemas of Avro records. Raises ValueError for an unknown type."""
        self._rules, self._schemas = rules, schemas
        self._declared = {name: declared_converter(kind) for name, kind in rules.types}
        self._plain = _Row(None, self._declared, lax=True)
        self._plans: dict[bytes | int, _Plan] = {}
        self._keys: dict[bytes | int, _Row] = {}
        """By the schema's text, or its number in the registry."""
        self._repeats: dict[tuple[str, int], Repeats] = {}
        self._deleted: tuple[str, int, bytes | None] | None = None
        """Topic, partition and key of the last record, if that was a delete."""

    def change(self, record: Record) -> Change | None:
        """Return the effect of the record. Raises Refused if it cannot be determined, and as `Schemas.decode`."""
        deleted, self._deleted = self._deleted, None
        value = record.value
        if value is None:
            if deleted == (record.topic, record.partition, record.key):
                return None  # the tombstone that follows a delete, for the topic's compaction
            return self._tombstone(record)
        if value[:1] == b"\0":
            found = self._registry().decode(value)
            return self._of_avro(record, self._plan(found.number, found.column), found.value)
        if self._rules.unwrapped:
            plan, row = self._unwrapped(value)
            return None if plan.kind == "control" else self._row(record, plan.row, row)
        try:
            event = _outer(value)
            row_plan = self._plain
            if bytes(event.payload) and bytes(event.schema):
                if bytes(event.payload) == b"null":
                    return self._tombstone(record)
                plan = self._plan(bytes(event.schema))
                if plan.kind == "control":
                    return None
                row_plan = plan.row
                event = _outer(event.payload)
        except msgspec.ValidationError as error:
            raise Refused("ENVELOPE", f"not a Debezium event: {error}") from None
        if event.op is msgspec.UNSET:
            _require_control(value)
            return None
        before, after = bytes(event.before), bytes(event.after)
        return self._event(
            record,
            row_plan,
            event.op,
            event.source,
            None if before in _NOTHING else (lambda: decoded(before)),
            None if after in _NOTHING else (lambda: decoded(after)),
            any(mark in value for mark in UNAVAILABLE_MARKS),
        )

    # --- envelopes ---------------------------------------------------------------------------------------------------

    def _event(
        self,
        record: Record,
        plan: _Row,
        operation: Any,
        source: Source | None,
        before: Callable[[], Any] | None,
        after: Callable[[], Any] | None,
        has_unavailable: bool,
    ) -> Change | None:
        if operation == "m":  # a message in PostgreSQL's log that belongs to no row
            return None
        if not isinstance(operation, str) or operation not in _OPERATIONS:
            raise Refused("UNKNOWN_OP", f"op is {str(operation)[:80]!r}: expected c, u, d, r, t or m")
        if operation == "t":
            if self._is_repeat(record, source, operation):
                return None
            return self._truncation(record, source)
        if operation != "d" and after is None:
            raise Refused("NO_AFTER", f"an event of op {operation} has no after, which is the row")
        if operation == "d":
            old = plan.apply(before(), "before") if self._rules.key and before is not None else None
            key = self._key_of(old, "before") if self._rules.key else self._key(record.key)[1]
            self._deleted = (
                record.topic,
                record.partition,
                record.key,
            )  # also for a repeated event, whose tombstone is a repeat, too
            if self._is_repeat(record, source, operation):
                return None
            return self._gone(record, key, source, operation)
        assert after is not None, "checked above"
        row = after()
        old = before() if before is not None and (has_unavailable or self._rules.key or operation == "u") else None
        names, key_text = (self._rules.key, None) if self._rules.key else self._key(record.key)
        if type(old) is dict and type(row) is dict:
            _require_same_key(old, row, names)
        if has_unavailable:
            _fill_unavailable(row, old)
        row = plan.apply(row, "after")
        if self._rules.key:
            key_text = self._key_of(row, "after")
        if self._is_repeat(record, source, operation):
            return None
        headers = [*record.headers, _OPERATIONS[operation]]
        if plan.header is not None:
            headers.append(plan.header)
        made = record._replace(key=key_text, headers=headers, original=record)
        return Change(made, row, self._version(source))

    def _truncation(self, record: Record, source: Source | None) -> Change | None:
        if self._rules.truncates == "ignore":
            return None
        if self._rules.truncates == "error":
            raise Refused(
                "TRUNCATED",
                "all rows of the table were removed at once: set debezium.truncates to apply (if the topic has one"
                " partition) or ignore",
            )
        made = record._replace(key=None, value=None, headers=[*record.headers, _OPERATIONS["t"]], original=record)
        return Change(made, None, self._version(source))

    def _tombstone(self, record: Record) -> Change:
        """Return the delete of a tombstone whose event the topic's compaction removed."""
        repeats = self._repeats.get((record.topic, record.partition))
        if repeats is not None:
            repeats.forget()  # it has no place in the order of changes, and those after it must not be left out
        return self._gone(record, self._key(record.key)[1], None, "d")

    def _gone(self, record: Record, key: bytes | None, source: Source | None, operation: str) -> Change:
        if key is None:
            raise Refused(
                "NO_KEY", "a delete without a key cannot remove a row: set debezium.key to the columns of the key"
            )
        headers = [*record.headers, _OPERATIONS[operation]]
        made = record._replace(key=key, value=None, headers=headers, original=record)
        return Change(made, None, self._version(source))

    def _version(self, source: Source | None) -> int | None:
        if not self._rules.versions:
            return None
        try:
            return (source or Source()).version()
        except ValueError as error:
            raise Refused("NO_VERSION", str(error)) from None

    def _is_repeat(self, record: Record, source: Source | None, operation: str) -> bool:
        if source is None or not self._rules.repeats:
            return False
        lane = (record.topic, record.partition)
        found = self._repeats.get(lane)
        if found is None:
            if len(self._repeats) >= _LANES:
                self._repeats.clear()
            found = self._repeats[lane] = Repeats(self._rules.repeats)
        return found.is_repeat(source, operation, record.key, record.offset)

    # --- unwrapped rows ----------------------------------------------------------------------------------------------

    def _unwrapped(self, value: bytes) -> tuple[_Plan, Any]:
        if value.startswith(b'{"schema"'):
            found = _schemed(value)
            if bytes(found.payload) and bytes(found.schema).startswith(b"{"):
                return self._plan(bytes(found.schema)), decoded(bytes(found.payload))
        return _Plan("row", self._plain), decoded(value)

    def _row(self, record: Record, plan: _Row, row: Any) -> Change | None:
        if row is None:
            return self._tombstone(record)
        if any(mark in (record.value or b"") for mark in UNAVAILABLE_MARKS):
            _fill_unavailable(row, None)
        document = plan.apply(row, "the value")
        operation = document.pop("__op", None) or "u"
        if document.pop("__deleted", None) in (True, "true"):
            operation = "d"
        if operation not in _OPERATIONS:
            raise Refused("UNKNOWN_OP", f"__op is {str(operation)[:80]!r}: expected c, u, d, r or t")
        if operation == "t":
            return self._truncation(record, None)
        key = self._key_of(document, "the value") if self._rules.key else self._key(record.key)[1]
        if operation == "d":
            self._deleted = (record.topic, record.partition, record.key)
            return self._gone(record, key, None, operation)
        headers = [*record.headers, _OPERATIONS[operation]]
        if plan.header is not None:
            headers.append(plan.header)
        return Change(record._replace(key=key, headers=headers, original=record), document, None)

    # --- schemas and keys --------------------------------------------------------------------------------------------

    def _of_avro(self, record: Record, plan: _Plan, found: Any) -> Change | None:
        if plan.kind == "control":
            return None
        has_unavailable = any(mark in (record.value or b"") for mark in UNAVAILABLE_MARKS)
        if self._rules.unwrapped or plan.kind == "row":
            return self._row(record, plan.row, found)
        try:
            source = None if found.get("source") is None else msgspec.convert(found["source"], Source)
        except msgspec.ValidationError as error:
            raise Refused("ENVELOPE", f"not a Debezium event: {error}") from None
        before, after = found.get("before"), found.get("after")
        return self._event(
            record,
            plan.row,
            found.get("op"),
            source,
            None if before is None else (lambda: before),
            None if after is None else (lambda: after),
            has_unavailable,
        )

    def _plan(self, schema: bytes | int, column: Column | None = None) -> _Plan:
        found = self._plans.get(schema)
        if found is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            found = self._plans[schema] = self._planned(column or _parsed(schema))
        return found

    def _planned(self, column: Column) -> _Plan:
        fields = {each.field: each for each in column.fields}
        if (column.name or "").endswith(_CONTROL):
            return _Plan("control", self._plain)
        try:
            if "op" in fields and "after" in fields and not self._rules.unwrapped:
                return _Plan("envelope", _Row(fields["after"], self._declared, lax=False))
            return _Plan("row", _Row(column, self._declared, lax=False))
        except ValueError as error:
            raise Refused("SCHEMA", str(error)) from None

    def _key(self, key: bytes | None) -> tuple[tuple[str, ...], bytes | None]:
        """Return the names of a record's key columns, and the key as text: one value, or a JSON list of several."""
        if not key:
            return (), None
        if key[:1] == b"\0":
            found = self._registry().decode(key)
            return self._key_text(self._key_row(found.number, found.column), found.value)
        if key[:1] != b"{":
            return (), key  # from a connector whose keys are texts
        try:
            if key.startswith(b'{"schema"'):
                schemed = _schemed(key)
                if bytes(schemed.payload) and bytes(schemed.schema).startswith(b"{"):
                    row = self._key_row(bytes(schemed.schema))
                    return self._key_text(row, decoded(bytes(schemed.payload)))
            return self._key_text(self._plain, decoded(key))
        except msgspec.DecodeError as error:
            raise Refused("NO_KEY", f"the key is not JSON: {error}") from None

    def _key_row(self, schema: bytes | int, column: Column | None = None) -> _Row:
        found = self._keys.get(schema)
        if found is None:
            if len(self._keys) >= _PLANS:
                self._keys.clear()
            found = self._keys[schema] = _Row(column or _parsed(schema), self._declared, lax=True)
        return found

    def _key_text(self, row: _Row, found: Any) -> tuple[tuple[str, ...], bytes | None]:
        if found is None:
            return (), None
        if type(found) is not dict:
            return (), found.encode() if isinstance(found, str) else encoded(found)
        values = row.apply(found, "the key")
        return tuple(values), text_of(list(values.values()))

    def _key_of(self, row: Document | None, part: str) -> bytes:
        names = self._rules.key
        if row is None:
            raise Refused("NO_KEY", f"the event has no {part}, which contains the key ({', '.join(names)})")
        missing = [name for name in names if row.get(name) is None]
        if missing:
            raise Refused("NO_KEY", f"{part} has no {missing[0]}, which is part of the key")
        return text_of([row[name] for name in names])

    def _registry(self) -> Schemas:
        if self._schemas is None:
            raise Refused("NO_REGISTRY", "the record is Avro, and the source has no debezium.registry")
        return self._schemas


def text_of(values: list[Any]) -> bytes:
    """Return a key as text: a single value's text, or several values as a JSON list."""
    if len(values) == 1:
        return values[0].encode() if isinstance(values[0], str) else encoded(values[0])
    return encoded(values)


def _parsed(schema: bytes | int) -> Column:
    assert isinstance(schema, bytes), "a schema with a number comes with its columns"
    try:
        return _column(schema)
    except msgspec.DecodeError as error:
        raise Refused("SCHEMA", f"not a Kafka Connect schema: {error}"[:500]) from None


def _require_control(value: bytes) -> None:
    """Raise Refused for a record without an operation, unless it is a record that changes no row."""
    found = decoded(value)
    if type(found) is dict:
        if isinstance(found.get("payload"), dict) and "schema" in found:
            found = found["payload"]
        names = found.keys()
        heartbeat = "ts_ms" in names and len(names) == 1
        transaction = found.get("status") in ("BEGIN", "END") and "id" in names
        notification = "aggregate_type" in names and "type" in names
        if heartbeat or transaction or notification or {"ddl", "source"} <= names or {"ddl", "databaseName"} <= names:
            return
    raise Refused(
        "ENVELOPE",
        "not a Debezium event: it has no op; if the connector unwraps its events, set debezium.unwrapped to true",
    )


def _fill_unavailable(row: Any, old: Any) -> None:
    """Replace values that the database did not log by those of `old`. Raises Refused if `old` does not have them."""
    if type(row) is not dict:
        return
    for name, value in row.items():
        if is_unavailable(value):
            before = old.get(name) if type(old) is dict else None
            if before is None or is_unavailable(before):
                raise Refused(
                    "UNAVAILABLE",
                    f"{name}: the database did not log the value, which the update left as it was: run"
                    " ALTER TABLE ... REPLICA IDENTITY FULL",
                )
            row[name] = before


def _require_same_key(old: Document, row: Document, names: tuple[str, ...]) -> None:
    """Raise Refused for an event that changes the key. Debezium writes that as a delete and an insert."""
    for name in names:
        if name in old and name in row and old[name] != row[name]:
            raise Refused(
                "KEY_CHANGED",
                f"{name} was {str(old[name])[:80]!r} and is {str(row[name])[:80]!r}: a changed key is a delete and an"
                " insert",
            )


__all__ = ["AvroValue", "Change", "Events", "Rules", "Schemas", "text_of"]
