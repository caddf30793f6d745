"""Conversion of user values to columns of a field's type: from Arrow columns of any layout, and from Python objects.

No conversion loses information silently. A value that the type cannot hold raises InvalidArgument, ValueError,
TypeError, OverflowError or an Arrow error (:data:`CONVERSION_ERRORS`), and the caller adds the column's name. Wider,
dictionary-encoded, large, view and extension types become the type's canonical layout (docs/types.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeAlias
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.message.datetime_range import check_datetime_range
from millrace.message.field_types import FieldType, is_list

CONVERSION_ERRORS: Final = (InvalidArgument, pa.ArrowException, ValueError, TypeError, OverflowError)

ScalarBuilder: TypeAlias = Callable[[list[Any], FieldType], pa.Array]
"""Values of a scalar type -> their column."""

_UUID: Final = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
_UUID_LAYOUT: Final = re.compile(_UUID)
_FLOAT_DIGITS: Final = 15
"""Decimal digits that a float64 always preserves."""

_WHOLE_FLOATS: Final = 1 << 53
"""Below this, every integer has a float64 of its own."""

_MINUTE: Final = timedelta(minutes=1)
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE: Final = pa.decimal128(20, 0)
_DIGITS: Final = np.isin(np.arange(256), np.frombuffer(b"0123456789+-", np.uint8))
"""For each byte, whether it is a digit or a sign."""
_BY_OBJECT: Final = frozenset({"decimal", "uuid", "json"})


def needs_declared_type(kind: FieldType) -> bool:
    """Return whether Python objects do not imply the type, so that the column is built with the declared type."""
    return kind.is_nested or kind.kind in _BY_OBJECT


def from_arrow(values: Any, kind: FieldType) -> Any:
    """Convert an array (or chunked array) to the canonical layout of `kind`, if that is lossless."""
    if values.type == kind.arrow and not kind.is_annotated:
        check_datetime_range(values)
        return values  # canonical already, as most columns are: a cast would dominate the cost of a one-row call
    if isinstance(values, pa.ChunkedArray):
        return pa.chunked_array([from_arrow(each, kind) for each in values.chunks], kind.arrow)
    source = values.type
    if pa.types.is_dictionary(source):
        return from_arrow(_takeable(values.dictionary).take(values.indices), kind)
    if pa.types.is_run_end_encoded(source):
        runs = pa.RunEndEncodedArray.from_arrays(values.run_ends, _takeable(values.values))
        return from_arrow(pc.run_end_decode(runs.slice(values.offset, len(values))), kind)
    if isinstance(source, pa.BaseExtensionType):
        if kind.kind in _BY_OBJECT:
            return from_python(values.to_pylist(), kind)
        if source.extension_name == "arrow.uuid" and kind.kind == "string":
            return pa.array([None if each is None else str(each) for each in values.to_pylist()], kind.arrow)
        return from_arrow(values.storage if source.extension_name != "arrow.bool8" else values.cast(pa.bool_()), kind)
    # Not for an empty column: streams check a sink's types with one.
    if pa.types.is_null(source) or 0 < values.null_count == len(values):
        return pa.nulls(len(values), kind.arrow)
    if kind.is_nested:
        return _nested(values, kind)
    if pa.types.is_time(source):
        values = values.cast(pa.time64("us"))
    elif pa.types.is_duration(source):
        values = values.cast(pa.duration("us"))
    elif kind.kind == "decimal":
        return _decimals(values, kind)
    elif kind.kind == "uuid" and _is_octets(source):
        return from_python(values.to_pylist(), kind)
    _refuse_guess(values, kind)
    found = values.cast(kind.arrow)
    _refuse_loss(values, found, kind)
    check_datetime_range(found)
    return _text_of(found, kind)


def _takeable(values: pa.Array) -> pa.Array:
    """Return an encoding's values in a layout that Arrow (26.0) can take and decode; views are not."""
    if pa.types.is_string_view(values.type):
        return values.cast(pa.large_utf8())
    return values.cast(pa.large_binary()) if pa.types.is_binary_view(values.type) else values


def _is_octets(source: pa.DataType) -> bool:
    return bool(
        pa.types.is_fixed_size_binary(source)
        or pa.types.is_binary(source)
        or pa.types.is_large_binary(source)
        or pa.types.is_binary_view(source)
    )


def _is_number(source: pa.DataType) -> bool:
    return bool(pa.types.is_integer(source) or pa.types.is_floating(source) or pa.types.is_decimal(source))


def _is_text(source: pa.DataType) -> bool:
    return bool(pa.types.is_string(source) or pa.types.is_large_string(source) or pa.types.is_string_view(source))


