"""Plain rows: dicts whose values are exactly a collection's, so that their conversion to Arrow can wait.

A call of few rows is cheap only if its rows become Arrow together with those of other calls, once for each message.
That is safe for rows whose conversion cannot fail and does not depend on other rows. A row is plain if it is a dict,
its names are fields of the schema, each value has the one Python type that the field's Arrow type holds exactly (and is
in its range), and fields that are missing or None are nullable. Every other call is converted when it is made
(:func:`~millrace.client.produce.rows.conform`), so that its errors are raised there. For plain rows, both ways give
equal columns.

Not plain: rows of a schema with defaults, computed values, checks or a generated key; values that need a conversion,
such as an int for a float64, a str for a timestamp or a pandas Timestamp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime
from operator import itemgetter
from typing import Any, Final, TypeAlias

import pyarrow as pa

from millrace.message.keys import key_hash
from millrace.message.schema import CollectionSchema, FieldSpec

PlainRow: TypeAlias = tuple[Any, ...]
"""The values of a row, in the schema's order."""

FEW_ROWS: Final = 16
"""Up to this many rows of one call are kept as plain rows; more are worth a conversion of their own."""

_MAX_SHAPES: Final = 256
"""Combinations of value types whose checks are remembered."""

_Check: TypeAlias = tuple[int, Callable[[Any], bool]]

_TYPES: Final[dict[str, type]] = {
    "bool": bool,
    "int8": int,
    "int16": int,
    "int32": int,
    "int64": int,
    "float64": float,
    "string": str,
    "binary": bytes,
    "date": date,
    "timestamp": datetime,
    "timestamp_ntz": datetime,
}
"""Python type of a field type's plain values."""

_BITS: Final = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_NULL: Final = type(None)


