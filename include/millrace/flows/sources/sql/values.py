"""Values of a database as the capture's JSON (docs/capture.md), and the SQL expressions that return them.

An expression returns a number, a text or bytes with the complete value, whatever the session's settings are; `value_of`
converts that to JSON. The triggers that write changes use the same expressions.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

import msgspec

_ZERO: Final = re.compile(r"0000-|\d{4}-00|\d{4}-\d\d-00")
"""A MariaDB date that is not a day."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Column(NamedTuple):
    """A column of a table."""

    name: str
    type: str
    """The database's name of it, without length, in lower case; with ``[]`` for a PostgreSQL array."""


class Form(NamedTuple):
    """How a value is read."""

    expression: str
    """An SQL expression, with ``{}`` for the column."""
    value: Callable[[Any], Any]
    binary: bool = False


def _number(value: Any) -> Any:
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        words = {"inf": "Infinity", "-inf": "-Infinity"}
        return words.get(str(float(value)), "NaN")
    return value


def _bytes(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(bytes(value)).decode()
    return str(value).replace("\n", "")


def _date(value: Any) -> Any:
    text = str(value)
    return None if _ZERO.match(text) else text


def _datetime(value: Any) -> Any:
    """Convert ``2024-02-29 12:00:00`` to the form with a T and six digits."""
    text = str(value)
    if _ZERO.match(text):
        return None
    if not text[:1].isdigit() or text.endswith("BC"):
        return text
    whole, _, fraction = text.replace(" ", "T", 1).partition(".")
    return f"{whole}.{fraction:0<6}"


def _instant(value: Any) -> Any:
    """Convert seconds since 1970, or a text in UTC that ends with ``+00``."""
    if isinstance(value, int | float | Decimal):
        seconds = Decimal(str(value))
        moment = _EPOCH + timedelta(microseconds=int(seconds * 1_000_000))
        return f"{moment:%Y-%m-%dT%H:%M:%S.%f}Z" if value else None
    text = str(value)
    return f"{_datetime(text[:-3])}Z" if text.endswith("+00") else text


def _time(value: Any) -> Any:
    text = str(value)
    zone = next((text[place:] for place, each in enumerate(text) if place and each in "+-"), "")
    whole, _, fraction = text.removesuffix(zone).partition(".")
    return f"{whole}.{fraction:0<6}{zone}"


def _list(value: Any) -> Any:
    return msgspec.Raw(value.encode()) if isinstance(value, str) else value


def _hex(value: Any) -> Any:
    return base64.b64encode(bytes.fromhex(str(value))).decode()


def _as_is(value: Any) -> Any:
    return _bytes(value) if isinstance(value, bytes) else _number(value)


_INTEGERS: Final = ("tinyint", "smallint", "mediumint", "int", "integer", "bigint", "oid")
_MARIADB: Final[Mapping[str, Form]] = {
    **dict.fromkeys((*_INTEGERS, "decimal", "float", "double"), Form("{}", _number)),
    "year": Form("{} + 0", _number),
    "bit": Form("{} + 0", _number),
    "bit(1)": Form("{} + 0", lambda value: bool(int(value))),
    **dict.fromkeys(("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"),
                    Form("to_base64({})", _bytes, True)),
    "date": Form("date_format({}, '%Y-%m-%d')", _date),
    "datetime": Form("date_format({}, '%Y-%m-%d %H:%i:%s.%f')", _datetime),
    "timestamp": Form("unix_timestamp({})", _instant),
    "time": Form("concat({}, '')", _time),
}  # fmt: skip
_POSTGRES: Final[Mapping[str, Form]] = {
    **dict.fromkeys((*_INTEGERS, "numeric", "real", "double precision"), Form("{}", _number)),
    "boolean": Form("{}", bool),
    "bytea": Form("encode({}, 'base64')", _bytes, True),
    "timestamp without time zone": Form("{}::text", _datetime),
    "timestamp with time zone": Form("{}::text", _instant),
    "time without time zone": Form("{}::text", _time),
    "time with time zone": Form("{}::text", _time),
}
_MARIADB_TEXT: Final = Form("concat({}, '')", str)
_POSTGRES_TEXT: Final = Form("{}::text", str)
_POSTGRES_LIST: Final = Form("array_to_json({})::text", _list)
_SQLITE: Final = Form("{}", _as_is)
_SQLITE_BLOB: Final = Form("hex({})", _hex, True)


def form_of(engine: str, column: Column) -> Form:
    """Return how values of a column are read."""
    if engine == "mariadb":
        return _MARIADB.get(column.type, _MARIADB_TEXT)
    if engine == "sqlite":
        return _SQLITE_BLOB if column.type == "blob" else _SQLITE
    return _POSTGRES_LIST if column.type.endswith("[]") else _POSTGRES.get(column.type, _POSTGRES_TEXT)


def is_number(form: Form) -> bool:
    """Return whether the values are numbers, with all of their digits."""
    return form.value in (_number, _as_is)


def value_of(form: Form, raw: Any) -> Any:
    """Return the JSON value of an expression's result. A zero date is None, even if the column is NOT NULL."""
    return None if raw is None else form.value(raw)


def order_of(value: Any) -> Any:
    """Return a number or text that sorts like the values of a column, apart from collations."""
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1)
    if isinstance(value, date):
        return value.toordinal() * 86_400_000_000
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    return value


def before(value: Any, much: float) -> Any:
    """Return the value that is `much` (a number, or seconds) before `value`. A text is returned unchanged."""
    if isinstance(value, datetime):
        return value - timedelta(seconds=much)
    if isinstance(value, date):
        return value - timedelta(days=math.ceil(much / 86_400))
    if isinstance(value, Decimal):
        return value - Decimal(str(much))
    if isinstance(value, int):
        return value - math.ceil(much)
    return value - much if isinstance(value, float) else value


def to_json(value: Any) -> list[str]:
    """Return a value of a column as JSON, for `from_json`."""
    return [type(value).__name__, value.isoformat() if isinstance(value, date) else str(value)]


def from_json(encoded: list[str]) -> Any:
    """Invert :func:`to_json`."""
    kind, text = encoded
    readers: dict[str, Callable[[str], Any]] = {
        "datetime": datetime.fromisoformat, "date": date.fromisoformat, "Decimal": Decimal, "int": int, "float": float,
    }  # fmt: skip
    return readers.get(kind, str)(text)