def _refuse_guess(values: pa.Array, kind: FieldType) -> None:
    """Raise InvalidArgument for values whose meaning for `kind` Arrow's cast would only guess."""
    source = values.type
    if kind.kind in ("string", "uuid", "json") and not _is_text(source):
        raise InvalidArgument(f"{_named(source)} is not text: convert it to text explicitly")
    if kind.kind == "binary" and not _is_octets(source):
        raise InvalidArgument(f"{_named(source)} is not binary: encode it explicitly")
    if pa.types.is_boolean(source) and kind.kind != "bool":
        raise InvalidArgument(f"a bool is not {kind.text}: convert it explicitly")
    if pa.types.is_integer(kind.arrow) and _is_text(source) and not _is_all_digits(values):
        plain = pc.match_substring_regex(values, r"^[+-]?[0-9]+$")
        if pc.all(plain).as_py() is False:  # Arrow reads 0x10 as 16
            raise InvalidArgument(f"{values.filter(pc.invert(plain))[0].as_py()!r:.60} is not a whole number in digits")
    moment = pa.types.is_timestamp(source) or pa.types.is_date(source)
    if kind.kind == "bool" and _is_number(source):
        raise InvalidArgument("a number is not a bool: compare it with a number")
    if kind.kind in ("date", "timestamp", "timestamp_ntz") and _is_number(source):
        raise InvalidArgument("a number has no unit of time: convert it to a date or a timestamp")
    if moment and _is_number(kind.arrow):
        raise InvalidArgument("a date or a time is not a number: cast it to a number of some unit")
    if pa.types.is_timestamp(source) and source.tz is not None and kind.kind == "timestamp_ntz":
        raise InvalidArgument("it has a time zone, and timestamp_ntz has none: remove it explicitly")


def _is_all_digits(values: pa.Array) -> bool:
    """Return whether a look at the bytes of a text column finds digits and signs alone: a regex takes ten times as
    long."""
    if not (pa.types.is_string(values.type) and len(values)):
        return False
    _, offsets, data = values.buffers()
    if data is None:
        return True
    bounds = np.frombuffer(offsets, np.int32)
    text = np.frombuffer(data, np.uint8)[bounds[values.offset] : bounds[values.offset + len(values)]]
    return bool(_DIGITS[text].all())


def _named(source: pa.DataType) -> str:
    """Return a noun for values of a type, for messages."""
    if pa.types.is_boolean(source):
        return "a bool"
    if _is_number(source):
        return "a number"
    if _is_octets(source):
        return "binary"
    return "text" if _is_text(source) else f"a value of {source}"


def _refuse_loss(values: pa.Array, found: pa.Array, kind: FieldType) -> None:
    """Raise InvalidArgument if Arrow's cast of `values` lost information silently."""
    source = values.type
    if pa.types.is_floating(source) and pa.types.is_integer(kind.arrow):
        largest = pc.max(pc.abs(values.cast(pa.float64()))).as_py()
        if largest is not None and largest >= _WHOLE_FLOATS:
            raise InvalidArgument(f"a float of {largest:.0f} may stand for another whole number: give integers")
    if kind.kind == "date" and pa.types.is_timestamp(source) and not found.cast(source).equals(values):
        raise InvalidArgument(
            "it has a time of day (in UTC), and a date has none: truncate it, or use a timestamp field"
        )
    if kind.kind not in ("float32", "float64") or pa.types.is_integer(source):
        return
    if pa.types.is_decimal(source):
        if not found.cast(source).equals(values):
            raise InvalidArgument(f"a decimal has more digits than {kind.kind}: round it, or use a decimal field")
        return
    endless = pc.is_inf(found)
    if pc.any(endless).as_py() and not pc.all(_endless(values.filter(endless))).as_py():
        raise InvalidArgument(f"a number exceeds the range of {kind.kind}")


def _endless(values: pa.Array) -> Any:
    if pa.types.is_floating(values.type):
        return pc.is_inf(values.cast(pa.float64()))
    return pc.match_substring_regex(values, "(?i)inf")