class PlainRows:
    """The plain rows of one schema: which rows are plain, their size, their key's hash and their conversion.

    Use :meth:`of`, which returns None for a schema that has no plain rows.
    """

    def __init__(self, schema: CollectionSchema) -> None:
        self.schema = schema
        self._arrow = schema.arrow()
        self._names = frozenset(self._arrow.names)
        self._types = tuple(_TYPES.get(field.parsed_type.kind) for field in schema.fields)
        self._values = itemgetter(*self._arrow.names) if len(self._names) > 1 else None
        self._shapes: dict[tuple[type, ...], list[_Check] | None] = {}
        self._width = sum(_width(field) for field in schema.fields)
        self._sized = [place for place, kind in enumerate(self._types) if kind in (str, bytes)]
        self._key = [self._arrow.names.index(name) for name in schema.key_names]
        self._key_kind = schema.key_fields[0].parsed_type.kind if len(self._key) == 1 else ""
        self.hashes_keys = self._key_kind == "string" or self._key_kind in _BITS
        """Whether :meth:`key_hash` takes this key."""

    @classmethod
    def of(cls, schema: CollectionSchema) -> PlainRows | None:
        """Return the plain rows of `schema`, or None if it has rules, or a required field without a plain type."""
        if schema.has_fill_values or schema.has_row_rules or schema.generated_key:
            return None
        if any(field.parsed_type.kind not in _TYPES and not field.nullable for field in schema.fields):
            return None
        return cls(schema)

    def take(self, rows: Sequence[Any]) -> list[PlainRow] | None:
        """Return the values of `rows`, or None if one of them is not plain."""
        found: list[PlainRow] = []
        for row in rows:
            if type(row) is not dict:
                return None
            values = self._values_of(row)
            if values is None or (checks := self._checks(tuple(map(type, values)))) is None:
                return None
            for place, check in checks:
                if not check(values[place]):
                    return None
            found.append(values)
        return found

    def batch(self, rows: Sequence[PlainRow]) -> pa.RecordBatch:
        """Convert rows, at least one, that `take` returned."""
        columns = [pa.array(values, field.type) for values, field in zip(zip(*rows), self._arrow)]  # noqa: B905 (hot)
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)

    def table(self, rows: Sequence[Any]) -> pa.Table | None:
        """Convert many rows at once, or return None if one of them is not plain."""
        if set(map(type, rows)) != {dict}:
            return None
        found: list[PlainRow] = []
        for row in rows:
            values = self._values_of(row)
            if values is None:
                return None
            found.append(values)
        columns = []
        for place, (wanted, field) in enumerate(zip(self._types, self._arrow, strict=True)):
            column = [row[place] for row in found]
            kinds = set(map(type, column))
            if _NULL in kinds:
                if not field.nullable:
                    return None
                kinds.remove(_NULL)
            if kinds - {wanted} or (wanted is datetime and not all(map(_moment_check(field.type.tz), column))):
                return None
            try:
                columns.append(pa.array(column, field.type))
            except (pa.ArrowException, OverflowError, ValueError):  # out of range, or text that is not Unicode
                return None
        return pa.Table.from_arrays(columns, schema=self._arrow)

    def key_of(self, row: PlainRow) -> Any:
        """Return a row's key, for comparisons with others of the schema."""
        return row[self._key[0]] if len(self._key) == 1 else tuple(row[place] for place in self._key)

    def key_hash(self, row: PlainRow) -> int:
        """Return :func:`millrace.message.keys.key_hashes` of a row's key, if `hashes_keys`."""
        key = row[self._key[0]]
        if self._key_kind in ("string", "int64"):
            return key_hash(key)
        return key_hash((key + (1 << 63)).to_bytes(8, "big"))  # the canonical bytes of narrower integers

    def size(self, row: PlainRow) -> int:
        """Return about the bytes of a row in Arrow."""
        size = self._width
        for place in self._sized:
            value = row[place]
            if value is not None:
                size += len(value)
        return size

    def _values_of(self, row: dict[Any, Any]) -> PlainRow | None:
        """Return the row's values; None if it has a name that the schema lacks."""
        if self._values is not None and len(row) == len(self._names):
            try:
                return self._values(row)
            except KeyError:
                return None  # as many names, and one of them is missing: another is unknown
        if not row.keys() <= self._names:
            return None
        return tuple(map(row.get, self._arrow.names))

    def _checks(self, shape: tuple[type, ...]) -> list[_Check] | None:
        """Return what is left to check of values of these types; None if the types alone are not plain."""
        try:
            return self._shapes[shape]
        except KeyError:
            pass
        if len(self._shapes) == _MAX_SHAPES:
            self._shapes.clear()
        made = self._shapes[shape] = self._checks_of(shape)
        return made

    def _checks_of(self, shape: tuple[type, ...]) -> list[_Check] | None:
        made: list[_Check] = []
        for place, (kind, wanted, field) in enumerate(zip(shape, self._types, self.schema.fields, strict=True)):
            if kind is _NULL and field.nullable:
                continue
            if kind is not wanted:
                return None
            check = _check_of(field)
            if check is not None:
                made.append((place, check))
        return made


def _check_of(field: FieldSpec) -> Callable[[Any], bool] | None:
    """Return the check of a value that has the field's Python type; None if every such value is plain."""
    kind = field.parsed_type.kind
    if kind in _BITS:
        least, most = -(1 << _BITS[kind] - 1), (1 << _BITS[kind] - 1) - 1
        return lambda value: least <= value <= most
    if kind == "string":
        return _is_unicode
    if kind in ("timestamp", "timestamp_ntz"):
        return _moment_check(field.parsed_type.arrow.tz)
    return None


def _is_unicode(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _moment_check(zone: str | None) -> Callable[[datetime | None], bool]:
    """Return whether a datetime is exactly a timestamp's value: in UTC, or without a zone."""
    wanted = None if zone is None else UTC
    return lambda value: value is None or value.tzinfo is wanted


def _width(field: FieldSpec) -> int:
    kind = field.parsed_type.arrow
    try:
        return max(1, kind.bit_width // 8)
    except ValueError:
        return 4  # an offset


def last_of_keys(rows: Iterable[PlainRow], key: Callable[[PlainRow], Any]) -> list[PlainRow]:
    """Return the last row of each key, in the order of the rows."""
    found: dict[Any, PlainRow] = {}
    for row in rows:
        name = key(row)
        found.pop(name, None)
        found[name] = row
    return list(found.values())
