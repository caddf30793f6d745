"""Changes of a collection's schema: a closed set, and the function that applies them.

:func:`apply_change` is pure: it returns a valid schema or raises InvalidArgument. The tables' columns are only ever
added. A column keeps its name and type permanently; a renamed field keeps its columns; a dropped field leaves them
retired; a wider type gets another column; a name that was used before gets a number as suffix. So rows of all versions
share the tables, and a reader of one version needs only its own schema (docs/schema-evolution.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.field_types import MAX_DEPTH, FieldType, parse_type
from millrace.message.nested_names import rename_at, rename_in_type, struct_field_names
from millrace.message.schema import MAX_FIELDS, CollectionSchema, FieldSpec, StoredColumn

if TYPE_CHECKING:  # most schemas have no rules, and importing them is slow
    from millrace.message.expression.rules import UntypedExpression
    from millrace.message.expression.tree import Node

MAX_CHANGES: Final = 1_000
"""Maximum changes of one message."""

MAX_COLUMNS: Final = 2 * MAX_FIELDS
"""Maximum columns of a collection's table, including those of dropped fields and narrower types."""

_WIDER_SCALARS: Final = {
    "int8": ("int16", "int32", "int64"),
    "int16": ("int32", "int64"),
    "int32": ("int64",),
    "float32": ("float64",),
    "date": ("timestamp", "timestamp_ntz"),
}


class AddField(NamedTuple):
    """Add a field after the others. It is nullable, because existing rows have no value."""

    field: FieldSpec


class DropField(NamedTuple):
    """Drop a field that is neither a key nor the event time."""

    name: str


class RenameField(NamedTuple):
    """Rename a field."""

    name: str
    to: str


class ReorderFields(NamedTuple):
    """Move the named fields to the front, in this order; the others keep theirs."""

    names: tuple[str, ...]


class WidenField(NamedTuple):
    """Change a non-key field to a type that holds all values of its current one."""

    name: str
    type: str


class RenameNestedField(NamedTuple):
    """Rename a field inside a struct, at a path of names."""

    name: str
    path: tuple[str, ...]
    to: str


class DropNestedField(NamedTuple):
    """Drop a field inside a struct."""

    name: str
    path: tuple[str, ...]


class MakeNullable(NamedTuple):
    """Make a non-key field nullable."""

    name: str


class SetDefault(NamedTuple):
    """Set the default of a field that is not computed: a value or ``now()``."""

    name: str
    default: Any


class DropDefault(NamedTuple):
    """Remove a field's default."""

    name: str


class AddCheck(NamedTuple):
    """Add a check for later rows; existing rows are not checked."""

    name: str
    condition: Node | UntypedExpression


class DropCheck(NamedTuple):
    """Remove a check."""

    name: str


SchemaChange: TypeAlias = (
    AddField
    | DropField
    | RenameField
    | ReorderFields
    | WidenField
    | RenameNestedField
    | DropNestedField
    | MakeNullable
    | SetDefault
    | DropDefault
    | AddCheck
    | DropCheck
)


def apply_change(schema: CollectionSchema, change: SchemaChange) -> CollectionSchema:
    """Return the schema after one change. Raises InvalidArgument if the change is not possible."""
    match change:
        case AddField(field):
            return _add(schema, field)
        case DropField(name):
            return _drop(schema, name)
        case RenameField(name, to):
            return _rename(schema, name, to)
        case ReorderFields(names):
            return _reorder(schema, names)
        case WidenField(name, kind):
            return _widen(schema, name, kind)
        case RenameNestedField(name, path, to):
            return _with_part(schema, name, path, to)
        case DropNestedField(name, path):
            return _with_part(schema, name, path, None)
        case MakeNullable(name):
            field = _no_key(schema, name, "be null")
            return _with(schema, field, replace(field, nullable=True))
        case SetDefault(name, default):
            from millrace.message.expression.rules import parse_default

            field = _field(schema, name)
            return _with(schema, field, replace(field, default=parse_default(default, name, field.parsed_type)))
        case DropDefault(name):
            field = _field(schema, name)
            if field.default is None:
                raise InvalidArgument(f"field {name!r} has no default")
            return _with(schema, field, replace(field, default=None))
        case AddCheck(name, condition):
            from millrace.message.expression.rules import CheckConstraint

            return replace(schema, checks=(*schema.checks, CheckConstraint(name, condition)))
        case DropCheck(name):
            left = tuple(each for each in schema.checks if each.name != name)
            if len(left) == len(schema.checks):
                raise InvalidArgument(
                    f"there is no check {name!r}; there are {', '.join(each.name for each in schema.checks) or 'none'}"
                )
            return replace(schema, checks=left)


