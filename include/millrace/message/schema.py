"""A collection's schema: its fields, its primary key, and their Arrow types.

A :class:`CollectionSchema` that exists is valid: both constructors check everything, with typed errors. Equal schemas
have equal JSON. The Arrow form is the one type of each field in payloads and reads. The columns of the Delta tables
that hold a field's values are part of the schema if they are not just its name
(:mod:`millrace.message.stored_columns`). :mod:`millrace.message.schema_changes` changes a schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast

import pyarrow as pa

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.field_types import MAX_LEAVES, TYPE_FORMS, FieldType, check_name, parse_type, type_of_arrow
from millrace.message.nested_names import NestedNames, struct_field_names, with_names
from millrace.message.types import ON_DUPLICATE, OnDuplicate

if TYPE_CHECKING:  # most schemas have no rules, and importing them is slow
    from millrace.message.expression.rules import CheckConstraint, UntypedExpression
    from millrace.message.expression.tree import Node

MAX_FIELDS: Final = 1_000
MAX_PARSED: Final = 4_096
"""Different schemas that are kept for their next use."""

MAX_KEY_FIELDS: Final = 16

KEY_TYPES_BEFORE_V4: Final = frozenset({"int64", "string"})
"""Types of a key in chains before version 4, which has one field."""
KEY_TYPES: Final = KEY_TYPES_BEFORE_V4 | {
    "int8",
    "int16",
    "int32",
    "date",
    "timestamp",
    "timestamp_ntz",
    "decimal",
    "uuid",
}
"""Kinds of types that a key's field may have."""
EVENT_TIME_TYPES: Final = frozenset({"timestamp", "date"})
_FIELD_KEYS: Final = {"name", "type", "nullable"}
_FIELD_RULES: Final = {"default", "computed"}


class StoredColumn(NamedTuple):
    """A column of a collection's Delta tables."""

    name: str
    type: str


