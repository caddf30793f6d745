"""Types of fields: a tree of scalars, lists, maps and structs, each with one text form and one Arrow type
(docs/types.md).

:func:`parse_type` accepts any text, in time bounded by its length, and returns a type of at most :data:`MAX_DEPTH`
levels or raises InvalidArgument. Equal types have equal text. Items of a list, values of a map and fields of a struct
may always be null, as in Delta.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NoReturn

import pyarrow as pa

from millrace.base.errors import InvalidArgument

MAX_DEPTH: Final = 8
"""Maximum levels of a type: a scalar has one, a list of scalars two."""

MAX_LEAVES: Final = 1_000
"""Maximum scalars in a type, and in a schema."""

MAX_TYPE_CHARACTERS: Final = 64 << 10
MAX_NAME_CHARACTERS: Final = 128
MAX_PRECISION: Final = 38

_FIRST_SCALARS: Final[dict[str, pa.DataType]] = {
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

SCALAR_TYPES: Final[dict[str, pa.DataType]] = _FIRST_SCALARS | {
    "timestamp_ntz": pa.timestamp("us"),
    "uuid": pa.utf8(),
    "json": pa.utf8(),
}
"""Scalar types by name, each with its Arrow type; ``decimal(p,s)`` is not listed."""

TYPES_BEFORE_V4: Final = (*_FIRST_SCALARS, *(f"list<{name}>" for name in _FIRST_SCALARS))
"""The types of chains before version 4, in the order of their error messages."""

TYPE_FORMS: Final = (*SCALAR_TYPES, "decimal(p,s)", "list<T>", "map<K, V>", "struct<name: T, …>")
"""The accepted types, for people to read."""

_NAMES: Final = {arrow: name for name, arrow in reversed(SCALAR_TYPES.items())}  # utf8 is string, not uuid
_WIDER: Final[dict[pa.DataType, str]] = {
    pa.uint8(): "int16",
    pa.uint16(): "int32",
    pa.uint32(): "int64",
    pa.uint64(): "decimal(20,0)",
    pa.float16(): "float32",
    pa.date64(): "date",
}
"""Arrow types without a field type, and the field type that holds all their values."""

_TOKEN: Final = re.compile(r"\s*(?:([A-Za-z][A-Za-z0-9_]*|[0-9]+)|`((?:[^`]|``)*)`|([<>(),:?]))")
_BARE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class FieldType:
    """A type: a scalar of :data:`SCALAR_TYPES`, a ``decimal`` with its digits, or a ``list``, ``map`` or ``struct``."""

    kind: str
    children: tuple[FieldType, ...] = ()
    """A list's item; a map's key and value; a struct's fields."""
    names: tuple[str, ...] = ()
    """The names of a struct's fields."""
    precision: int = 0
    scale: int = 0

    @cached_property
    def text(self) -> str:
        """The canonical text."""
        if self.kind == "decimal":
            return f"decimal({self.precision},{self.scale})"
        if not self.children:
            return self.kind
        parts = [each.text for each in self.children]
        if self.kind == "struct":
            parts = [f"{_quoted(name)}: {part}" for name, part in zip(self.names, parts, strict=True)]
        return f"{self.kind}<{', '.join(parts)}>"

    @cached_property
    def arrow(self) -> pa.DataType:
        """The Arrow type of its values."""
        if self.kind == "decimal":
            return pa.decimal128(self.precision, self.scale)
        children = [each.arrow for each in self.children]
        match self.kind:
            case "list":
                return pa.list_(pa.field("item", children[0], nullable=True))
            case "map":
                return pa.map_(children[0], children[1])
            case "struct":
                return pa.struct(list(zip(self.names, children, strict=True)))
            case _:
                return SCALAR_TYPES[self.kind]

    @cached_property
    def depth(self) -> int:
        """The levels: 1 for a scalar."""
        return 1 + max((each.depth for each in self.children), default=0)

    @cached_property
    def leaf_count(self) -> int:
        """The number of scalars in it."""
        return sum(each.leaf_count for each in self.children) or 1

    @property
    def is_nested(self) -> bool:
        """Whether it contains other types."""
        return bool(self.children)

    @cached_property
    def is_annotated(self) -> bool:
        """Whether it contains text with a meaning: a uuid or JSON."""
        return any(each.kind in ("uuid", "json") for each in self.scalars())

    def scalars(self) -> Iterator[FieldType]:
        """Yield the scalars in it, in order."""
        if not self.children:
            yield self
        for each in self.children:
            yield from each.scalars()


