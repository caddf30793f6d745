"""Columns as Kafka Connect describes them, and values of Debezium's types as JSON (docs/capture.md has the table).

The forms are those of a captured table's records (java/CaptureEngine.java): a date is ISO 8601, a decimal is a number
with all digits, bytes are base64.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from typing import Any, Final, TypeAlias

import msgspec

from millrace.flows.documents import Digits

Convert: TypeAlias = Callable[[Any], Any]
"""Converts a value that is not None. Raises ValueError, TypeError or OverflowError that says what is wrong."""

UNAVAILABLE: Final = "__debezium_unavailable_value"
"""The placeholder of PostgreSQL's connector for a large value that an update did not change."""
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a moment without a zone
_FIRST_DAY: Final = date(1970, 1, 1).toordinal()
_MAX_SCALE: Final = 20_000
"""PostgreSQL's largest scale is 16,383. A larger one would only create a large text."""


class Column(msgspec.Struct, frozen=True):
    """A schema of Kafka Connect, in the form of its JSON converter."""

    type: str
    """int8 to int64, float, double, boolean, string, bytes, array, map or struct."""
    field: str = ""
    name: str | None = None
    """The meaning: ``io.debezium.time.Date``, ..."""
    optional: bool = False
    parameters: dict[str, str] | None = None
    fields: tuple[Column, ...] = ()
    items: Column | None = None
    keys: Column | None = None
    values: Column | None = None

    @property
    def is_binary(self) -> bool:
        """Whether it holds plain bytes, without another meaning."""
        return self.type == "bytes" and self.name is None


def number(unscaled: int, scale: int) -> int | float:
    """Return ``unscaled * 10 ** -scale`` as a number of a document, with all digits."""
    if not -_MAX_SCALE <= scale <= _MAX_SCALE:
        raise ValueError(f"a scale of {scale} digits")
    if scale <= 0:
        whole = unscaled * 10**-scale
        return whole if -(1 << 63) <= whole < 1 << 64 else Digits(str(whole))
    digits = str(abs(unscaled)).rjust(scale + 1, "0")
    text = f"{'-' if unscaled < 0 else ''}{digits[:-scale]}.{digits[-scale:]}"
    found = float(text)
    return found if len(text) < 17 or repr(found) == text else Digits(text)


def bytes_of(value: Any) -> bytes:
    """Return bytes, which are base64 in JSON and plain in Avro."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{_shown(value)} is not base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{_shown(value)} is not base64: {error}") from None


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{_shown(value)} is not a whole number")
    return value


def _date(days: Any) -> str:
    try:
        return date.fromordinal(_FIRST_DAY + _integer(days)).isoformat()
    except (ValueError, OverflowError):
        raise ValueError(f"the day {days} is outside of the years 1 to 9999") from None


def _moment(micros: int) -> str:
    try:
        return (_EPOCH + timedelta(microseconds=micros)).isoformat(timespec="microseconds")
    except OverflowError:
        raise ValueError(f"the moment {micros} µs is outside of the years 1 to 9999") from None


def _millis(value: Any) -> str:
    return _moment(_integer(value) * 1_000)


def _micros(value: Any) -> str:
    return _moment(_integer(value))


def _nanos(value: Any) -> str:
    micros, rest = divmod(_integer(value), 1_000)
    return f"{_moment(micros)}{rest:03d}" if rest else _moment(micros)


def _span(micros: int) -> str:
    left = abs(micros)
    seconds, rest = divmod(left, 1_000_000)
    sign = "-" if micros < 0 else ""
    return f"{sign}{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{rest:06d}"


def _bits(value: Any) -> int | float:
    return number(int.from_bytes(bytes_of(value), "little"), 0)


def _text_of_bytes(value: Any) -> str:
    """Return bytes as base64, after a check."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    bytes_of(value)
    return str(value)


def _variable_decimal(value: Any) -> int | float:
    if not isinstance(value, dict) or value.keys() != {"scale", "value"}:
        raise TypeError(f"{_shown(value)} is not a decimal with a scale")
    return number(int.from_bytes(bytes_of(value["value"]), "big", signed=True), _integer(value["scale"]))


def _decimal(scale: int) -> Convert:
    return lambda value: number(int.from_bytes(bytes_of(value), "big", signed=True), scale)


