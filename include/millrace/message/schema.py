"""A collection's schema: its fields, its primary key, and the Arrow types they travel in.

Promises: a :class:`CollectionSchema` that exists is valid (both constructors check everything, with typed errors); equal
schemas have equal JSON; the Arrow form is the one type each field has in payloads and reads. In what columns of its Delta
tables a field's values stand is part of the schema where it is not just its name (:mod:`millrace.message.stored_columns`); what
changes a schema is :mod:`millrace.message.schema_changes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast

import pyarrow as pa

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.field_types import MAX_LEAVES, TYPE_FORMS, FieldType, check_name, parse_type, type_of_arrow
from millrace.message.nested_names import NestedNames, struct_field_names, with_names
from millrace.message.types import ON_DUPLICATE, OnDuplicate

if TYPE_CHECKING:  # most schemas have none of these
    from millrace.message.expression.rules import CheckConstraint, UntypedExpression
    from millrace.message.expression.tree import Node

MAX_FIELDS: Final = 1_000

MAX_KEY_FIELDS: Final = 16

KEY_TYPES_BEFORE_V4: Final = frozenset({"int64", "string"})
"""What a key has in chains before version 4, in one field."""
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
"""Kinds of types that a key's field has."""
EVENT_TIME_TYPES: Final = frozenset({"timestamp", "date"})
_FIELD_KEYS: Final = {"name", "type", "nullable"}
_FIELD_RULES: Final = {"default", "computed"}


class StoredColumn(NamedTuple):
    """A column of a collection's Delta tables."""

    name: str
    type: str


