"""Stored events: those of one aggregate and their fold, and a digest of the states of all.

The digest of a set of states is the sum of their 128-bit xxh3 hashes. So it depends on neither their order nor the
parts in which they were folded. It finds faults, not forgeries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from millrace.base.errors import EventStreamDamaged
from millrace.client.collection import Collection
from millrace.message.keys import key_hashes
from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.events import ERASED
from millrace.streams.sourcing.snapshots import Snapshot

S = TypeVar("S")

_COLUMNS: Final = ["aggregate", "version", "type", "type_version", "data"]
_ORDER: Final = [("aggregate", "ascending"), ("version", "ascending")]
_BITS: Final = 128


@dataclass(slots=True)
class Rebuilt:
    """The aggregates at a tick: their number, the number of their events, and a digest of their states."""

    tick: int
    aggregates: int = 0
    events: int = 0
    _sum: int = 0

    def add(self, key: str, version: int, state: str, events: int) -> None:
        """Add an aggregate with its state's canonical JSON."""
        self.aggregates += 1
        self.events += events
        self._sum = (self._sum + _hash(key, version, state)) % (1 << _BITS)

    @property
    def digest(self) -> str:
        """32 hex digits."""
        return f"{self._sum:032x}"


def digest_of(states: Iterable[tuple[str, int, str]]) -> str:
    """Return the digest of aggregates: keys, versions and canonical JSON of their states."""
    found = Rebuilt(0)
    for key, version, state in states:
        found.add(key, version, state, 0)
    return found.digest


def _hash(key: str, version: int, state: str) -> int:
    return xxhash.xxh3_128_intdigest(f"{len(key)}:{key}:{version}:{state}".encode())


def sorted_events(collection: Collection, tick: int, part: int, parts: int) -> pa.Table:
    """Return the events at a tick of one of `parts` parts of the aggregates, sorted by aggregate and version."""
    found = []
    with collection.stream(at=tick, columns=_COLUMNS) as reader:
        for batch in reader:
            if parts > 1:
                # Not the hash's low bits alone: they are those of the VChannel.
                mine = (key_hashes(batch.column("aggregate")) >> np.uint64(20)) % np.uint64(parts) == part
                batch = batch.filter(pa.array(mine))
            found.append(batch)
        schema = reader.schema
    return pa.Table.from_batches(found, schema).sort_by(_ORDER)


class Events:
    """The events of one aggregate, by version."""

    def __init__(self, key: str, rows: pa.Table) -> None:
        """`rows` are sorted by version."""
        self.key = key
        self.rows = rows
        self.versions: npt.NDArray[np.int64] = rows["version"].to_numpy()

    def __len__(self) -> int:
        return len(self.versions)

    def appended_by(self, command: UUID) -> list[int]:
        """Return the versions whose events a command has appended."""
        found: list[int] = self.versions[pc.equal(self.rows["command"], str(command)).to_numpy()].tolist()
        return found

    def erased_after(self, version: int) -> bool:
        """Return whether the events up to a version were erased."""
        return bool(len(self)) and self.rows["type"][0].as_py() == ERASED and int(self.versions[0]) > version

    def check(self) -> None:
        """Raise EventStreamDamaged unless the versions are consecutive, from 1 or from an erasure."""
        first = int(self.versions[0])
        wanted = first if self.rows["type"][0].as_py() == ERASED else 1
        gaps = np.flatnonzero(np.diff(self.versions) != 1)
        if first == wanted and not len(gaps):
            return
        what = f"begin at {first}"
        if first == wanted:
            place = int(gaps[0])
            what = f"version {self.versions[place + 1]} comes where {self.versions[place] + 1} should"
        raise EventStreamDamaged(
            f"the events of aggregate {self.key!r} have a gap or a repetition ({what}): something else than an event"
            " store wrote to the collection; find it in the WAL"
        )

    def fold(self, aggregate: Aggregate[S], state: S, begin: int = 0) -> S:
        """Return the state after the events from place `begin` on.

        Raises EventUndecodable, and what the fold raises.
        """
        decode, fold = aggregate.events.decode, aggregate.fold
        rest = self.rows.slice(begin)
        columns = (rest[name].to_pylist() for name in ("type", "type_version", "data"))
        for kind, version, data in zip(*columns, strict=True):
            state = aggregate.initial() if kind == ERASED else fold(state, decode(kind, version, data))
        return state

    def state(self, aggregate: Aggregate[S], snapshot: Snapshot[S] | None) -> S:
        """Return the state after all events. A snapshot is used if its event is among them.

        Raises EventStreamDamaged, EventUndecodable, and what the fold raises.
        """
        if not len(self):
            return aggregate.initial()
        self.check()
        if snapshot is not None:
            place = snapshot.version - int(self.versions[0])
            if 0 <= place < len(self) and self.rows["command"][place].as_py() == str(snapshot.command):
                return self.fold(aggregate, snapshot.state, place + 1)
        return self.fold(aggregate, aggregate.initial())


def split_events(rows: pa.Table) -> Iterator[Events]:
    """Yield the events of each aggregate of sorted rows."""
    if not rows.num_rows:
        return
    rows = rows.combine_chunks()
    encoded = pc.run_end_encode(rows["aggregate"].combine_chunks())
    encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
    start = 0
    for key, end in zip(encoded.values.to_pylist(), encoded.run_ends.to_pylist(), strict=True):
        yield Events(key, rows.slice(start, end - start))
        start = end


def events_by_key(rows: pa.Table, keys: Iterable[str]) -> dict[str, Events]:
    """Return the events of each key, of rows in any order."""
    none = rows.slice(0, 0)
    found = {each.key: each for each in split_events(rows.sort_by(_ORDER))}
    return {key: found.get(key) or Events(key, none) for key in keys}
