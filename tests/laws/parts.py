"""The values of the reference model (model.py): a message, what its payload means, and the pieces of the state."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from millrace.message.types import MessageType
from millrace.wal.reasons import Reason

T = MessageType
Id = tuple[int, int, int, int]
Row = dict[str, Any]

DAY_MS = 86_400_000
CHAIN_VERSIONS = (1, 2, 3, 4, 5)
SINCE = {T.ALTER_WAL: 2, T.IMPORT: 3, T.UPSERT: 4}
GENERATION = 1 << 48
"""Ledgers of one generation of the log."""
ENDED_REMEMBERED = 64

DEFAULTS: dict[str, int] = {
    "max_message_bytes": 16 << 20,
    "segment_bytes": 123 << 20,
    "segment_rows": 1 << 40,
    "segment_lifetime_ms": DAY_MS,
    "segment_idle_bytes": 16 << 20,
    "segment_idle_ms": 600_000,
    "blocking_delete_rows": 5_000_000,
    "max_txn_keepalive_ms": 600_000,
    "default_txn_keepalive_ms": 10_000,
    "max_txn_lifetime_ms": 3_600_000,
    "max_txn_bytes": 256 << 20,
    "max_open_txns": 1024,
    "dedup_results": 16,
    "max_producers": 1024,
    "max_vchannels": 1024,
    "max_partitions": 4096,
}


Key = int | str | tuple[int | str, ...]
"""A primary key; a tuple of several fields."""


@dataclass(frozen=True)
class Batch:
    """What a DML payload holds.

    One Arrow record batch of these (name, type, nullable), its keys, fields with a null.
    """

    fields: tuple[tuple[str, str, bool], ...]
    rows: int
    keys: tuple[Key, ...]
    nulls: frozenset[str] = frozenset()
    numbers: tuple[int, ...] = ()
    """By row what its numbers are, but for computed ones, which are twice as much."""
    computed_as: int | None = None
    """What computed fields are all the same."""


@dataclass(frozen=True)
class Msg:
    """One message of an entry. `payload` are its bytes; `batch` says what they mean for DML (None: no record batch)."""

    type: int
    vchannel: str = ""
    term: int = 1
    collection_id: int = 0
    partition_id: int = 0
    schema_version: int = 0
    rows: int = 0
    txn_id: int = 0
    producer_id: int = 0
    epoch: int = 0
    sequence: int = 0
    barrier_tick: int = 0
    payload: bytes = b""
    batch: Batch | None = None


def undecoded(value: bytes) -> Msg:
    """What stands for an entry that does not decode."""
    return Msg(T.UNDEFINED, term=0, payload=value)


class Refused(Exception):
    """A rejection, raised before anything was changed."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass
class Txn:
    vchannel: str
    collection_id: int
    txn_id: int
    begin: Id
    begin_tick: int
    keepalive_ms: int
    renewed: int
    bytes: int = 0


@dataclass
class Segment:
    id: int
    vchannel: str
    collection_id: int
    partition_id: int
    deletes_before: int
    rows: int = 0
    bytes: int = 0
    last_insert: int = 0
    policy: str | None = None  # None: growing; else sealed
    txns: list[Txn] = field(default_factory=list)


Result = tuple[int, Id, int, Reason | None]  # (sequence, id, tick, reason)


def continues(last: Result, result: Result) -> bool:
    """Whether a result belongs to the run that `last` ends: accepted, the next message of the entry, the next tick."""
    (ledger, entry, index, ordinal) = last[1]
    following = (last[0] + 1, (ledger, entry, index + 1, ordinal), last[2] + 1, None)
    return last[3] is None and result == following


@dataclass
class Producer:
    epoch: int
    next: int
    last_tick: int
    runs: list[list[Result]] = field(default_factory=list)


Field = tuple[str, str, bool]
"""Name, type, whether it may be null."""


@dataclass
class VChannel:
    collection_id: int
    vchannels: list[str]
    primary_keys: dict[int, tuple[str, ...]]
    """The key's names by schema version."""
    schemas: dict[int, list[Field]]
    partitions: dict[str, int]
    rules: dict[int, Any] = field(default_factory=dict)
    """By schema version (rules.py)."""
    replaces: bool = False
    mvcc: int = 0
    deletes: int = 0
    forgotten: int = 0
    producers: dict[int, Producer] = field(default_factory=dict)
    ended: list[tuple[int, str]] = field(default_factory=list)


def splitmix64(x: int) -> int:
    """The first output of SplitMix64 seeded with `x`."""
    mask = (1 << 64) - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def body_of(message: Msg, *, empty: bool = False) -> dict[str, Any]:
    """The JSON object of a control message's payload; refuses what is none."""
    if empty and message.payload == b"":
        return {}
    try:
        body = json.loads(message.payload.decode())
    except ValueError:
        raise Refused(Reason.MALFORMED, "no JSON") from None
    if not isinstance(body, dict):
        raise Refused(Reason.MALFORMED, "no JSON object")
    return body