def _nested(values: pa.Array, kind: FieldType) -> pa.Array:
    """Convert an array to a nested type, level by level, or by its objects if the shape differs."""
    source, missing = values.type, pc.is_null(values)
    if kind.kind == "struct" and pa.types.is_struct(source):
        given = [source.field(place).name for place in range(source.num_fields)]
        _refuse_unknown(given, kind)
        if len(given) > len(set(given)):
            raise InvalidArgument("the struct has two fields of one name")
        parts = dict(zip(given, values.flatten(), strict=True))
        children = [
            from_arrow(parts[name], each) if name in parts else pa.nulls(len(values), each.arrow)
            for name, each in zip(kind.names, kind.children, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind.arrow), mask=missing)
    if kind.kind == "map" and pa.types.is_struct(source):
        raise InvalidArgument("a struct is not a map, as it cannot omit a key: pass an Arrow map")
    if kind.kind == "list" and is_list(source):
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
        offsets = _offsets(lengths)
        # Arrow (26.0) cannot make an empty column of an extension type.
        items = values.flatten() if lengths.any() else pa.nulls(0, kind.children[0].arrow)
        inner = from_arrow(items, kind.children[0])
        return pa.ListArray.from_arrays(offsets, inner, type=kind.arrow, mask=missing)
    if kind.kind == "map" and pa.types.is_map(source):
        bounds = values.offsets.to_numpy()  # in a slice they do not start at 0
        mine = (each.slice(bounds[0], bounds[-1] - bounds[0]) for each in (values.keys, values.items))
        keys, items = (from_arrow(part, each) for part, each in zip(mine, kind.children, strict=True))
        return _mapped(pa.array(bounds - bounds[0]), keys, items, kind, missing)
    return from_python(values.to_pylist(), kind)


def _offsets(lengths: npt.ArrayLike) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def _mapped(offsets: pa.Array, keys: pa.Array, items: pa.Array, kind: FieldType, missing: pa.Array) -> pa.MapArray:
    if keys.null_count:
        raise ValueError("a map's key is null")
    return pa.MapArray.from_arrays(offsets, keys, items, type=kind.arrow, mask=missing)


def _decimals(values: pa.Array, kind: FieldType) -> pa.Array:
    if pa.types.is_integer(values.type):
        values = values.cast(_WHOLE)
    found = values.cast(kind.arrow)
    # Arrow silently rounds a float to the scale.
    if pa.types.is_floating(values.type) and not found.cast(values.type).equals(values):
        raise InvalidArgument(f"a float has more digits than {kind.text}: round it, or give text or decimals")
    return found


def _text_of(values: pa.Array, kind: FieldType) -> pa.Array:
    """Validate text of an annotated type and return it in canonical form."""
    if kind.kind == "uuid":
        lower = pc.utf8_lower(values)
        if pc.all(pc.match_substring_regex(lower, _UUID)).as_py() is False:
            return pa.array([_uuid(each) for each in values.to_pylist()], kind.arrow)
        return lower
    if kind.kind == "json":
        for text in values.to_pylist():
            _check_json(text)
    return values


def _uuid(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes) and len(value) == 16:
        return str(UUID(bytes=value))
    if isinstance(value, str) and (_UUID_LAYOUT.match(value.lower()) or len(value) == 32):
        return str(UUID(value))
    raise ValueError(f"{value!r:.60} is not a uuid")


