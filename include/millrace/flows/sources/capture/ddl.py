"""The effect of a DDL statement on the rows of a captured table.

A database logs the statement, but not the rows that it changes. So the existing rows must be read again, unless the
statement changes no value: an index, a column that is null in all of them, a longer type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final

_INTEGERS: Final = ("TINYINT", "SMALLINT", "MEDIUMINT", "INT", "BIGINT")
_DROPS_COLUMN: Final = re.compile(
    r"\bdrop\s+(?!index\b|key\b|foreign\b|primary\b|constraint\b|check\b|partition\b|system\b|period\b)", re.IGNORECASE
)
_REMOVES_ROWS: Final = re.compile(
    r"\b(drop|truncate|exchange|convert|discard|import)\s+(partition|tablespace|table)\b", re.IGNORECASE
)
_CONVERTS: Final = re.compile(r"\bconvert\s+to\b", re.IGNORECASE)
_IDENTIFIER: Final = re.compile(r'"((?:[^"]|"")*)"')

_SETS: Final = re.compile(r"^\s*set\b|\b(database|schema)\b", re.IGNORECASE)
"""Statements without a table that the parser needs for later ones, such as the character set of a database."""
_NAME: Final = re.compile(r"(?:`[^`]+`|[\w$]+)(?:\.(?:`[^`]+`|[\w$]+))?")
_MOVED: Final = re.compile(
    rf"\s*alter\s+(?:ignore\s+)?table\s+(?:if\s+exists\s+)?({_NAME.pattern})\s.*"
    rf"\brename\s+(?:to\s+|as\s+|=\s*)?(?!column\b|index\b|key\b)({_NAME.pattern})",
    re.IGNORECASE | re.DOTALL,
)


class Effect(Enum):
    """A capture's action after a statement."""

    NOTHING = "nothing"
    """Rows keep their values; columns may be added or dropped with the next row."""
    READ = "read"
    """Read the existing rows again."""
    REPLACE = "replace"
    """Rows may have been removed: the existing rows replace all earlier ones."""


def table_of(change: Mapping[str, Any]) -> str:
    """Return the table of one of Debezium's table changes, as ``database.table``."""
    return ".".join(each.replace('""', '"') for each in _IDENTIFIER.findall(change["id"])[-2:])


def renamed_tables(statement: str, table: str) -> set[str]:
    """Return the tables that a statement renames from or to, as ``database.table``.

    `table` is a table of the same database.
    """
    if re.match(r"\s*rename\s+tables?\b", statement, re.IGNORECASE):
        names = _NAME.findall(statement)
    else:
        moved = _MOVED.match(statement)
        names = [] if moved is None else [moved[1], moved[2]]
    database = table.partition(".")[0]
    plain = (each.replace("`", "") for each in names)
    return {each if "." in each else f"{database}.{each}" for each in plain}


def current_records(history: Sequence[str], offset: Mapping[str, Any]) -> list[str]:
    """Return the records of the engine's schema history that it needs to continue from `offset`, in order.

    The newest record before the offset defines a table. Without this, the history would grow with each statement
    forever.
    """
    records = [json.loads(each) for each in history]
    newest: dict[str, int] = {}
    for number, record in enumerate(records):
        if _applies(record, offset):
            newest |= dict.fromkeys(_touched(record), number)
    tables: set[str] = set()
    needed = []
    for number, (text, record) in enumerate(zip(history, records, strict=True)):
        if _applies(record, offset):
            changes = record.get("tableChanges") or ()
            if not changes and not _SETS.search(record.get("ddl") or ""):
                continue
            if changes and number not in {newest[each] for each in _touched(record)}:
                continue
            there = {each["id"] for each in changes if each["type"] != "DROP"}
            if changes and not there and not tables & _touched(record):
                continue  # a table that no record creates
            tables |= there
        needed.append(text)
    return needed


def records_after(history: Sequence[str], offset: Mapping[str, Any] | None) -> list[str]:
    """Return the records of the schema history that an engine writes again if it continues from `offset`."""
    return [each for each in history if offset is None or not _applies(json.loads(each), offset)]


