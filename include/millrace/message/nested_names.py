"""The parts of a nested type under the names that they have now: what renames and drops inside of a field leave of older columns.

A column of a table keeps its type, with the names in it, for ever. Which of its parts are which of the field's that it belongs to is
said by names in a row: one for each field of each struct in the column's type, an outer one before what is in it, None for a part that
was dropped. Promises: a name that is used again is another part; what no change touched has no such row, and costs nothing.
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
"""The name of a dropped part in a type of :func:`with_names`: one that no field can have."""


def struct_field_names(kind: FieldType) -> NestedNames:
    """The names of a type's own."""
    return tuple(_names(kind))


def with_names(kind: FieldType, names: NestedNames) -> FieldType:
    """A type with other names; those of dropped parts are :data:`DROPPED`, so that it is no type of a field."""
    return _under(kind, iter(names))


def rename_at(kind: FieldType, names: NestedNames, path: Sequence[str], to: str | None) -> NestedNames:
    """`names` of a column of type `kind` once the part at `path` has the name `to`, or is dropped; as they are where it has no such part."""
    place = _place(with_names(kind, names), tuple(path))
    return names if place is None else (*names[:place], to, *names[place + 1 :])


def rename_in_type(kind: FieldType, path: Sequence[str], to: str | None, shown: str) -> FieldType:
    """A field's type once the part at `path` has the name `to`, or is dropped. Raises InvalidArgument, of what `shown` says."""
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
        return parse_type(made.text)  # looks at the names
    if len(kind.names) == 1:
        raise InvalidArgument(f"{shown!r} is the only field there: drop what it lies in")
    rest = [part for at, part in enumerate(zip(kind.names, kind.children, strict=True)) if at != place]
    return replace(kind, names=tuple(name for name, _ in rest), children=tuple(each for _, each in rest))


def convert_nested(values: Any, narrow: FieldType, wide: FieldType, scalar: Any) -> Any:
    """Values of a column, whose type is `narrow` by the names of now, as ones of the field's type; `scalar` widens what is not nested."""
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
        case "list":  # offsets go on from the whole of what is inside, sliced or not
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
    """Where the part at `path` stands in a row of names."""
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