def check_name(name: object, what: str) -> str:
    """Return a field's name, of a schema or a struct, if it is valid. Raises InvalidArgument."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{what} needs a non-empty name")
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidArgument(f"{what}'s name has at most {MAX_NAME_CHARACTERS} characters, not {len(name)}")
    if name.startswith("_"):
        raise InvalidArgument(f"field {name!r}: a leading underscore is reserved for Millrace's own columns")
    if not name.isprintable():
        # Also refuses lone surrogates, which no UTF-8 column name could carry.
        raise InvalidArgument(f"field {name!r}: a name has printable characters only")
    return name


@lru_cache(maxsize=4096)
def parse_type(text: str) -> FieldType:
    """Parse the text of a type; blanks and a ``?`` inside of it are ignored. Raises InvalidArgument."""
    if len(text) > MAX_TYPE_CHARACTERS:
        raise InvalidArgument(f"a type has at most {MAX_TYPE_CHARACTERS} characters, not {len(text)}")
    found = _Parser(text).whole()
    if found.leaf_count > MAX_LEAVES:
        raise InvalidArgument(f"a type has at most {MAX_LEAVES} scalars, not {found.leaf_count}")
    return found


def type_of_arrow(name: str, arrow: pa.DataType) -> FieldType:
    """Return the type that holds the values of an Arrow type; `name` is the column's.

    Dictionaries, runs, large and view layouts count as their values. Unsigned integers are widened. Times of day and
    durations become int64 microseconds.
    Raises InvalidArgument if there is no such type.
    """
    found = _of_arrow(name, arrow, MAX_DEPTH)
    if found.leaf_count > MAX_LEAVES:
        raise InvalidArgument(f"field {name!r}: a type has at most {MAX_LEAVES} scalars, not {found.leaf_count}")
    return found


def _of_arrow(name: str, arrow: pa.DataType, levels: int) -> FieldType:
    if levels == 0:
        raise InvalidArgument(f"field {name!r}: a type has at most {MAX_DEPTH} levels")
    if pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow):
        return _of_arrow(name, arrow.value_type, levels)
    if is_list(arrow):
        return FieldType("list", (_of_arrow(name, arrow.value_type, levels - 1),))
    if pa.types.is_map(arrow):
        key, value = (_of_arrow(name, each, levels - 1) for each in (arrow.key_type, arrow.item_type))
        return _map(key, value)
    if pa.types.is_struct(arrow):
        fields = [arrow.field(place) for place in range(arrow.num_fields)]
        return _struct(
            [each.name for each in fields], [_of_arrow(f"{name}.{each.name}", each.type, levels - 1) for each in fields]
        )
    return _scalar_of_arrow(name, arrow)


def _scalar_of_arrow(name: str, arrow: pa.DataType) -> FieldType:
    if pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow):
        return FieldType("string")
    if pa.types.is_large_binary(arrow) or pa.types.is_binary_view(arrow) or pa.types.is_fixed_size_binary(arrow):
        return FieldType("binary")
    if pa.types.is_timestamp(arrow):
        return FieldType("timestamp_ntz" if arrow.tz is None else "timestamp")
    if pa.types.is_time(arrow) or pa.types.is_duration(arrow):
        return FieldType("int64")
    if pa.types.is_decimal(arrow):
        if 1 <= arrow.precision <= MAX_PRECISION and 0 <= arrow.scale <= arrow.precision:
            return FieldType("decimal", precision=arrow.precision, scale=arrow.scale)
        raise InvalidArgument(f"field {name!r}: {arrow} is no decimal(p,s) with 1 <= p <= {MAX_PRECISION}, 0 <= s <= p")
    if isinstance(arrow, pa.BaseExtensionType) and arrow.extension_name in ("arrow.uuid", "arrow.json"):
        return FieldType(arrow.extension_name.removeprefix("arrow."))
    found = _NAMES.get(arrow)
    if found is not None:
        return FieldType(found)
    if arrow in _WIDER:
        return parse_type(_WIDER[arrow])
    if pa.types.is_null(arrow):
        raise InvalidArgument(f"field {name!r} holds nulls alone, which says no type: cast it to the one it is to have")
    raise InvalidArgument(
        f"field {name!r}: Arrow type {arrow} has no field type; cast it to one of {', '.join(TYPE_FORMS)}"
    )


def is_list(arrow: pa.DataType) -> bool:
    """Return whether it is a list of any layout."""
    return bool(
        pa.types.is_list(arrow)
        or pa.types.is_large_list(arrow)
        or pa.types.is_list_view(arrow)
        or pa.types.is_large_list_view(arrow)
        or pa.types.is_fixed_size_list(arrow)
    )


def _quoted(name: str) -> str:
    return name if _BARE.fullmatch(name) else f"`{name.replace('`', '``')}`"


def _map(key: FieldType, value: FieldType) -> FieldType:
    if key.is_nested:
        raise InvalidArgument(f"a map's key is a scalar, not {key.text}")
    return FieldType("map", (key, value))


def _struct(names: list[str], types: list[FieldType]) -> FieldType:
    if not names:
        raise InvalidArgument("a struct has one field or more")
    seen: set[str] = set()
    for name in names:
        folded = check_name(name, "a struct's field").casefold()
        if folded in seen:
            raise InvalidArgument(f"field {name!r} appears twice in a struct (names differ by more than case)")
        seen.add(folded)
    return FieldType("struct", tuple(types), tuple(names))


class _Parser:
    """A recursive-descent parser of one text."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0
        self.bare: str | None = None
        self.quoted: str | None = None
        self.sign: str | None = None
        self._next()

    def whole(self) -> FieldType:
        found = self._type(MAX_DEPTH)
        if self.place <= len(self.text):
            self._refuse()
        return found

    def _next(self) -> None:
        """Advance to the next token. After the last one all are None, and the place is beyond the text."""
        match = _TOKEN.match(self.text, self.place)
        if match is None:
            if self.text[self.place :].strip():
                self._refuse()
            self.place, self.bare, self.quoted, self.sign = len(self.text) + 1, None, None, None
            return
        self.place = match.end()
        self.bare, self.quoted, self.sign = match.groups()

    def _refuse(self) -> NoReturn:
        shown = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        raise InvalidArgument(f"unknown type {shown!r}; one of {', '.join(TYPE_FORMS)}")

    def _take(self, sign: str) -> None:
        if self.sign != sign:
            self._refuse()
        self._next()

    def _number(self) -> int:
        digits = self.bare
        if digits is None or not digits.isdecimal() or len(digits) > 2:
            self._refuse()
        self._next()
        return int(digits)

    def _type(self, levels: int) -> FieldType:
        if levels == 0:
            raise InvalidArgument(f"a type has at most {MAX_DEPTH} levels")
        kind = self.bare
        self._next()
        match kind:
            case "decimal":
                return self._decimal()
            case "list":
                self._take("<")
                item = self._inner(levels - 1)
                self._take(">")
                return FieldType("list", (item,))
            case "map":
                self._take("<")
                key = self._type(levels - 1)
                self._take(",")
                value = self._inner(levels - 1)
                self._take(">")
                return _map(key, value)
            case "struct":
                return self._struct(levels - 1)
        if kind not in SCALAR_TYPES:
            self._refuse()
        return FieldType(kind)

    def _inner(self, levels: int) -> FieldType:
        """Parse a type with or without a question mark: nested values may be null either way."""
        found = self._type(levels)
        if self.sign == "?":
            self._next()
        return found

    def _decimal(self) -> FieldType:
        self._take("(")
        precision = self._number()
        self._take(",")
        scale = self._number()
        self._take(")")
        if not (1 <= precision <= MAX_PRECISION and scale <= precision):
            raise InvalidArgument(
                f"decimal({precision},{scale}) cannot be: it has 1 to {MAX_PRECISION} digits, 0 to as many behind the"
                " point"
            )
        return FieldType("decimal", precision=precision, scale=scale)

    def _struct(self, levels: int) -> FieldType:
        self._take("<")
        names: list[str] = []
        types: list[FieldType] = []
        while True:
            name = self.bare if self.quoted is None else self.quoted.replace("``", "`")
            if name is None:
                self._refuse()
            self._next()
            self._take(":")
            names.append(name)
            types.append(self._inner(levels))
            if self.sign != ",":
                break
            self._next()
        self._take(">")
        return _struct(names, types)