def _touched(record: Mapping[str, Any]) -> set[str]:
    changes = record.get("tableChanges") or ()
    return {each[name] for each in changes for name in ("id", "previousId") if each.get(name)}


def _applies(record: Mapping[str, Any], offset: Mapping[str, Any]) -> bool:
    """Return whether a record of the log is before `offset`, for any form of the engine's positions."""
    place = record.get("position", {})
    if place.get("snapshot"):
        return True
    if "file" not in place or "file" not in offset or _file(place) > _file(offset):
        return False
    if _file(place) == _file(offset) and place["pos"] >= offset["pos"]:
        return False
    passed = dict(newest_gtids(offset).values())
    return all(number <= passed.get(domain, -1) for domain, number in _gtids(place))


def _file(position: Mapping[str, Any]) -> tuple[str, int]:
    base, _, number = str(position["file"]).rpartition(".")
    return base, int(number) if number.isdigit() else 0


def newest_gtids(position: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the newest GTID of each domain of a position, with its domain and number.

    The engine lists one for each server that wrote into a domain, as after a failover. A position has one of them.
    """
    newest: dict[str, tuple[int, str]] = {}
    for each in str(position.get("gtids") or "").split(","):
        domain, _, rest = each.strip().partition("-")
        if rest:
            newest[domain] = max(newest.get(domain, (-1, "")), (int(rest.rpartition("-")[2]), each.strip()))
    return {gtid: (domain, number) for domain, (number, gtid) in newest.items()}


def _gtids(position: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for each in str(position.get("gtids") or "").split(","):
        domain, _, rest = each.partition("-")
        if rest:
            yield domain, int(rest.rpartition("-")[2])


def effect_of(statement: str, change: Mapping[str, Any], before: Mapping[str, Any] | None) -> Effect:
    """Return the effect of the `statement`, with one of its table changes, on that table's rows.

    `before` is the table's earlier definition in Debezium's form; None if unknown.
    """
    table = change.get("table")
    if change["type"] != "ALTER" or table is None or before is None or _REMOVES_ROWS.search(statement):
        return Effect.REPLACE
    if renamed_tables(statement, table_of(change)):
        return Effect.REPLACE
    old = {each["name"]: each for each in before["columns"]}
    new = {each["name"]: each for each in table["columns"]}
    if before["primaryKeyColumnNames"] != table["primaryKeyColumnNames"]:
        return Effect.REPLACE
    added, dropped = new.keys() - old.keys(), old.keys() - new.keys()
    if (added and dropped) or _CONVERTS.search(statement):
        return Effect.READ
    if not dropped and _DROPS_COLUMN.search(statement):  # and added again
        return Effect.READ
    if any(not _is_null(new[name]) for name in added):
        return Effect.READ
    same = all(_keeps_values(old[name], new[name], statement) for name in old.keys() & new.keys())
    return Effect.NOTHING if same else Effect.READ


def _is_null(column: Mapping[str, Any]) -> bool:
    """Return whether an added column is null in the existing rows."""
    default = column.get("defaultValueExpression")
    nothing = default is None or str(default).upper() == "NULL"
    return bool(column["optional"] and nothing and not column["generated"] and not column["autoIncremented"])


def _keeps_values(old: Mapping[str, Any], new: Mapping[str, Any], statement: str) -> bool:
    """Return whether a column's values do not change."""
    if old["generated"] or new["generated"]:
        return bool(old["generated"] and new["generated"]) and old["name"].lower() not in statement.lower()
    if old["optional"] and not new["optional"]:  # without strict mode, nulls become zeros
        return False
    kinds = str(old["typeName"]).upper(), str(new["typeName"]).upper()
    if kinds[0] == kinds[1]:
        if old["charsetName"] != new["charsetName"] or (old.get("scale") or 0) != (new.get("scale") or 0):
            return False
        if kinds[0] in _INTEGERS:
            return True
        values, others = old.get("enumValues") or [], new.get("enumValues") or []
        return (old["length"] or 0) <= (new["length"] or 0) and others[: len(values)] == values
    return all(each in _INTEGERS for each in kinds) and _INTEGERS.index(kinds[0]) < _INTEGERS.index(kinds[1])