_ALWAYS: Final = {"fields", "primary_key"}
_PERHAPS: Final = {"event_time", "on_duplicate", "generated_key", "checks"}
"""Optional keys of a schema's JSON."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field: a name, a type (docs/types.md) and whether it may be null. Raises InvalidArgument if one is
    invalid.
    """

    name: str
    type: str
    """The type's canonical text; other spellings are accepted and normalised."""
    nullable: bool
    columns: tuple[StoredColumn, ...] = dataclass_field(default=(), repr=False)
    """The columns that hold its values, newest last, each value in one of them. Empty: one column of its name and
    type."""
    default: Any = None
    """The value of a row without this field: a value, or ``now()`` of a date or timestamp; None: null. A tree once
    checked."""
    computed: Node | UntypedExpression | None = None
    """The expression of its value, given as text (docs/expressions.md) and typed by the schema that it becomes
    part of."""
    part_names: tuple[tuple[str, NestedNames], ...] = dataclass_field(default=(), repr=False)
    """Current names of nested parts, by column, if parts were renamed or dropped
    (:mod:`millrace.message.nested_names`)."""

    def __post_init__(self) -> None:
        # Checked at run time: callers without a type checker pass anything.
        kind, nullable = (cast(object, value) for value in (self.type, self.nullable))
        check_name(self.name, "a field")
        try:
            if not isinstance(kind, str):
                raise InvalidArgument(f"unknown type {kind!r}; one of {', '.join(TYPE_FORMS)}")
            object.__setattr__(self, "type", parse_type(kind).text)
        except InvalidArgument as error:
            raise InvalidArgument(f"field {self.name!r}: {error}") from None
        if not isinstance(nullable, bool):
            raise InvalidArgument(f"field {self.name!r}: nullable is true or false, not {self.nullable!r}")
        if self.columns == ((self.name, self.type),):
            object.__setattr__(self, "columns", ())
        if self.default is not None or self.computed is not None:
            self._check_rules()

    def _check_rules(self) -> None:
        from millrace.message.expression.rules import UntypedExpression, parse_default

        if self.default is not None and self.computed is not None:
            raise InvalidArgument(f"field {self.name!r} is computed: it has no default")
        if self.default is not None:
            object.__setattr__(self, "default", parse_default(self.default, self.name, self.parsed_type))
        computed = cast(object, self.computed)
        if isinstance(computed, str):
            object.__setattr__(self, "computed", UntypedExpression(computed))

    @property
    def stored_columns(self) -> tuple[StoredColumn, ...]:
        """The columns that hold its values, newest last; new values go to the newest."""
        return self.columns or (StoredColumn(self.name, self.type),)

    @property
    def parsed_type(self) -> FieldType:
        """The type, parsed."""
        return parse_type(self.type)

    def parsed_type_of(self, column: StoredColumn) -> FieldType:
        """Return the type of one of its columns, with its parts under their current names."""
        names = dict(self.part_names).get(column.name)
        kind = parse_type(column.type)
        return kind if names is None else with_names(kind, names)

    def arrow(self) -> pa.Field:
        """Return the Arrow field."""
        return pa.field(self.name, self.parsed_type.arrow, nullable=self.nullable)

    def to_json(self) -> dict[str, object]:
        """Return ``{"name", "type", "nullable"}``, as in the bodies of DDL messages.

        ``columns``, ``parts``, ``default`` and ``computed`` are added if set.
        """
        found: dict[str, object] = {"name": self.name, "type": self.type, "nullable": self.nullable}
        if self.default is not None or self.computed is not None:
            from millrace.message.expression.rules import expression_json

            rules = {"default": self.default, "computed": self.computed}
            found |= {name: expression_json(rule) for name, rule in rules.items() if rule is not None}
        if self.part_names:
            found["parts"] = {name: list(names) for name, names in self.part_names}
        return found | ({"columns": [list(each) for each in self.columns]} if self.columns else {})

    @classmethod
    def from_json(cls, value: object, *, declared: bool = False) -> Self:
        """Invert :meth:`to_json`.

        `declared`: the field is declared by a user, and must not name columns.
        Raises Malformed for another shape, InvalidArgument for invalid values.
        """
        perhaps = _FIELD_RULES if declared else _FIELD_RULES | {"columns", "parts"}
        if not isinstance(value, Mapping) or set(value) - perhaps != _FIELD_KEYS:
            raise Malformed("a field is an object with name, type and nullable")
        name, kind, nullable = value["name"], value["type"], value["nullable"]
        if not isinstance(name, str) or not isinstance(kind, str) or not isinstance(nullable, bool):
            raise Malformed("a field's name and type are strings, its nullable a boolean")
        columns = _columns(value.get("columns", []))
        found = cls(
            name, kind, nullable, columns, part_names=_part_names(value.get("parts", {}), columns), **_rules(value)
        )
        if found.type != kind:
            raise InvalidArgument(f"field {name!r}: the type {kind!r} is written {found.type!r}")
        return found

    @classmethod
    def from_arrow(cls, field: pa.Field) -> Self:
        """Return the field that holds an Arrow column's values
        (:func:`~millrace.message.field_types.type_of_arrow`).
        """
        return cls(field.name, type_of_arrow(field.name, field.type).text, field.nullable)