_MEANINGS: Final[Mapping[str, Convert]] = {
    "io.debezium.time.Date": _date,
    "io.debezium.time.Timestamp": _millis,
    "io.debezium.time.MicroTimestamp": _micros,
    "io.debezium.time.NanoTimestamp": _nanos,
    "io.debezium.time.Time": lambda value: _span(_integer(value) * 1_000),
    "io.debezium.time.MicroTime": lambda value: _span(_integer(value)),
    "io.debezium.time.NanoTime": lambda value: _span(_integer(value) // 1_000),
    "io.debezium.data.Bits": _bits,
    "io.debezium.data.VariableScaleDecimal": _variable_decimal,
    "org.apache.kafka.connect.data.Date": _date,
    "org.apache.kafka.connect.data.Time": lambda value: _span(_integer(value) * 1_000),
    "org.apache.kafka.connect.data.Timestamp": _millis,
}
_DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"
_REFUSED: Final = ("io.debezium.data.geometry.",)


def converter_of(column: Column) -> Convert | None:
    """Return a function that converts the column's values to JSON; None if they are JSON already.

    Raises ValueError if the column's description is invalid.
    """
    meaning = column.name or ""
    if meaning in _MEANINGS:
        return _MEANINGS[meaning]
    if meaning == _DECIMAL:
        scale = (column.parameters or {}).get("scale", "0")
        if not re.fullmatch(r"-?\d{1,6}", scale):
            raise ValueError(f"{column.field}: a decimal of the scale {scale!r}")
        return _decimal(int(scale))
    if meaning.startswith(_REFUSED):
        return _refuse(meaning)
    if column.type == "bytes":
        return _text_of_bytes
    if column.type == "array" and column.items is not None:
        inner = converter_of(column.items)
        return None if inner is None else _of_list(inner)
    if column.type == "map" and column.values is not None:
        inner = converter_of(column.values)
        return None if inner is None else _of_map(inner)
    if column.type == "struct":
        parts = [(each.field, found) for each in column.fields if (found := converter_of(each)) is not None]
        return _of_struct(parts) if parts else None
    return None


def _refuse(meaning: str) -> Convert:
    def refuse(value: Any) -> Any:
        raise ValueError(f"{meaning} has no form in JSON: exclude the column in the connector (column.exclude.list)")

    return refuse


def _of_list(convert: Convert) -> Convert:
    def convert_all(value: Any) -> Any:
        if not isinstance(value, list):
            raise TypeError(f"{_shown(value)} is not a list")
        return [None if each is None else convert(each) for each in value]

    return convert_all


def _of_map(convert: Convert) -> Convert:
    def convert_all(value: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(f"{_shown(value)} is not an object")
        return {name: None if each is None else convert(each) for name, each in value.items()}

    return convert_all


def _of_struct(parts: list[tuple[str, Convert]]) -> Convert:
    def convert_parts(value: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(f"{_shown(value)} is not an object")
        for name, convert in parts:
            if value.get(name) is not None:
                value[name] = convert(value[name])
        return value

    return convert_parts


def declared_converter(kind: str) -> tuple[Convert, bool]:
    """Return the converter for a column that is declared as `kind`, and whether it holds bytes.

    `kind` is a name of Debezium's or Connect's, with or without its package (``MicroTimestamp``), ``Decimal(2)`` or
    ``bytes``. Raises ValueError.
    """
    if kind == "bytes":
        return _text_of_bytes, True
    scaled = re.fullmatch(rf"(?:{re.escape(_DECIMAL)}|Decimal)\((-?\d{{1,5}})\)", kind)
    if scaled:
        return _decimal(int(scaled[1])), False
    if kind in _MEANINGS:
        return _MEANINGS[kind], False
    for package in ("io.debezium.time", "io.debezium.data"):
        if f"{package}.{kind}" in _MEANINGS:
            return _MEANINGS[f"{package}.{kind}"], False
    known = sorted({name.rpartition(".")[2] for name in _MEANINGS if name.startswith("io.debezium")})
    raise ValueError(f"{kind!r} is not one of bytes, Decimal(<scale>), {', '.join(known)}")


def is_unavailable(value: Any) -> bool:
    """Return whether `value` is a placeholder for a value that the database did not log."""
    if isinstance(value, str):
        return value in (UNAVAILABLE, _UNAVAILABLE_TEXT)
    if isinstance(value, bytes):
        return value == UNAVAILABLE.encode()
    return isinstance(value, list) and len(value) == 1 and is_unavailable(value[0])


_UNAVAILABLE_TEXT: Final = base64.b64encode(UNAVAILABLE.encode()).decode()
UNAVAILABLE_MARKS: Final = (UNAVAILABLE.encode(), _UNAVAILABLE_TEXT.encode())
"""Each event with such a value contains one of these."""


def _shown(value: Any) -> str:
    return repr(value)[:80]
