"""What one setting is: what may be said of it where it is declared, and how its value is read from text and checked."""

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
_BYTES: Final = re.compile(r"(\d+)\s*([KMGT]iB|B)?", re.IGNORECASE)
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_URLS: Final = frozenset({"log", "spark_master", "meta_store"})
_SECRET: Final = re.compile(r"[?&][^=&]*(passw|secret|token|username|jaas|credential|key\.pem)", re.IGNORECASE)


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
) -> Any:
    """A field of Settings with what `Settings.load` checks and `describe` prints. `allowed` puts `pattern` in words."""
    metadata = {
        "words": words,
        "env": env,
        "low": low,
        "high": high,
        "pattern": pattern,
        "allowed": allowed,
        "bytes": is_bytes,
    }
    return field(default=default, metadata=metadata)


class SettingSpec(NamedTuple):
    """What is known about one setting besides its value."""

    name: str
    env: str
    type: str
    default: Any
    metadata: Mapping[str, Any]


def parse(spec: SettingSpec, raw: Any, where: str) -> Any:
    """The value of `spec` that `raw` (text, or what TOML gives) stands for. Raises InvalidSettings."""
    text = str(raw).strip()
    if not _plain(text):
        raise InvalidSettings(f"{where} = {text!r}: give text in UTF-8, without a zero byte")
    value: Any = None
    if spec.type == "Path":
        value = Path(text).expanduser() if text else None
        if value is None or not value.is_absolute():
            raise InvalidSettings(f"{where} = {text!r}: give an absolute path")
    elif spec.type == "bool":
        value = True if text.lower() in _TRUE else False if text.lower() in _FALSE else None
        if value is None:
            raise InvalidSettings(f"{where} = {text!r}: give true or false")
    elif spec.metadata["bytes"]:
        match = _BYTES.fullmatch(text)
        if match is None:
            raise InvalidSettings(f"{where} = {text!r}: give bytes, such as 65536, 512KiB or 64MiB")
        value = int(match[1]) * _UNITS[(match[2] or "").upper()]
    elif spec.type == "int":
        if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) is None:
            raise InvalidSettings(f"{where} = {text!r}: give a whole number")
        value = int(text)
    elif spec.type == "float":
        try:
            value = float(text)
        except ValueError:
            raise InvalidSettings(f"{where} = {text!r}: give a number of seconds") from None
    else:
        value = text
    check(spec, value, where)
    return value


def _plain(text: str) -> bool:
    """Whether `text` is UTF-8 (an environment may hold any bytes) and no C library ends it early."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def without_credentials(url: str, where: str) -> str:
    """`url`, which holds no credentials: it goes into errors, listings, backups. Raises InvalidSettings that shows nothing of it."""
    scheme, _, rest = url.partition("://")
    place = unquote(rest.partition("?")[0])
    if (backend := find_backend(scheme)) is not None and backend.local:
        place = place.partition("/")[0]  # a folder may be called as it likes
    if "@" in place or _SECRET.search(unquote(rest)):
        raise InvalidSettings(
            f"{where} holds credentials, which no URL may: take them out, and set MILLRACE_LOG_USERNAME"
            " and MILLRACE_LOG_PASSWORD, or MILLRACE_LOG_TOKEN; who may have seen them should not be able to use them any more"
        )
    return url


def check(spec: SettingSpec, value: Any, where: str) -> None:
    """Raises InvalidSettings where `value` lies outside what the setting allows (NaN lies outside everything)."""
    if spec.name in _URLS:
        without_credentials(value, where)
    if spec.name == "log":
        check_log_url(value, where)
    low, high, pattern = spec.metadata["low"], spec.metadata["high"], spec.metadata["pattern"]
    if low is not None and not low <= value <= high:
        raise InvalidSettings(f"{where} = {value}: allowed is {low} to {high}")
    if pattern is not None and not pattern.fullmatch(value):
        raise InvalidSettings(f"{where} = {value!r}: allowed is {spec.metadata['allowed']}")
