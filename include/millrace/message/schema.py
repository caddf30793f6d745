"""A collection's schema: its fields, its primary key, and the Arrow types they travel in.

Promises: a :class:`CollectionSchema` that exists is valid (both constructors check everything, with typed errors); equal
schemas have equal JSON; the Arrow form is the one type each field has everywhere (payloads, tables, reads). What a schema
change may do to one is the chain's affair (docs/chain.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self, cast

import pyarrow as pa

from millrace.base.errors import InvalidArgument, Malformed

MAX_FIELDS: Final = 1_000
MAX_NAME_CHARACTERS: Final = 128

SCALAR_TYPES: Final[dict[str, pa.DataType]] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.utf8(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
"""Scalar field types by name, each with its one Arrow type."""

TYPES: Final[dict[str, pa.DataType]] = SCALAR_TYPES | {
    f"list<{name}>": pa.list_(pa.field("item", arrow, nullable=True)) for name, arrow in SCALAR_TYPES.items()
}
"""All field types by name: the scalars, and a list of each."""

KEY_TYPES: Final = frozenset({"int64", "string"})
EVENT_TIME_TYPES: Final = frozenset({"timestamp", "date"})

_NAMES: Final[dict[pa.DataType, str]] = {arrow: name for name, arrow in TYPES.items()}


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field: a name, a type of :data:`TYPES` and whether it may be null. Raises InvalidArgument for anything else."""

    name: str
    type: str
    nullable: bool

    def __post_init__(self) -> None:
        # Held as objects: callers without a type checker pass anything.
        name, kind, nullable = (cast(object, value) for value in (self.name, self.type, self.nullable))
        if not isinstance(name, str) or not name:
            raise InvalidArgument("a field needs a non-empty name")
        if len(self.name) > MAX_NAME_CHARACTERS:
            raise InvalidArgument(f"a field's name has at most {MAX_NAME_CHARACTERS} characters, not {len(self.name)}")
        if self.name.startswith("_"):
            raise InvalidArgument(f"field {self.name!r}: a leading underscore is reserved for Millrace's own columns")
        if not self.name.isprintable():
            # Also refuses lone surrogates, which no UTF-8 column name could carry.
            raise InvalidArgument(f"field {self.name!r}: a name has printable characters only")
        if not isinstance(kind, str) or kind not in TYPES:
            raise InvalidArgument(f"field {self.name!r}: unknown type {self.type!r}; one of {', '.join(TYPES)}")
        if not isinstance(nullable, bool):
            raise InvalidArgument(f"field {self.name!r}: nullable is true or false, not {self.nullable!r}")

    def arrow(self) -> pa.Field:
        """The field as Arrow has it."""
        return pa.field(self.name, TYPES[self.type], nullable=self.nullable)

    def to_json(self) -> dict[str, object]:
        """``{"name", "type", "nullable"}``, as the bodies of DDL messages carry it."""
        return {"name": self.name, "type": self.type, "nullable": self.nullable}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Inverse of :meth:`to_json`. Raises Malformed for another shape, InvalidArgument for values that cannot be."""
        if not isinstance(value, Mapping) or set(value) != {"name", "type", "nullable"}:
            raise Malformed("a field is an object with name, type and nullable")
        name, kind, nullable = value["name"], value["type"], value["nullable"]
        if not isinstance(name, str) or not isinstance(kind, str) or not isinstance(nullable, bool):
            raise Malformed("a field's name and type are strings, its nullable a boolean")
        return cls(name, kind, nullable)

    @classmethod
    def from_arrow(cls, field: pa.Field) -> Self:
        """The field of an Arrow field; large, view and dictionary strings count as string, any timestamp with a zone as timestamp."""
        return cls(field.name, _type_name(field.name, field.type), field.nullable)


@dataclass(frozen=True)
class CollectionSchema:
    """Fields in order, the primary key's name, and the event time's where there is one. Raises InvalidArgument otherwise."""

    fields: tuple[FieldSpec, ...]
    primary_key: str
    event_time: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        if not all(isinstance(field, FieldSpec) for field in self.fields):
            raise InvalidArgument("the fields of a schema are FieldSpecs")
        if not 1 <= len(self.fields) <= MAX_FIELDS:
            raise InvalidArgument(f"a schema has 1 to {MAX_FIELDS} fields, not {len(self.fields)}")
        seen: set[str] = set()
        for field in self.fields:
            folded = field.name.casefold()
            if folded in seen:
                raise InvalidArgument(f"field {field.name!r} stands twice (names differ by more than case)")
            seen.add(folded)
        key = self._named(self.primary_key)
        if key is None:
            raise InvalidArgument(f"the primary key {self.primary_key!r} is no field of the schema")
        if key.type not in KEY_TYPES or key.nullable:
            raise InvalidArgument(f"the primary key {key.name!r} must be int64 or string and not nullable")
        if self.event_time is not None:
            event = self._named(self.event_time)
            if event is None or event.type not in EVENT_TIME_TYPES:
                raise InvalidArgument(
                    f"the event time {self.event_time!r} must be a timestamp or date field of the schema"
                )

    def _named(self, name: object) -> FieldSpec | None:
        return next((field for field in self.fields if field.name == name), None)

    @property
    def key_field(self) -> FieldSpec:
        """The primary key's field."""
        return self.fields[self.key_index]

    @cached_property
    def key_index(self) -> int:
        """The primary key's place among the fields."""
        return next(index for index, field in enumerate(self.fields) if field.name == self.primary_key)

    def to_json(self) -> dict[str, object]:
        """The JSON object that CREATE_COLLECTION carries; equal schemas give equal objects."""
        return {
            "fields": [field.to_json() for field in self.fields],
            "primary_key": self.primary_key,
            "event_time": self.event_time,
        }

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Inverse of :meth:`to_json` (``event_time`` may be absent). Raises Malformed or InvalidArgument."""
        if not isinstance(value, Mapping) or not {"fields", "primary_key"} <= set(value) <= {
            "fields",
            "primary_key",
            "event_time",
        }:
            raise Malformed("a schema is an object with fields, primary_key and, perhaps, event_time")
        fields, key, event = value["fields"], value["primary_key"], value.get("event_time")
        if not isinstance(fields, list):
            raise Malformed("a schema's fields are a list")
        if len(fields) > MAX_FIELDS:
            raise InvalidArgument(f"a schema has 1 to {MAX_FIELDS} fields, not {len(fields)}")
        if not isinstance(key, str) or not (event is None or isinstance(event, str)):
            raise Malformed("a schema's primary_key is a string, its event_time a string or null")
        return cls(tuple(FieldSpec.from_json(field) for field in fields), key, event)

    def arrow(self) -> pa.Schema:
        """The Arrow schema of an INSERT's rows."""
        return self._arrow

    def key_arrow(self) -> pa.Schema:
        """The Arrow schema of a DELETE's rows: the primary key alone."""
        return self._key_arrow

    @cached_property
    def _arrow(self) -> pa.Schema:
        return pa.schema([field.arrow() for field in self.fields])

    @cached_property
    def _key_arrow(self) -> pa.Schema:
        return pa.schema([self.key_field.arrow()])

    def with_field(self, field: FieldSpec) -> CollectionSchema:
        """This schema with `field` behind the others. Raises InvalidArgument where it does not fit."""
        return replace(self, fields=(*self.fields, field))

    @classmethod
    def from_arrow(cls, schema: pa.Schema, *, primary_key: str, event_time: str | None = None) -> Self:
        """The schema of Arrow columns. The primary key becomes not nullable; raises InvalidArgument for types without a place."""
        fields = [FieldSpec.from_arrow(field) for field in schema]
        return cls(_with_key(fields, primary_key), primary_key, event_time)


def _with_key(fields: Iterable[FieldSpec], primary_key: str) -> tuple[FieldSpec, ...]:
    return tuple(replace(field, nullable=False) if field.name == primary_key else field for field in fields)


def _type_name(name: str, arrow: pa.DataType) -> str:
    if pa.types.is_dictionary(arrow):
        arrow = arrow.value_type
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_list_view(arrow):
        inner = _type_name(name, arrow.value_type)
        if inner in SCALAR_TYPES:
            return f"list<{inner}>"
    if pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow):
        return "string"
    if pa.types.is_large_binary(arrow) or pa.types.is_binary_view(arrow):
        return "binary"
    if pa.types.is_timestamp(arrow) and arrow.tz is not None:
        return "timestamp"
    if arrow in _NAMES:
        return _NAMES[arrow]
    raise InvalidArgument(f"field {name!r}: Arrow type {arrow} has no field type; cast it to one of {', '.join(TYPES)}")