@dataclass(frozen=True)
class CollectionSchema:
    """Fields in order, the primary key and the optional event time. Raises InvalidArgument if the schema is invalid."""

    fields: tuple[FieldSpec, ...]
    primary_key: str | tuple[str, ...]
    """A name, or several in the key's order."""
    event_time: str | None = None
    on_duplicate: OnDuplicate = "keep"
    """Effect of an insert on an existing row with its key: "keep" keeps both, "replace" makes it an upsert
    (docs/chain.md)."""
    generated_key: bool = False
    """Whether producers generate the key of a row without one; the key is then one uuid field."""
    retired: tuple[StoredColumn, ...] = dataclass_field(default=(), repr=False)
    """Columns of its tables that belong to no field any more: those of dropped fields."""
    checks: tuple[CheckConstraint, ...] = ()
    """Conditions that no row may violate."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        object.__setattr__(self, "primary_key", normalize_key_names(self.primary_key))
        if self.on_duplicate not in ON_DUPLICATE:
            raise InvalidArgument(f"on_duplicate is one of {', '.join(ON_DUPLICATE)}, not {self.on_duplicate!r}")
        if not all(isinstance(field, FieldSpec) for field in self.fields):
            raise InvalidArgument("the fields of a schema are FieldSpecs")
        if not 1 <= len(self.fields) <= MAX_FIELDS:
            raise InvalidArgument(f"a schema has 1 to {MAX_FIELDS} fields, not {len(self.fields)}")
        if sum(field.parsed_type.leaf_count for field in self.fields) > MAX_LEAVES:
            raise InvalidArgument(f"a schema has at most {MAX_LEAVES} scalars in all its fields")
        seen: set[str] = set()
        for field in self.fields:
            folded = field.name.casefold()
            if folded in seen:
                raise InvalidArgument(f"field {field.name!r} appears twice (names differ by more than case)")
            seen.add(folded)
        if self.checks or any(field.computed is not None for field in self.fields):
            from millrace.message.expression.rules import bind_rules

            fields, checks = bind_rules(self.fields, self.checks)
            object.__setattr__(self, "fields", fields)
            object.__setattr__(self, "checks", checks)
        names = self.key_names
        if not 1 <= len(names) <= MAX_KEY_FIELDS or len(set(names)) < len(names):
            raise InvalidArgument(f"a primary key has 1 to {MAX_KEY_FIELDS} fields, none twice, not {names!r}")
        for name in names:
            key = self._named(name)
            if key is None:
                raise InvalidArgument(f"the primary key {name!r} is no field of the schema")
            if key.parsed_type.kind not in KEY_TYPES or key.nullable:
                raise InvalidArgument(
                    f"the primary key {name!r} must be not nullable, and an integer, string, uuid, date, timestamp or"
                    " decimal"
                )
        if self.generated_key and [field.type for field in self.key_fields] != ["uuid"]:
            raise InvalidArgument("a generated key is one field of type uuid")
        if self.event_time is not None:
            event = self._named(self.event_time)
            if event is None or event.type not in EVENT_TIME_TYPES:
                raise InvalidArgument(
                    f"the event time {self.event_time!r} must be a timestamp or date field of the schema"
                )

    def _named(self, name: object) -> FieldSpec | None:
        return next((field for field in self.fields if field.name == name), None)

    @property
    def replaces_duplicates(self) -> bool:
        """Whether an insert replaces the row with its key."""
        return self.on_duplicate == "replace"

    @cached_property
    def has_row_rules(self) -> bool:
        """Whether rows are checked beyond their types: the schema has checks or computed fields."""
        return bool(self.checks) or any(field.computed is not None for field in self.fields)

    @cached_property
    def has_fill_values(self) -> bool:
        """Whether a row without some field may still have a value in it: there are defaults or computed fields."""
        return any(field.default is not None or field.computed is not None for field in self.fields)

    @property
    def key_names(self) -> tuple[str, ...]:
        """The primary key's names, in its order; usually one."""
        return (self.primary_key,) if isinstance(self.primary_key, str) else self.primary_key

    @cached_property
    def key_fields(self) -> tuple[FieldSpec, ...]:
        """The primary key's fields, in its order."""
        by_name = {field.name: field for field in self.fields}
        return tuple(by_name[name] for name in self.key_names)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of CREATE_COLLECTION; equal schemas give equal objects."""
        return {
            "fields": [field.to_json() for field in self.fields],
            "primary_key": self.primary_key if isinstance(self.primary_key, str) else list(self.primary_key),
            "event_time": self.event_time,
            **({"on_duplicate": self.on_duplicate} if self.replaces_duplicates else {}),
            **({"generated_key": True} if self.generated_key else {}),
            **({"retired": [list(each) for each in self.retired]} if self.retired else {}),
            **({"checks": [each.to_json() for each in self.checks]} if self.checks else {}),
        }

    @classmethod
    def from_json(cls, value: object, *, declared: bool = False) -> Self:
        """Invert :meth:`to_json`; ``event_time`` may be absent.

        `declared`: the collection is declared by a user, and the schema must not name columns. Otherwise equal objects
        give one schema, since many collections have the same.
        Raises Malformed or InvalidArgument.
        """
        if declared:
            return cls._parse(value, declared=True)
        try:
            text = json.dumps(value, sort_keys=True)
        except (TypeError, ValueError):
            return cls._parse(value, declared=False)
        return cast(Self, _parsed(text))

    @classmethod
    def _parse(cls, value: object, *, declared: bool) -> Self:
        perhaps = _PERHAPS if declared else _PERHAPS | {"retired"}
        if not isinstance(value, Mapping) or not _ALWAYS <= set(value) <= _ALWAYS | perhaps:
            raise Malformed(
                "a schema is an object with fields, primary_key and, perhaps, event_time, on_duplicate, generated_key"
                " and checks"
            )
        if value.get("on_duplicate", "replace") != "replace" or value.get("generated_key", True) is not True:
            raise Malformed("a schema's on_duplicate is replace and its generated_key true, or they are left out")
        fields, key, event = value["fields"], value["primary_key"], value.get("event_time")
        if not isinstance(fields, list):
            raise Malformed("a schema's fields are a list")
        if len(fields) > MAX_FIELDS:
            raise InvalidArgument(f"a schema has 1 to {MAX_FIELDS} fields, not {len(fields)}")
        several = isinstance(key, list) and len(key) > 1 and all(isinstance(each, str) for each in key)
        if not (isinstance(key, str) or several) or not (event is None or isinstance(event, str)):
            raise Malformed("a schema's primary_key is a string or several in a list, its event_time a string or null")
        found = tuple(FieldSpec.from_json(field, declared=declared) for field in fields)
        replaces: OnDuplicate = "replace" if "on_duplicate" in value else "keep"
        key, retired = tuple(key) if several else key, _columns(value.get("retired", []))
        return cls(found, key, event, replaces, "generated_key" in value, retired, _checks(value))

    def arrow(self) -> pa.Schema:
        """Return the Arrow schema of an INSERT's rows."""
        return self._arrow

    def key_arrow(self) -> pa.Schema:
        """Return the Arrow schema of a DELETE's rows: the primary key's fields, in its order."""
        return self._key_arrow

    @cached_property
    def _arrow(self) -> pa.Schema:
        return pa.schema([field.arrow() for field in self.fields])

    @cached_property
    def _key_arrow(self) -> pa.Schema:
        return pa.schema([field.arrow() for field in self.key_fields])

    def types(self) -> frozenset[str]:
        """Return the types of its fields, as text."""
        return frozenset(field.type for field in self.fields)

    def as_declared(self) -> CollectionSchema:
        """Return this schema without stored columns, as a new collection with the same fields has it."""
        fields = tuple(replace(field, columns=(), part_names=()) for field in self.fields)
        return replace(self, fields=fields, retired=())

    @classmethod
    def from_arrow(
        cls,
        schema: pa.Schema,
        *,
        primary_key: str | Sequence[str],
        event_time: str | None = None,
        on_duplicate: OnDuplicate = "keep",
    ) -> Self:
        """Return the schema of Arrow columns, with a non-nullable primary key.

        Raises InvalidArgument for unsupported types.
        """
        fields = [FieldSpec.from_arrow(field) for field in schema]
        key = normalize_key_names(primary_key)
        return cls(with_key_not_null(fields, key), key, event_time, on_duplicate)