def _check_json(text: str | None) -> None:
    if text is not None:
        try:
            json.loads(text, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError("JSON that nests too deeply") from None


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _refuse_unknown(given: Iterable[str], kind: FieldType) -> None:
    unknown = [name for name in given if name not in kind.names]
    if unknown:
        raise InvalidArgument(f"the struct has no field {unknown[0]!r}; it has {', '.join(kind.names)}")


def from_python(values: Sequence[Any], kind: FieldType) -> pa.Array:
    """Convert objects to a column: lists, dicts, pairs, dataclasses, Decimal, UUID, datetime, and their text."""
    return build_column(values, kind, _leaf, _leaf)


def build_column(values: Sequence[Any], kind: FieldType, leaf: ScalarBuilder, key_leaf: ScalarBuilder) -> pa.Array:
    """Build a column of nested objects, with `leaf` for its scalars and `key_leaf` for map keys."""
    given: list[Any] = missing_as_none(list(values))
    if not kind.is_nested:
        return leaf(given, kind)
    values = given
    missing = pa.array([value is None for value in values], pa.bool_())
    if kind.kind == "struct":
        rows = [_members(value, kind) for value in values]
        children = [
            build_column([row.get(name) for row in rows], each, leaf, key_leaf)
            for name, each in zip(kind.names, kind.children, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind.arrow), mask=missing)
    items = [_pairs(value) if kind.kind == "map" else _items(value) for value in values]
    offsets = _offsets([len(each) for each in items])
    flat = [item for each in items for item in each]
    if kind.kind == "list":
        inner = build_column(flat, kind.children[0], leaf, key_leaf)
        return pa.ListArray.from_arrays(offsets, inner, type=kind.arrow, mask=missing)
    keys = build_column([key for key, _ in flat], kind.children[0], key_leaf, key_leaf)
    inner = build_column([value for _, value in flat], kind.children[1], leaf, key_leaf)
    return _mapped(offsets, keys, inner, kind, missing)


def _members(value: Any, kind: FieldType) -> Mapping[str, Any]:
    if value is None:
        return {}
    found = object_fields(value)
    if found is None:
        raise TypeError(f"a struct is an object with fields, not {type(value).__name__}")
    _refuse_unknown(found, kind)
    return found


def object_fields(value: Any) -> Mapping[str, Any] | None:
    """Return the fields of a dict, a dataclass instance or a pydantic model; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return None
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(value) if is_pydantic_model(type(value)) else None


def is_pydantic_model(kind: type) -> bool:
    """Return whether a class is a pydantic (2) model, without importing pydantic."""
    return isinstance(getattr(kind, "model_fields", None), Mapping) and hasattr(kind, "model_validate")


def _items(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | np.ndarray):
        raise TypeError(f"a list is required, not {type(value).__name__}")
    return list(value)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    return [_pair(each) for each in _items(value)]


def _pair(item: Any) -> tuple[Any, Any]:
    if isinstance(item, Mapping) and "key" in item:
        return item["key"], item.get("value")
    if isinstance(item, (str, bytes, Mapping)) or len(item) != 2:
        raise ValueError("an item of a map is a key and a value")
    return item[0], item[1]


def _leaf(values: list[Any], kind: FieldType) -> pa.Array:
    match kind.kind:
        case "decimal":
            return pa.array([decimal_of(value) for value in values], kind.arrow)
        case "uuid":
            return pa.array([_uuid(value) for value in values], kind.arrow)
        case "json":
            texts = [value if value is None or isinstance(value, str) else json_text(value) for value in values]
            return _text_of(pa.array(texts, kind.arrow), kind)
        case "int64":
            values = [_microseconds(value) for value in values]
        case "timestamp_ntz":
            if any(isinstance(value, datetime) and value.tzinfo is not None for value in values):
                raise ValueError("a datetime with a zone, where timestamp_ntz has none")
    return from_arrow(array_of(values), kind)


def array_of(values: Any) -> Any:
    """Convert Python objects to the column that Arrow infers, without the truncation that Arrow allows.

    Raises CONVERSION_ERRORS.
    """
    values = missing_as_none(values)
    first = next((value for value in values if value is not None), None) if isinstance(values, list | tuple) else None
    if isinstance(first, datetime | timedelta) and any(_nanoseconds(value) for value in values):
        raise ValueError("a moment or a duration with nanoseconds")
    if isinstance(first, datetime):
        values = [_in_whole_minutes(value) for value in values]
    return pa.array(values)


def missing_as_none(values: Any) -> Any:
    """Replace pandas' NaT and NA in a list by None; return anything else unchanged."""
    if not isinstance(values, list | tuple) or not any(
        kind.__name__ in ("NaTType", "NAType") and kind.__module__.startswith("pandas.")
        for kind in set(map(type, values))
    ):
        return values
    return [None if type(value).__name__ in ("NaTType", "NAType") else value for value in values]


def _in_whole_minutes(value: Any) -> Any:
    """Return a datetime whose UTC offset has seconds, which Arrow does not support, in UTC; anything else unchanged."""
    if isinstance(value, datetime) and isinstance(value.tzinfo, timezone) and value.utcoffset() % _MINUTE:  # type: ignore[operator]
        return value.astimezone(UTC)
    return value


def _nanoseconds(value: Any) -> int:
    """Return the nanoseconds of a pandas object, which Python's objects lack."""
    return getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0)


def json_text(value: Any) -> str:
    """Return a JSON value as text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def decimal_of(value: Any) -> Decimal | None:
    """Convert a number or its text to a Decimal.

    Raises ValueError for a float with uncertain digits and for anything that is not a number.
    """
    if value is None or (isinstance(value, Decimal) and value.is_finite()):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r:.60} is not a decimal")
    if isinstance(value, float) and len(Decimal(repr(value)).as_tuple().digits) > _FLOAT_DIGITS:
        raise ValueError(f"{value!r} has more digits than a float preserves: give text or Decimal")
    if (
        isinstance(value, str) and _NUMBER.fullmatch(value.strip()) is None
    ):  # Python accepts 1_000 and digits of other scripts
        raise ValueError(f"{value!r:.60} is not a decimal")
    try:
        found = Decimal(repr(value) if isinstance(value, float) else value)
    except InvalidOperation:
        raise ValueError(f"{value!r:.60} is not a decimal") from None
    if not found.is_finite():
        raise ValueError(f"{value!r:.60} is not a decimal")
    return found


def _microseconds(value: Any) -> Any:
    """Return a time of day or a duration as its int64; anything else unchanged."""
    if isinstance(value, time):
        if value.tzinfo is not None:
            raise ValueError("a time of day with a zone")
        value = timedelta(hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond)
    if isinstance(value, timedelta):
        if _nanoseconds(value):
            raise ValueError("a duration below a microsecond")
        return value // timedelta(microseconds=1)
    return value