_ALWAYS: Final = {"fields", "primary_key"}
_PERHAPS: Final = {"event_time", "on_duplicate", "generated_key", "checks"}
"""Keys of a schema's JSON."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field: a name, a type (docs/types.md) and whether it may be null. Raises InvalidArgument for anything else."""

    name: str
    type: str
    """The type's canonical text; other texts of it are taken and become that one."""
    nullable: bool
    columns: tuple[StoredColumn, ...] = dataclass_field(default=(), repr=False)
    """The columns that its values stand in, each value in one of them, the newest last; empty: in one of its name and type."""
    default: Any = None
    """What a row has that says nothing of it: a value, or ``now()`` of a date or timestamp; None: null. As a tree once it is checked."""
    computed: Node | UntypedExpression | None = None
    """What its value is made of; given as text (docs/expressions.md), typed by the schema that it becomes part of."""
    part_names: tuple[tuple[str, NestedNames], ...] = dataclass_field(default=(), repr=False)
    """Of columns whose parts have other names now, or were dropped: those names (:mod:`millrace.message.nested_names`)."""

    def __post_init__(self) -> None:
        # Held as objects: callers without a type checker pass anything.
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
        """The columns that its values stand in, the newest last: there new ones go."""
        return self.columns or (StoredColumn(self.name, self.type),)

    @property
    def parsed_type(self) -> FieldType:
        """The type, parsed."""
        return parse_type(self.type)

    def parsed_type_of(self, column: StoredColumn) -> FieldType:
        """The type of one of its columns, its parts under the names that they have in the field now."""
        names = dict(self.part_names).get(column.name)
        kind = parse_type(column.type)
        return kind if names is None else with_names(kind, names)

    def arrow(self) -> pa.Field:
        """The field as Arrow has it."""
        return pa.field(self.name, self.parsed_type.arrow, nullable=self.nullable)

    def to_json(self) -> dict[str, object]:
        """``{"name", "type", "nullable"}``, as the bodies of DDL messages carry it, and what else it has of ``columns``, ``parts``,
        ``default`` and ``computed``."""
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
        """Inverse of :meth:`to_json`. Raises Malformed for another shape, InvalidArgument for values that cannot be.

        `declared`: it comes from who wants the field, and says nothing of columns.
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
        """The field that holds the values of an Arrow column (:func:`~millrace.message.field_types.type_of_arrow`)."""
        return cls(field.name, type_of_arrow(field.name, field.type).text, field.nullable)


@dataclass(frozen=True)
class CollectionSchema:
    """Fields in order, the primary key's name or names, and the event time's where there is one. Raises InvalidArgument otherwise."""

    fields: tuple[FieldSpec, ...]
    primary_key: str | tuple[str, ...]
    """A name, or several in the key's order."""
    event_time: str | None = None
    on_duplicate: OnDuplicate = "keep"
    """What an insert does to the row of its key: "keep" keeps both, "replace" makes the insert an upsert (docs/chain.md)."""
    generated_key: bool = False
    """Whether producers make the key of a row that has none: of one field, a uuid."""
    retired: tuple[StoredColumn, ...] = dataclass_field(default=(), repr=False)
    """Columns of its tables that belong to no field any more: those of fields that were dropped."""
    checks: tuple[CheckConstraint, ...] = ()
    """Conditions that no row makes false."""

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
                raise InvalidArgument(f"field {field.name!r} stands twice (names differ by more than case)")
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
                    f"the primary key {name!r} must be not nullable, and an integer, string, uuid, date, timestamp or decimal"
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
        """Whether an insert replaces the row of its key."""
        return self.on_duplicate == "replace"

    @cached_property
    def has_row_rules(self) -> bool:
        """Whether rows are looked at beside their types: it has checks or computed fields."""
        return bool(self.checks) or any(field.computed is not None for field in self.fields)

    @cached_property
    def has_fill_values(self) -> bool:
        """Whether a row that lacks a field may have a value in it: some have defaults, or are computed."""
        return any(field.default is not None or field.computed is not None for field in self.fields)

    @property
    def key_names(self) -> tuple[str, ...]:
        """The primary key's names, in its order; mostly one."""
        return (self.primary_key,) if isinstance(self.primary_key, str) else self.primary_key

    @cached_property
    def key_fields(self) -> tuple[FieldSpec, ...]:
        """The primary key's fields, in its order."""
        by_name = {field.name: field for field in self.fields}
        return tuple(by_name[name] for name in self.key_names)

    def to_json(self) -> dict[str, object]:
        """The JSON object that CREATE_COLLECTION carries; equal schemas give equal objects."""
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
        """Inverse of :meth:`to_json` (``event_time`` may be absent). Raises Malformed or InvalidArgument.

        `declared`: it comes from who wants the collection, and says nothing of columns.
        """
        perhaps = _PERHAPS if declared else _PERHAPS | {"retired"}
        if not isinstance(value, Mapping) or not _ALWAYS <= set(value) <= _ALWAYS | perhaps:
            raise Malformed(
                "a schema is an object with fields, primary_key and, perhaps, event_time, on_duplicate, generated_key and checks"
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
        """The Arrow schema of an INSERT's rows."""
        return self._arrow

    def key_arrow(self) -> pa.Schema:
        """The Arrow schema of a DELETE's rows: the primary key's fields alone, in its order."""
        return self._key_arrow

    @cached_property
    def _arrow(self) -> pa.Schema:
        return pa.schema([field.arrow() for field in self.fields])

    @cached_property
    def _key_arrow(self) -> pa.Schema:
        return pa.schema([field.arrow() for field in self.key_fields])

    def types(self) -> frozenset[str]:
        """The types of its fields, as text."""
        return frozenset(field.type for field in self.fields)

    def as_declared(self) -> CollectionSchema:
        """This schema as one that nothing was stored by yet: what a new collection with the same fields has."""
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
        """The schema of Arrow columns. The primary key becomes not nullable; raises InvalidArgument for types without a place."""
        fields = [FieldSpec.from_arrow(field) for field in schema]
        key = normalize_key_names(primary_key)
        return cls(with_key_not_null(fields, key), key, event_time, on_duplicate)


def _rules(value: Mapping[str, Any]) -> dict[str, Any]:
    """The default and the computed value of a field's JSON, where it has any."""
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
    """A key's names as a schema has them: one as text."""
    if isinstance(names, str):
        return names
    return names[0] if len(names) == 1 else tuple(names)


def with_key_not_null(fields: Iterable[FieldSpec], primary_key: str | tuple[str, ...]) -> tuple[FieldSpec, ...]:
    """`fields`, those of the key not nullable."""
    names = (primary_key,) if isinstance(primary_key, str) else primary_key
    return tuple(replace(field, nullable=False) if field.name in names else field for field in fields)
