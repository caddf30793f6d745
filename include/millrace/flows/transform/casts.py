"""Casts of values to other types. They never guess: neither ``"12a"`` nor 2.5 is an integer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from millrace.flows.documents import Digits, Refused

_FLOATS: Final = (float, Digits)
_INT: Final = re.compile(r"[+-]?\d{1,40}", re.ASCII)
_FLOAT: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECONDS_BELOW: Final = 10**11
_MILLISECONDS_BELOW: Final = 10**14
"""Seconds since 1970 reach this number in the year 5138; milliseconds did in 1973."""


def _no(value: Any, wanted: str) -> Refused:
    text = repr(value)
    return Refused("CAST", f"{text[:80]}{'…' if len(text) > 80 else ''} is not a valid {wanted}")


def to_string(value: Any) -> str:
    if type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    if type(value) is Digits:
        return value.text
    if type(value) is bool or type(value) is float:
        return msgspec.json.encode(value).decode()
    raise _no(value, "string")


def to_int(value: Any) -> int:
    kind = type(value)
    if kind is int:
        return value
    if kind is bool:
        return int(value)
    if kind in _FLOATS and value.is_integer():
        return int(value)
    if kind is str and _INT.fullmatch(text := value.strip()):
        return int(text)
    raise _no(value, "int")


def to_float(value: Any) -> float:
    kind = type(value)
    try:
        if kind in _FLOATS or kind is int or (kind is str and _FLOAT.fullmatch(value.strip())):
            number = float(value)
            if math.isfinite(number):
                return number
    except OverflowError:
        pass
    raise _no(value, "float")


_BOOLS: Final = {"true": True, "false": False, "1": True, "0": False}


def to_bool(value: Any) -> bool:
    if type(value) is bool:
        return value
    if (type(value) is int or type(value) in _FLOATS) and value in (0, 1):
        return bool(value)
    if type(value) is str and (found := _BOOLS.get(value.strip().lower())) is not None:
        return found
    raise _no(value, "bool")


def to_timestamp(value: Any) -> str:
    """Return ISO 8601 in UTC, with as many digits of a second as needed. A text without a zone is UTC."""
    kind = type(value)
    try:
        if kind is str:
            moment = datetime.fromisoformat(value.strip())
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        elif kind is int or (kind in _FLOATS and math.isfinite(value)):
            size = abs(value)
            scale = 1_000_000 if size < _SECONDS_BELOW else 1_000 if size < _MILLISECONDS_BELOW else 1
            moment = _EPOCH + timedelta(microseconds=round(value * scale))
        else:
            raise _no(value, "timestamp")
    except (ValueError, OverflowError):
        raise _no(value, "timestamp") from None
    return moment.isoformat().replace("+00:00", "Z")


CASTS: Final[dict[str, Callable[[Any], Any]]] = {
    "string": to_string,
    "int": to_int,
    "float": to_float,
    "bool": to_bool,
    "timestamp": to_timestamp,
}