def checked_files(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The files of an Import's body; refuses a body that is of another shape."""
    files, replace = body.get("files"), body.get("replace")
    right = set(body) == {"import_id", "files", "replace"} and isinstance(body["import_id"], str) and body["import_id"]
    if not right or not isinstance(files, list) or not isinstance(replace, bool) or not (files or replace):
        raise Refused(Reason.MALFORMED, "import")
    for each in files:
        if not isinstance(each, dict) or set(each) != {"path", "partition_id", "rows", "bytes", "digest"}:
            raise Refused(Reason.MALFORMED, "file")
        if not all(is_int(each[name]) and each[name] > 0 for name in ("partition_id", "rows", "bytes")):
            raise Refused(Reason.MALFORMED, "number")
        path, digest = each["path"], each["digest"]
        if not isinstance(path, str) or any(name[:1] in ("", ".") for name in path.split("/")) or "\\" in path:
            raise Refused(Reason.MALFORMED, "path")
        if not isinstance(digest, str) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise Refused(Reason.MALFORMED, "digest")
    if len({each["path"] for each in files}) < len(files):
        raise Refused(Reason.MALFORMED, "twice")
    return files


def changes_of(body: dict[str, Any], *, several: bool) -> list[dict[str, Any]]:
    """The changes that a SchemaChange's body says; refuses a body of another shape."""
    wanted = body["changes"] if set(body) == {"changes"} and several else [{"op": "add", "field": body.get("add")}]
    if not isinstance(wanted, list) or not wanted:
        raise Refused(Reason.MALFORMED, "changes")
    for each in wanted:
        said = set(each) - {"op"} if isinstance(each, dict) and each.get("op") in SAYS else set()
        if not said or said != SAYS[each["op"]]:
            raise Refused(Reason.MALFORMED, "change")
        if each["op"] == "add" and not (
            isinstance(each["field"], dict)
            and set(each["field"]) - ({"default", "computed"} if several else set()) == {"name", "type", "nullable"}
            and len(each["field"]) < 5
        ):
            raise Refused(Reason.MALFORMED, "field")
    return wanted


SAYS: dict[str, set[str]] = {
    "add": {"field"},
    "drop": {"name"},
    "rename": {"name", "to"},
    "reorder": {"names"},
    "widen": {"name", "type"},
    "rename_part": {"name", "path", "to"},
    "drop_part": {"name", "path"},
    "relax": {"name"},
    "set_default": {"name", "default"},
    "drop_default": {"name"},
    "add_check": {"name", "condition"},
    "drop_check": {"name"},
}


def changed(fields: list[Field], key: tuple[str, ...], change: dict[str, Any]) -> tuple[list[Field], tuple[str, ...]]:
    """The fields and the key's names after one change; refuses one that cannot be."""
    named = {field[0]: field for field in fields}
    if change["op"] in ("add_check", "drop_check"):
        return fields, key
    wanted = change.get("names", [change["name"]] if "name" in change else [])
    if not set(wanted) <= set(named) or len(set(wanted)) < len(wanted):
        raise Refused(Reason.SCHEMA_MISMATCH, "no such field")
    if set(key) & set(wanted) and change["op"] not in ("rename", "reorder", "set_default", "drop_default"):
        raise Refused(Reason.SCHEMA_MISMATCH, "key")
    match change:
        case {"op": "add", "field": {"name": name, "type": kind, "nullable": nullable}}:
            fields = [*fields, (name, kind, True)]
            if not nullable:
                raise Refused(Reason.SCHEMA_MISMATCH, "nullable")
        case {"op": "drop", "name": name}:
            fields = [each for each in fields if each[0] != name]
        case {"op": "rename", "name": name, "to": to}:
            fields = [(to, *each[1:]) if each[0] == name else each for each in fields]
            key = tuple(to if each == name else each for each in key)
        case {"op": "reorder"}:
            fields = [*(named[name] for name in wanted), *(each for each in fields if each[0] not in wanted)]
        case {"op": "widen", "name": name, "type": kind}:
            if (named[name][1], kind) != ("int32", "int64"):
                raise Refused(Reason.SCHEMA_MISMATCH, "type")
            fields = [(name, kind, each[2]) if each[0] == name else each for each in fields]
        case {"op": "rename_part" | "drop_part", "name": name, "path": path}:
            kind = _without(named[name][1], path, change.get("to"))
            fields = [(name, kind, each[2]) if each[0] == name else each for each in fields]
        case {"op": "relax", "name": name}:
            fields = [(*each[:2], True) if each[0] == name else each for each in fields]
    if len({name.casefold() for name, _, _ in fields}) < len(fields):
        raise Refused(Reason.SCHEMA_MISMATCH, "twice")
    return fields, key


def _without(kind: str, path: list[str], to: str | None) -> str:
    """A struct's type once one of its parts has another name, or is gone.

    The drawn logs have none in which structs lie deeper.
    """
    parts = dict(
        each.split(": ") for each in kind.removeprefix("struct<").removesuffix(">").split(", ") if ": " in each
    )
    if path[0] not in parts or len(path) > 1 or to in parts or (to is None and len(parts) == 1):
        raise Refused(Reason.SCHEMA_MISMATCH, "part")
    left = [
        (to if name == path[0] else name, each) for name, each in parts.items() if to is not None or name != path[0]
    ]
    return f"struct<{', '.join(f'{name}: {each}' for name, each in left)}>"


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def key_bytes(key: Key) -> bytes:
    """What of a primary key is hashed."""
    match key:
        case tuple():
            return b"".join(map(_field_bytes, key))
        case str():
            return key.encode()
        case _:
            return key.to_bytes(8, "little", signed=True)


def _field_bytes(value: int | str) -> bytes:
    if isinstance(value, str):
        return value.encode().replace(b"\0", b"\0\xff") + b"\0\1"
    return (value + (1 << 63)).to_bytes(8, "big")


def home(key: Key, count: int) -> int:
    """The place of a primary key among `count` VChannels: FNV-1a 64, folded."""
    value = 0xCBF29CE484222325
    for byte in key_bytes(key):
        value = ((value ^ byte) * 0x100000001B3) % (1 << 64)
    return (value ^ (value >> 32)) % count
