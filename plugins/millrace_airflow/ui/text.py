"""The format of numbers, sizes, durations and moments on the pages (filters of the templates)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from markupsafe import Markup, escape

NOTHING: Final = "\N{EN DASH}"
"""The text for a missing value."""

_MOMENTS: Final = ("at", "since", "started_at", "ended_at", "expected_start")
"""Names of facts that are moments if they are numbers: Unix seconds."""

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def count(value: float | None) -> str:
    """Format 1234567 as 1,234,567."""
    return NOTHING if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Format 1234567 as 1.23 M."""
    if value is None:
        return NOTHING
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g} {unit}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.1f}"


def size(value: float | None) -> str:
    """Format bytes in binary units."""
    if value is None:
        return NOTHING
    for unit in _UNITS[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def duration(value: float | None) -> str:
    """Format seconds in the unit that fits."""
    if value is None:
        return NOTHING
    if value < 1:
        return "0 s" if value == 0 else f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{value // 60:.0f} min {value % 60:.0f} s"
    if value < 86400:
        return f"{value // 3600:.0f} h {value % 3600 // 60:.0f} min"
    return f"{value // 86400:.0f} d {value % 86400 // 3600:.0f} h"


def exact(value: float | None) -> str:
    """Format a moment in Unix seconds as UTC."""
    if value is None:
        return NOTHING
    try:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"
    except (ValueError, OverflowError, OSError):
        return NOTHING


def age(value: float | None) -> Markup:
    """Return a moment as a <time> that the page's script keeps relative, with the exact one on hover and without
    script."""
    if value is None:
        return Markup('<span class="none">\N{EN DASH}</span>')
    return Markup('<time data-at="{:.3f}" title="{}">{}</time>').format(value, exact(value), exact(value)[:19])


def as_json(value: Any) -> str:
    """Return a value as JSON for an attribute (which the template escapes)."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def pretty(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(value, ensure_ascii=False, indent=2, default=str)


def words(name: str) -> str:
    """Return ``small_file_bytes`` as `small file bytes`."""
    return name.replace("_", " ")


def fact(value: Any, name: str = "") -> str:
    """Format a plain value of a report, by the unit at the end of its name."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.endswith("bytes"):
        return size(value)
    if isinstance(value, int | float) and (name.endswith("seconds") or name == "took"):
        return duration(value)
    if name in _MOMENTS and isinstance(value, int | float) and 1e9 <= value < 1e11:
        return exact(value)
    if name.endswith(("tick", "ticks")) and str(value).isdigit() and int(value) >> 18:
        return f"{value} ({exact((int(value) >> 18) / 1000)})"
    if isinstance(value, int):
        return str(value) if name.endswith(("id", "version", "term", "pid")) else count(value)
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


_CODE: Final = re.compile(r"(?<!`)`(?!\s)([^`\n]+)(?<!\s)`(?!`)")


def code(value: Any) -> Markup:
    """Return text whose parts in backticks are code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(value))))


def picked(value: str) -> str | None:
    """Return a moment in the form of a date-time picker, in UTC; "" for nothing, None if no picker can hold it."""
    if not value.strip():
        return ""
    try:
        moment = datetime.fromisoformat(value.strip().replace(" ", "T"))
    except ValueError:
        return None
    return (moment if moment.tzinfo is None else moment.astimezone(UTC)).replace(tzinfo=None).isoformat()


def without(value: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a mapping without some of its names."""
    return {name: each for name, each in value.items() if name not in names}


FILTERS: Final = {
    "without": without,
    "code": code,
    "picked": picked,
    "words": words,
    "fact": fact,
    "count": count,
    "short": short,
    "size": size,
    "duration": duration,
    "exact": exact,
    "age": age,
    "as_json": as_json,
    "pretty": pretty,
}
