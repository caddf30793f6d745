"""Suites written by users, as Great Expectations JSON: one file per collection, validated before any check runs.

    <quality folder>/<collection name>.json
    {"expectations": [{"type": "expect_column_values_to_be_between", "severity": "warning",
                       "kwargs": {"column": "delay", "min_value": -120}, "meta": {"name": "delay-sane"}}]}

A file exported from Great Expectations works unchanged: `name`, `id`, `notes` and `meta` of the suite are ignored. An
expectation without a severity is critical. The columns are the collection's fields and those that Millrace adds
(``_partition``, ``_partition_id``, ``_time_tick`` ...).

Functions here raise InvalidSuite, which names the file, the place and the error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, get_args

from millrace.base.errors import InvalidSuite
from millrace.base.settings import Settings
from millrace.operations.quality.checks import CRITICAL, Check, Severity
from millrace.operations.quality.results import quality_path

SUITE_KEYS: Final = frozenset({"name", "id", "expectations", "meta", "notes", "suite_parameters"})
EXPECTATION_KEYS: Final = frozenset(
    {"type", "kwargs", "meta", "severity", "id", "notes", "description", "rendered_content", "expectation_context"}
)
SEVERITIES: Final = get_args(Severity)


def suites_folder(settings: Settings) -> Path:
    """Return the folder of the users' suites."""
    return Path(settings.quality_dir) if settings.quality_dir else quality_path(settings)


def suite_file(settings: Settings, collection: str) -> Path:
    """Return the path of a collection's suite. The file need not exist."""
    return suites_folder(settings) / f"{collection}.json"


def read_suite(settings: Settings, collection: str, columns: Iterable[str]) -> tuple[Check, ...]:
    """Return the checks of the suite of `collection`, or none without a file. Does not look up expectation types."""
    if "/" in collection or collection.startswith("."):
        return ()  # no file can have that name
    path = suite_file(settings, collection)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSuite(f"{path}: the file cannot be read: {error}") from error
    return parse_suite(text, where=str(path), columns=columns)


def parse_suite(text: str, *, where: str, columns: Iterable[str]) -> tuple[Check, ...]:
    """Parse a suite. Raises InvalidSuite, whose message begins with `where`."""
    try:
        suite = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidSuite(f"{where}: line {error.lineno}, column {error.colno}: invalid JSON: {error.msg}") from error
    if not isinstance(suite, dict) or not isinstance(suite.get("expectations"), list):
        raise InvalidSuite(f'{where}: a suite must be an object with a list "expectations"')
    _require_keys(suite, SUITE_KEYS, where)
    known = frozenset(columns)
    checks: list[Check] = []
    for number, item in enumerate(suite["expectations"]):
        check = _check(item, f"{where}: expectations[{number}]", known)
        if any(each.name == check.name for each in checks):
            raise InvalidSuite(
                f"{where}: expectations[{number}]: the name {check.name!r} is already used; set a different meta.name"
            )
        checks.append(check)
    return tuple(checks)


def _check(item: Any, where: str, columns: frozenset[str]) -> Check:
    if not isinstance(item, dict) or not isinstance(item.get("type"), str):
        raise InvalidSuite(f'{where}: an expectation must be an object with a string "type"')
    _require_keys(item, EXPECTATION_KEYS, where)
    kwargs, meta = item.get("kwargs") or {}, item.get("meta") or {}
    if not isinstance(kwargs, dict) or not isinstance(meta, dict):
        raise InvalidSuite(f"{where} ({item['type']}): kwargs and meta must be objects")
    severity = item.get("severity", CRITICAL)
    if severity not in SEVERITIES:
        raise InvalidSuite(f"{where} ({item['type']}): severity {severity!r} must be one of {', '.join(SEVERITIES)}")
    for name in _columns(kwargs):
        if name not in columns:
            raise InvalidSuite(
                f"{where} ({item['type']}): the collection has no column {name!r}; it has {', '.join(sorted(columns))}"
            )
    arguments = {key: value for key, value in kwargs.items() if key != "batch_id"}
    name = meta.get("name") or f"{item['type']}:{_short(arguments)}"
    words = meta.get("notes") or item.get("description") or item.get("notes") or ""
    if not isinstance(name, str) or not isinstance(words, str):
        raise InvalidSuite(f"{where} ({item['type']}): meta.name and notes must be strings")
    return Check(f"user:{name}", item["type"], arguments, words, severity, "user")


def _columns(kwargs: Mapping[str, Any]) -> list[str]:
    """Return the columns that an expectation names."""
    found = [kwargs[key] for key in ("column", "column_A", "column_B") if isinstance(kwargs.get(key), str)]
    listed = kwargs.get("column_list")
    return found + ([each for each in listed if isinstance(each, str)] if isinstance(listed, list) else [])


def _require_keys(value: Mapping[str, Any], keys: frozenset[str], where: str) -> None:
    unknown = sorted(set(value) - keys)
    if unknown:
        raise InvalidSuite(f"{where}: unknown key {unknown[0]!r}; the allowed keys are {', '.join(sorted(keys))}")


def _short(arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, sort_keys=True, default=str)
    column = arguments.get("column")
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{column}:{digest}" if isinstance(column, str) else digest
