"""Declare, parse and check one setting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from millrace.base.errors import InvalidSettings
from millrace.base.log_backends import check_log_url, find_backend

_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_BYTES: Final = re.compile(r"(\d{1,18})\s*([KMGT]iB|B)?", re.IGNORECASE)
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_URLS: Final = {
    "log": "set MILLRACE_LOG_USERNAME and MILLRACE_LOG_PASSWORD, or MILLRACE_LOG_TOKEN",
    "spark_master": "give them to Spark in its own files",
    "meta_store": "set MILLRACE_META_USERNAME and MILLRACE_META_PASSWORD",
    "tables": "put them into the environment or a profile of the store (docs/object-stores.md)",
}
"""The settings that are URLs, and where their credentials belong."""
_SECRET: Final = re.compile(
    r"[?&][^=&]*(passw|secret|token|username|jaas|credential|key\.pem|signature|(access|account).?key|\bsig=)",
    re.IGNORECASE,
)


def setting(
    default: Any,
    words: str,
    *,
    env: str | None = None,
    low: float | None = None,
    high: float | None = None,
    pattern: re.Pattern[str] | None = None,
    allowed: str | None = None,
    is_bytes: bool = False,
    live: bool = False,
) -> Any:
    """Declare a field of Settings with its checks and its description. `allowed` describes `pattern` for people.

    A `live` setting may change while Millrace runs (millrace.base.settings.live).
    """
    metadata = {
        "words": words,
        "env": env,
        "low": low,
        "high": high,
        "pattern": pattern,
        "allowed": allowed,
        "bytes": is_bytes,
        "live": live,
    }
    return field(default=default, metadata=metadata)


class SettingSpec(NamedTuple):
    """The declaration of one setting, without its value."""

    name: str
    env: str
    type: str
    default: Any
    metadata: Mapping[str, Any]


def parse(spec: SettingSpec, raw: Any, where: str) -> Any:
    """Parse `raw` (text, or a TOML value) as a value of `spec`. Raises InvalidSettings."""
    text = str(raw).strip()
    if not _plain(text):
        raise InvalidSettings(f"{where} = {text!r}: use UTF-8 text without a NUL byte")
    value: Any = None
    if spec.type == "Path":
        value = Path(text).expanduser() if text else None
        if value is None or not value.is_absolute():
            raise InvalidSettings(f"{where} = {text!r}: use an absolute path")
    elif spec.type == "bool":
        value = True if text.lower() in _TRUE else False if text.lower() in _FALSE else None
        if value is None:
            raise InvalidSettings(f"{where} = {text!r}: use true or false")
    elif spec.metadata["bytes"]:
        match = _BYTES.fullmatch(text)
        if match is None:
            raise InvalidSettings(f"{where} = {text!r}: use a number of bytes, such as 65536, 512KiB or 64MiB")
        value = int(match[1]) * _UNITS[(match[2] or "").upper()]
    elif spec.type == "int":
        if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) is None:
            raise InvalidSettings(f"{where} = {text!r}: use a whole number")
        value = int(text)
    elif spec.type == "float":
        try:
            value = float(text)
        except ValueError:
            raise InvalidSettings(f"{where} = {text!r}: use a number of seconds") from None
    else:
        value = text
    check(spec, value, where)
    return value


def _plain(text: str) -> bool:
    """Return whether `text` is UTF-8 (an environment may hold any bytes) and has no NUL, which ends a C string."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def without_credentials(url: str, where: str, *, setting: str = "log") -> str:
    """Return `url` after checking that it holds no credentials: it appears in errors, listings and backups.

    `setting` names one of the settings that are URLs. Raises InvalidSettings without showing any part of the URL.
    """
    scheme, separator, rest = url.partition("://")
    place = unquote(rest.partition("?")[0])
    if setting == "tables":
        if not separator or scheme == "file":
            return url
        place = place.partition("/")[0]  # names of objects may hold any characters
    elif (backend := find_backend(scheme)) is not None and backend.local:
        place = place.partition("/")[0]  # a folder's name may hold any characters
    if "@" in place or _SECRET.search(unquote(rest)):
        raise InvalidSettings(
            f"{where} holds credentials, which a URL must not: remove them and {_URLS[setting]}; revoke the exposed"
            " ones"
        )
    return url


def check(spec: SettingSpec, value: Any, where: str) -> None:
    """Check `value` against the limits of its setting. Raises InvalidSettings; NaN is outside every range."""
    if spec.name in _URLS:
        without_credentials(value, where, setting=spec.name)
    if spec.name == "log":
        check_log_url(value, where)
    low, high, pattern = spec.metadata["low"], spec.metadata["high"], spec.metadata["pattern"]
    if low is not None and not low <= value <= high:
        raise InvalidSettings(f"{where} = {value}: allowed is {low} to {high}")
    if pattern is not None and not pattern.fullmatch(value):
        raise InvalidSettings(f"{where} = {value!r}: allowed is {spec.metadata['allowed']}")