def _rules(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default and computed value in a field's JSON."""
    if not _FIELD_RULES & set(value):
        return {}
    from millrace.message.expression.rules import UntypedExpression

    return {name: UntypedExpression.of_json(value[name]) for name in _FIELD_RULES if name in value}


def _checks(value: Mapping[str, Any]) -> tuple[CheckConstraint, ...]:
    if "checks" not in value:
        return ()
    from millrace.message.expression.rules import CheckConstraint

    if not isinstance(value["checks"], list) or not value["checks"]:
        raise Malformed("checks are a list of one or more, or they are left out")
    return tuple(CheckConstraint.from_json(each) for each in value["checks"])


@lru_cache(maxsize=MAX_PARSED)
def _parsed(text: str) -> CollectionSchema:
    return CollectionSchema._parse(json.loads(text), declared=False)


def _columns(value: Any) -> tuple[StoredColumn, ...]:
    if not isinstance(value, list) or not all(
        isinstance(each, list) and len(each) == 2 and all(isinstance(part, str) for part in each) for each in value
    ):
        raise Malformed("columns are a list of pairs: a name and a type")
    return tuple(StoredColumn(name, parse_type(kind).text) for name, kind in value)


def _part_names(value: Any, columns: tuple[StoredColumn, ...]) -> tuple[tuple[str, NestedNames], ...]:
    kinds = dict(columns)
    if not isinstance(value, dict) or not all(
        name in kinds and isinstance(names, list) and len(names) == len(struct_field_names(parse_type(kinds[name])))
        for name, names in value.items()
    ):
        raise Malformed("parts are, by column, a name or null for each field of each struct in its type")
    return tuple(
        (name, tuple(None if each is None else check_name(each, "a struct's field") for each in names))
        for name, names in value.items()
    )


def normalize_key_names(names: str | Sequence[str]) -> str | tuple[str, ...]:
    """Return a key's names as a schema stores them: a single one as text."""
    if isinstance(names, str):
        return names
    return names[0] if len(names) == 1 else tuple(names)


def with_key_not_null(fields: Iterable[FieldSpec], primary_key: str | tuple[str, ...]) -> tuple[FieldSpec, ...]:
    """Return `fields` with those of the key not nullable."""
    names = (primary_key,) if isinstance(primary_key, str) else primary_key
    return tuple(replace(field, nullable=False) if field.name in names else field for field in fields)
