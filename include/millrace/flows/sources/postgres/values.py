"""Texts of PostgreSQL's values as JSON, in the forms of docs/capture.md, and the fields of a collection for them.

The engine does the same in java/PostgresValues.java; a test checks both against one table of forms. The session has the
settings of `SESSION`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Final

SESSION: Final = {
    "DateStyle": "ISO",
    "IntervalStyle": "iso_8601",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "extra_float_digits": "3",
}
"""Settings of sessions that return values as texts."""

_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_MOMENT: Final = re.compile(r"([0-9]{4,}-[0-9]{2}-[0-9]{2}) ([0-9:]{8})(\.[0-9]+)?(\+00)?")
_CLOCK: Final = re.compile(r"([0-9:]{8})(\.[0-9]+)?([-+][0-9:]+)?")


def json_of(text: str, kind: str) -> str:
    """Return the JSON of a value's text. `kind` is a base type's name in pg_type: ``int4``, ``_text``."""
    if kind.startswith("_"):
        return _array(text, ";" if kind == "_box" else ",", _FORMS.get(kind[1:], _text))
    return _FORMS.get(kind, _text)(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _number(text: str) -> str:
    return text if _NUMBER.fullmatch(text) else _text(text)


def _money(text: str) -> str:
    return _number(text.replace("$", "").replace(",", ""))


def _bool(text: str) -> str:
    return "true" if text.startswith("t") else "false"


def _moment(text: str) -> str:
    found = _MOMENT.fullmatch(text)
    if found is None:  # infinity, and years BC
        return _text(text)
    return f'"{found[1]}T{found[2]}{_micros(found[3])}{"Z" if found[4] else ""}"'


def _clock(text: str) -> str:
    found = _CLOCK.fullmatch(text)
    return _text(text) if found is None else f'"{found[1]}{_micros(found[2])}{found[3] or ""}"'


def _micros(fraction: str | None) -> str:
    return f"{fraction or '.'}000000"[:7]


def _bytes(text: str) -> str:
    return f'"{base64.b64encode(bytes.fromhex(text.removeprefix(chr(92) + "x"))).decode()}"'


_FORMS: Final[dict[str, Callable[[str], str]]] = {
    **dict.fromkeys(("int2", "int4", "int8", "oid", "float4", "float8", "numeric"), _number),
    "money": _money,
    "bool": _bool,
    "timestamp": _moment,
    "timestamptz": _moment,
    "time": _clock,
    "timetz": _clock,
    "bytea": _bytes,
}
"""Converters by type. Other types stay texts."""


def _array(text: str, delimiter: str, form: Callable[[str], str]) -> str:
    """Return an array's text as a list, nested for each dimension, without its bounds."""
    place = text.index("=") + 1 if text.startswith("[") else 0
    element = re.compile(rf'"((?:[^"\\]|\\.)*)"|((?:[^"\\{{}}{delimiter}]|\\.)+)', re.DOTALL)
    found: list[str] = []
    while place < len(text):
        each = text[place]
        if each in "{}":
            found.append("[" if each == "{" else "]")
        elif each == delimiter:
            found.append(",")
        else:
            matched = element.match(text, place)
            assert matched is not None, "this is PostgreSQL's form of arrays"
            value = re.sub(r"\\(.)", r"\1", matched[matched.lastindex or 0], flags=re.DOTALL)
            found.append("null" if matched.lastindex == 2 and value.upper() == "NULL" else form(value))
            place = matched.end()
            continue
        place += 1
    return "".join(found)