def apply_changes(schema: CollectionSchema, changes: Iterable[SchemaChange]) -> CollectionSchema:
    """Return the schema after several changes in order, as one new version. Raises InvalidArgument."""
    for change in changes:
        schema = apply_change(schema, change)
    return schema


def change_to_json(change: SchemaChange) -> dict[str, Any]:
    """Return a change as a SCHEMA_CHANGE carries it: ``{"op": ...}`` and its fields."""
    said = change._asdict()
    if isinstance(change, AddField):
        said["field"] = change.field.to_json()
    if isinstance(change, ReorderFields):
        said["names"] = list(change.names)
    if isinstance(change, RenameNestedField | DropNestedField):
        said["path"] = list(change.path)
    for rule in {"default", "condition"} & set(said):
        from millrace.message.expression.rules import expression_json

        said[rule] = expression_json(said[rule])
    return {"op": _OPS[type(change)], **said}


def change_from_json(value: object) -> SchemaChange:
    """Invert :func:`change_to_json`. Raises Malformed for another shape, InvalidArgument for an invalid field."""
    kind = _KINDS.get(str(value.get("op"))) if isinstance(value, Mapping) else None
    if kind is None or not isinstance(value, Mapping) or set(value) != {"op", *kind._fields}:
        raise Malformed(f"a change is an object with op, one of {', '.join(_KINDS)}, and what that one says")
    if kind is AddField:
        return AddField(FieldSpec.from_json(value["field"], declared=True))
    if kind is ReorderFields:
        return ReorderFields(tuple(_texts(value["names"])))
    if kind in (RenameNestedField, DropNestedField):
        path = tuple(_texts(value["path"]))
        if not 0 < len(path) < MAX_DEPTH:
            raise Malformed(f"a path into a field has 1 to {MAX_DEPTH - 1} names")
        return kind(*(path if name == "path" else _texts([value[name]])[0] for name in kind._fields))
    if kind in (SetDefault, AddCheck):
        from millrace.message.expression.rules import UntypedExpression

        name, rule = (value[each] for each in kind._fields)
        return kind(*_texts([name]), UntypedExpression.of_json(rule))
    return kind(*_texts([value[name] for name in kind._fields]))


def widens(narrow: FieldType, wide: FieldType) -> bool:
    """Return whether `wide` differs from `narrow` and holds each of its values exactly."""
    if narrow.kind != wide.kind:
        return wide.kind in _WIDER_SCALARS.get(narrow.kind, ())
    match narrow.kind:
        case "decimal":
            more = wide.scale - narrow.scale
            return narrow != wide and more >= 0 and wide.precision - narrow.precision >= more
        case "struct":
            have = dict(zip(wide.names, wide.children, strict=True))
            if not set(narrow.names) <= set(have):
                return False
            pairs = [(each, have[name]) for name, each in zip(narrow.names, narrow.children, strict=True)]
        case "list":
            pairs = [(narrow.children[0], wide.children[0])]
        case "map":
            pairs = [(narrow.children[1], wide.children[1])]
            if narrow.children[0] != wide.children[0]:
                return False
        case _:
            return False
    return narrow != wide and all(each == other or _widens_inside(each, other) for each, other in pairs)


def _widens_inside(narrow: FieldType, wide: FieldType) -> bool:
    """Return :func:`widens` for a nested type, in which a date stays a date: timestamps do not hold all dates."""
    return narrow.kind != "date" and widens(narrow, wide)


_OPS: Final[dict[type, str]] = {
    AddField: "add",
    DropField: "drop",
    RenameField: "rename",
    ReorderFields: "reorder",
    WidenField: "widen",
    RenameNestedField: "rename_part",
    DropNestedField: "drop_part",
    MakeNullable: "relax",
    SetDefault: "set_default",
    DropDefault: "drop_default",
    AddCheck: "add_check",
    DropCheck: "drop_check",
}
_KINDS: Final[dict[str, Any]] = {op: kind for kind, op in _OPS.items()}


