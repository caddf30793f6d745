"""Schema changes of nested fields, addressed by paths such as ``address.zip``.

Adding or widening a nested field becomes a wider type of the whole field; renaming and dropping are changes of their
own. A path passes through lists and map values as if they were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from millrace.base.errors import InvalidArgument
from millrace.message.field_types import FieldType, parse_type
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import (
    AddCheck,
    AddField,
    DropField,
    DropNestedField,
    MakeNullable,
    RenameField,
    RenameNestedField,
    SchemaChange,
    SetDefault,
    WidenField,
    apply_change,
)


def resolve_paths(changes: Sequence[SchemaChange], newest: Callable[[], CollectionSchema]) -> list[SchemaChange]:
    """Replace paths in `changes` by changes of whole fields of the newest schema.

    `newest` is called only if a change has a path. Raises InvalidArgument.
    """
    if not any("." in (_name(change) or "") or _is_draft(change) for change in changes):
        return list(changes)
    made: list[SchemaChange] = []
    schema = newest()
    for change in changes:
        if isinstance(change, AddField | DropField | RenameField | WidenField | MakeNullable):
            name = _name(change) or ""
            outer = _outer(name, schema)
            if outer is not None:
                change = _inside_of(outer, name[len(outer.name) + 1 :].split("."), change)
        schema = apply_change(schema, change)
        made.append(_typed(change, schema))
    return made


def _is_draft(change: SchemaChange) -> bool:
    """Return whether the change has a default or an expression whose types depend on the schema."""
    return isinstance(change, AddCheck | SetDefault) or (
        isinstance(change, AddField) and change.field.computed is not None
    )


def _typed(change: SchemaChange, schema: CollectionSchema) -> SchemaChange:
    """Return `change` with its expression typed by the schema that includes the change."""
    if not _is_draft(change):
        return change
    match change:
        case AddCheck(name):
            return AddCheck(name, next(each.condition for each in schema.checks if each.name == name))
        case SetDefault(name):
            return SetDefault(name, next(each.default for each in schema.fields if each.name == name))
        case AddField(field):
            computed = next(each.computed for each in schema.fields if each.name == field.name)
            return AddField(replace(field, computed=computed))
    return change


def _name(change: SchemaChange) -> str | None:
    match change:
        case AddField(field):
            return field.name
        case DropField(name) | RenameField(name) | WidenField(name) | MakeNullable(name):
            return name
    return None


def _outer(name: str, schema: CollectionSchema) -> FieldSpec | None:
    """Return the nested field that a path starts with; None if a field has that exact name."""
    if any(field.name == name for field in schema.fields):
        return None
    found = [field for field in schema.fields if name.startswith(f"{field.name}.") and field.parsed_type.is_nested]
    return max(found, key=lambda field: len(field.name), default=None)


def _inside_of(
    outer: FieldSpec, path: list[str], change: AddField | DropField | RenameField | WidenField | MakeNullable
) -> SchemaChange:
    shown = ".".join([outer.name, *path])
    match change:
        case DropField():
            return DropNestedField(outer.name, tuple(path))
        case RenameField(_, to):
            prefix = shown[: -len(path[-1])]
            if to.startswith(prefix):
                raise InvalidArgument(
                    f"{shown!r} stays in its place: give only its new name, {to.removeprefix(prefix)!r}"
                )
            return RenameNestedField(outer.name, tuple(path), to)
        case MakeNullable():
            raise InvalidArgument(f"{shown!r} is nullable already, like every nested field")
    return _change_outer(change, outer, path, shown)


def _change_outer(change: AddField | WidenField, outer: FieldSpec, path: list[str], shown: str) -> WidenField:

    def act(struct: FieldType, name: str) -> FieldType:
        children = dict(zip(struct.names, struct.children, strict=True))
        if isinstance(change, AddField):
            if name in children:
                raise InvalidArgument(f"there is a field {shown!r} already")
            children[name] = change.field.parsed_type
        elif name not in children:
            raise InvalidArgument(f"there is no field {shown!r}; there are {', '.join(children)}")
        else:
            children[name] = parse_type(change.type)
        return replace(struct, names=tuple(children), children=tuple(children.values()))

    return WidenField(outer.name, _inside(outer.parsed_type, path, shown, act).text)


def _inside(kind: FieldType, path: list[str], shown: str, act: Callable[[FieldType, str], FieldType]) -> FieldType:
    if kind.kind in ("list", "map"):
        return replace(kind, children=(*kind.children[:-1], _inside(kind.children[-1], path, shown, act)))
    if kind.kind != "struct":
        raise InvalidArgument(f"{shown!r}: {path[0]!r} would lie in a value of {kind.text}, which has no fields")
    if len(path) == 1:
        return act(kind, path[0])
    if path[0] not in kind.names:
        raise InvalidArgument(f"{shown!r}: there is no field {path[0]!r}; there are {', '.join(kind.names)}")
    place = kind.names.index(path[0])
    inner = _inside(kind.children[place], path[1:], shown, act)
    return replace(kind, children=(*kind.children[:place], inner, *kind.children[place + 1 :]))
