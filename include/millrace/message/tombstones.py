"""Tombstones: what readers of a log see in place of an entry that no host can judge.

Such an entry parks its PChannel. If no host has judged it and no commit covers it, the log's server replaces it
(millrace.node.append.tombstones). From then on every reader gets :attr:`Tombstone.value` under its id: bytes that are
not an entry in any version of the wire form. So the chain records one MALFORMED rejection with them, which says who
replaced what, and why. The log itself keeps the entry. The tombstones are listed with the generations
(millrace.log.generations.listing), and every read of a log passes through :func:`apply_tombstones`.

A tombstone is first proposed: until it is placed, nobody reads that entry in either form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import pyarrow as pa

from millrace.base.errors import InvalidArgument, LogRegressed, LogUnavailable
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA

MAX_TOMBSTONES: Final = 64
"""Maximum tombstones in the readable part of one PChannel's log: each marks a lost entry that a person
explained."""
MAX_AUTHOR_BYTES: Final = 128
MAX_REASON_BYTES: Final = 512

MAX_VALUE_BYTES: Final = 2048
PREFIX: Final = b"MLRT 1\n"
"""The prefix of a tombstone's value; no entry starts with it (docs/wire-form.md)."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The replacement of one entry."""

    pchannel: str
    entry: LogId
    """The id in the whole log."""
    sha256: str
    """The SHA-256 of the replaced bytes, in lower-case hex."""
    author: str
    reason: str
    at: str
    """UTC, ISO 8601."""
    placed: bool = False
    """Whether readers see it. Otherwise it is proposed, and nobody reads that entry."""

    def __post_init__(self) -> None:
        for name, most in (("author", MAX_AUTHOR_BYTES), ("reason", MAX_REASON_BYTES)):
            text: str = getattr(self, name)
            if not text.strip() or not text.isprintable() or len(text.encode("utf-8", "replace")) > most:
                raise InvalidArgument(
                    f"the {name} of a tombstone is one line of 1 to {most:,} bytes, not {text[:80]!r}"
                )
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise InvalidArgument(f"the checksum of an entry is its sha256 in lower-case hex, not {self.sha256[:80]!r}")

    @property
    def value(self) -> bytes:
        """The bytes that every reader gets, permanently."""
        said = {"author": self.author, "at": self.at, "reason": self.reason, "sha256": self.sha256}
        said |= {"entry": str(self.entry), "pchannel": self.pchannel}
        return PREFIX + json.dumps(said, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()

    def as_placed(self) -> Self:
        """Return this tombstone as readers see it."""
        return replace(self, placed=True)

    def to_json(self) -> dict[str, Any]:
        return {
            "entry": list(self.entry), "sha256": self.sha256, "author": self.author, "reason": self.reason,
            "at": self.at, "placed": self.placed,
        }  # fmt: skip

    @classmethod
    def from_json(cls, pchannel: str, data: Mapping[str, Any]) -> Self:
        ledger, entry = data["entry"]
        texts = {name: str(data[name]) for name in ("sha256", "author", "reason", "at")}
        return cls(pchannel, LogId(int(ledger), int(entry)), placed=bool(data["placed"]), **texts)


def describe_value(value: bytes) -> str | None:
    """Describe a tombstone's value for people; None for any other value."""
    if not value.startswith(PREFIX):
        return None
    try:
        said = json.loads(value[len(PREFIX) :])
        return (
            f"a tombstone of {said['at']} by {said['author']}, in the place of an entry with the sha256"
            f" {said['sha256']}:"
            f" {said['reason']}"
        )
    except (ValueError, LookupError, TypeError):
        return None


TombstoneMap = Mapping[LogId, Tombstone]
"""The tombstones of one PChannel's log, by entry."""


def entry_sha256(value: bytes | memoryview | pa.Buffer) -> str:
    """Return the digest that identifies the bytes of an entry."""
    return hashlib.sha256(value).hexdigest()


def apply_tombstones(batch: pa.RecordBatch, standing: TombstoneMap) -> pa.RecordBatch:
    """Return entries (ENTRY_SCHEMA, ids of the whole log) as readers see them, up to one that is being replaced.

    Raises LogUnavailable if the first entry is being replaced.
    Raises LogRegressed if an entry has other bytes than those that were replaced.
    """
    ledger, entry = batch.column("ledger").to_numpy(), batch.column("entry").to_numpy()
    places = {}
    for each in sorted(standing):
        found = ((ledger == each.ledger) & (entry == each.entry)).nonzero()[0]
        if len(found):
            places[int(found[0])] = standing[each]
    for place, tombstone in places.items():
        if not tombstone.placed:
            if place == 0:
                raise LogUnavailable(
                    f"entry {tombstone.entry} of {tombstone.pchannel} is being replaced by a tombstone: ask again;"
                    " where that"
                    " was interrupted, the same millrace log tombstone, or a restart of the log's server, completes it"
                )
            return _replaced(batch, places).slice(0, place)
    return _replaced(batch, places)


def _replaced(batch: pa.RecordBatch, places: Mapping[int, Tombstone]) -> pa.RecordBatch:
    values = batch.column("value")
    pieces, done = [], 0
    for place, tombstone in places.items():
        if not tombstone.placed:
            break
        if entry_sha256(values[place].as_buffer()) != tombstone.sha256:
            raise LogRegressed(
                f"entry {tombstone.entry} of {tombstone.pchannel} is not the one that {tombstone.author} replaced by a"
                f" tombstone at {tombstone.at}: the log was cut and written again; restore it before going on"
            )
        pieces += [values.slice(done, place - done), pa.array([tombstone.value], pa.large_binary())]
        done = place + 1
    if not pieces:
        return batch
    values = pa.concat_arrays([*pieces, values.slice(done)])
    return pa.RecordBatch.from_arrays([*batch.columns[:3], values], schema=ENTRY_SCHEMA)