def _texts(value: object) -> Sequence[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise Malformed("a change names fields and types as strings")
    return value


def _field(schema: CollectionSchema, name: str) -> FieldSpec:
    for field in schema.fields:
        if field.name == name:
            return field
    raise InvalidArgument(f"there is no field {name!r}; there are {', '.join(each.name for each in schema.fields)}")


def _no_key(schema: CollectionSchema, name: str, what: str) -> FieldSpec:
    field = _field(schema, name)
    if name in schema.key_arrow().names:
        raise InvalidArgument(f"field {name!r} is the primary key: it can be renamed, and not {what}")
    return field


def _with(schema: CollectionSchema, field: FieldSpec, changed: FieldSpec) -> CollectionSchema:
    return replace(schema, fields=tuple(changed if each is field else each for each in schema.fields))


def _add(schema: CollectionSchema, field: FieldSpec) -> CollectionSchema:
    if not field.nullable:
        raise InvalidArgument(f"the added field {field.name!r} must be nullable")
    column = StoredColumn(_free(schema, field.name), field.type)
    return replace(schema, fields=(*schema.fields, replace(field, columns=(column,))))


def _drop(schema: CollectionSchema, name: str) -> CollectionSchema:
    field = _no_key(schema, name, "be dropped")
    if name == schema.event_time:
        raise InvalidArgument(f"field {name!r} is the event time: it cannot be dropped")
    if schema.has_row_rules:
        from millrace.message.expression.rules import require_field_unused

        require_field_unused((name,), schema)
    left = tuple(each for each in schema.fields if each is not field)
    return replace(schema, fields=left, retired=(*schema.retired, *field.stored_columns))


def _rename(schema: CollectionSchema, name: str, to: str) -> CollectionSchema:
    field = _field(schema, name)
    changed = replace(field, name=to, columns=field.stored_columns)
    fields = tuple(changed if each is field else each for each in schema.fields)
    event, checks = to if schema.event_time == name else schema.event_time, schema.checks
    if schema.has_row_rules:
        from millrace.message.expression.rules import rename_in_rules

        fields, checks = rename_in_rules(fields, checks, (name,), to)
    return replace(schema, fields=fields, event_time=event, checks=checks, **_renamed_key(schema, name, to))


def _renamed_key(schema: CollectionSchema, name: str, to: str) -> dict[str, Any]:
    return {"primary_key": tuple(to if each == name else each for each in schema.key_names)}


def _reorder(schema: CollectionSchema, names: tuple[str, ...]) -> CollectionSchema:
    if len(set(names)) < len(names):
        raise InvalidArgument("an order names each field once")
    first = tuple(_field(schema, name) for name in names)
    return replace(schema, fields=(*first, *(each for each in schema.fields if each.name not in names)))


def _widen(schema: CollectionSchema, name: str, kind: str) -> CollectionSchema:
    field, wide = _no_key(schema, name, "have another type"), parse_type(kind)
    if not widens(field.parsed_type, wide):
        raise InvalidArgument(
            f"field {name!r}: {field.type} cannot become {wide.text}: a type can become one that holds all its values"
            " (a longer"
            " int, float64 of float32, a decimal with as many digits or more on both sides of the point, a timestamp"
            " of a date,"
            " a struct with more fields)"
        )
    column = StoredColumn(_free(schema, field.stored_columns[0].name), wide.text)
    default = field.default
    if default is not None:
        from millrace.message.expression.rules import widen_default

        default = widen_default(default, wide)
    return _with(
        schema, field, replace(field, type=wide.text, columns=(*field.stored_columns, column), default=default)
    )


def _with_part(schema: CollectionSchema, name: str, path: tuple[str, ...], to: str | None) -> CollectionSchema:
    """Rename or drop a nested field: the field gets a column of the new type, and older columns record which part is
    which.
    """
    field = _field(schema, name)
    kind = rename_in_type(field.parsed_type, path, to, ".".join((name, *path)))
    column = StoredColumn(_free(schema, field.stored_columns[0].name), kind.text)
    known, parts = dict(field.part_names), []
    for each in field.stored_columns:
        tree = parse_type(each.type)
        found = rename_at(tree, known.get(each.name, struct_field_names(tree)), path, to)
        if found != struct_field_names(tree):
            parts.append((each.name, found))
    after = replace(field, type=kind.text, columns=(*field.stored_columns, column), part_names=tuple(parts))
    fields, checks = tuple(after if each is field else each for each in schema.fields), schema.checks
    if schema.has_row_rules:
        from millrace.message.expression.rules import rename_in_rules, require_field_unused

        if to is None:
            require_field_unused((name, *path), schema)
        else:
            fields, checks = rename_in_rules(fields, checks, (name, *path), to)
    return replace(schema, fields=fields, checks=checks)


def _free(schema: CollectionSchema, name: str) -> str:
    """Return a name that no column ever had: `name`, or `name` with the first free number."""
    stored = [*(column for field in schema.fields for column in field.stored_columns), *schema.retired]
    if len(stored) >= MAX_COLUMNS:
        raise InvalidArgument(
            f"the collection's table has {len(stored)} columns, those of dropped fields and narrower types among"
            " them, and takes"
            " no more: make a new collection, and load the rows into it"
        )
    taken = {each.name.casefold() for each in stored}
    found, number = name, 1
    while found.casefold() in taken:
        number += 1
        found = f"{name}__{number}"
    return found
