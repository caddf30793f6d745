"""Names of a nested type's parts after renames and drops inside of a field.

A table's column keeps its type, with the names in it, permanently. A tuple of names says which of its parts is which
part of the field now: one name for each field of each struct in the column's type, an outer one before its inner ones,
None for a dropped part. A name that is used again is another part. A column that no change touched has no tuple and
costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.message.field_types import FieldType, parse_type

NestedNames: TypeAlias = tuple[str | None, ...]

DROPPED = ""
"""The name of a dropped part in the result of :func:`with_names`; no field can have it."""


def struct_field_names(kind: FieldType) -> NestedNames:
    """Return the names in a type."""
    return tuple(_names(kind))


def with_names(kind: FieldType, names: NestedNames) -> FieldType:
    """Return a type with other names. Dropped parts are named :data:`DROPPED`, so the result is not a valid field
    type.
    """
    return _under(kind, iter(names))


def rename_at(kind: FieldType, names: NestedNames, path: Sequence[str], to: str | None) -> NestedNames:
    """Return `names` of a column of type `kind` after the part at `path` was renamed to `to`, or dropped (None).

    Unchanged if the column has no such part.
    """
    place = _place(with_names(kind, names), tuple(path))
    return names if place is None else (*names[:place], to, *names[place + 1 :])


def rename_in_type(kind: FieldType, path: Sequence[str], to: str | None, shown: str) -> FieldType:
    """Return a field's type after the part at `path` was renamed to `to`, or dropped (None).

    Raises InvalidArgument; `shown` is the path in its message.
    """
    if kind.kind in ("list", "map"):
        return replace(kind, children=(*kind.children[:-1], rename_in_type(kind.children[-1], path, to, shown)))
    if kind.kind != "struct":
        raise InvalidArgument(f"{shown!r}: {path[0]!r} would lie in a value of {kind.text}, which has no fields")
    if path[0] not in kind.names:
        raise InvalidArgument(f"{shown!r}: there is no field {path[0]!r}; there are {', '.join(kind.names)}")
    place = kind.names.index(path[0])
    if len(path) > 1:
        inner = rename_in_type(kind.children[place], path[1:], to, shown)
        return replace(kind, children=(*kind.children[:place], inner, *kind.children[place + 1 :]))
    if to == path[0]:
        raise InvalidArgument(f"{shown!r} has that name")
    if to is not None:
        made = replace(kind, names=(*kind.names[:place], to, *kind.names[place + 1 :]))
        return parse_type(made.text)  # checks the names
    if len(kind.names) == 1:
        raise InvalidArgument(f"{shown!r} is the only field there: drop what it lies in")
    rest = [part for at, part in enumerate(zip(kind.names, kind.children, strict=True)) if at != place]
    return replace(kind, names=tuple(name for name, _ in rest), children=tuple(each for _, each in rest))


def convert_nested(values: Any, narrow: FieldType, wide: FieldType, scalar: Any) -> Any:
    """Convert a column of type `narrow`, under current names, to the field's type; `scalar` widens values that are not
    nested.
    """
    if isinstance(values, pa.ChunkedArray):
        return pa.chunked_array([convert_nested(each, narrow, wide, scalar) for each in values.chunks], wide.arrow)
    match wide.kind:
        case "struct":
            there = {name: place for place, name in enumerate(narrow.names)}
            parts = [
                convert_nested(values.field(there[name]), narrow.children[there[name]], kind, scalar)
                if name in there
                else pa.nulls(len(values), kind.arrow)
                for name, kind in zip(wide.names, wide.children, strict=True)
            ]
            return pa.StructArray.from_arrays(parts, fields=list(wide.arrow), mask=values.is_null())
        case "list":  # offsets refer to all items, also of a sliced array
            inside = convert_nested(values.values, narrow.children[0], wide.children[0], scalar)
        case "map":
            items = convert_nested(values.items, narrow.children[1], wide.children[1], scalar)
            keys, fields = values.keys, [wide.arrow.key_field, wide.arrow.item_field]
            inside = pa.StructArray.from_arrays([keys, items], fields=fields)
        case _:
            return scalar(values, wide.arrow)
    buffers = values.buffers()[:2]
    return pa.Array.from_buffers(wide.arrow, len(values), buffers, values.null_count, values.offset, [inside])


def _names(kind: FieldType) -> Iterator[str]:
    for name, each in zip(kind.names or ("",) * len(kind.children), kind.children, strict=True):
        if kind.kind == "struct":
            yield name
        yield from _names(each)


def _under(kind: FieldType, names: Iterator[str | None]) -> FieldType:
    own: list[str] = []
    children: list[FieldType] = []
    for each in kind.children:
        if kind.kind == "struct":
            own.append(next(names) or DROPPED)
        children.append(_under(each, names))
    return replace(kind, names=tuple(own), children=tuple(children))


def _place(kind: FieldType, path: tuple[str, ...]) -> int | None:
    """Return the index of the part at `path` in a tuple of names."""
    if kind.kind in ("list", "map"):
        return _place(kind.children[-1], path)
    before = 0
    for name, each in zip(kind.names, kind.children, strict=kind.kind == "struct"):
        if name == path[0]:
            if len(path) == 1:
                return before
            inner = _place(each, path[1:])
            return None if inner is None else before + 1 + inner
        before += 1 + len(struct_field_names(each))
    return None
