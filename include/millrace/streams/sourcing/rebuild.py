"""Folding stored events: of one aggregate, and of all of them with a digest.

The digest of a set of states is the sum of their 128-bit xxh3 hashes. So it depends on neither their order nor the
parts in which they were folded. It finds faults, not forgeries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

import numpy as np
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
    return pa.Table.from_batches(found, schema).sort_by([("aggregate", "ascending"), ("version", "ascending")])


class StreamFolder(Generic[S]):
    """Folds stored events of an aggregate, and checks that their versions are consecutive."""

    def __init__(self, aggregate: Aggregate[S]) -> None:
        self._aggregate = aggregate

    def fold(self, key: str, rows: Sequence[Mapping[str, Any]], snapshot: Snapshot[S] | None) -> tuple[S, int]:
        """Return the state and version of one aggregate of its rows, in any order.

        A snapshot is used if its event is among them. Raises EventStreamDamaged, EventUndecodable.
        """
        ordered = sorted(rows, key=lambda row: row["version"])
        if not ordered:
            return self._aggregate.initial(), 0
        versions = [row["version"] for row in ordered]
        _check(key, versions, ordered[0]["type"])
        begun, state = 0, self._aggregate.initial()
        if snapshot is not None:
            place = snapshot.version - versions[0]
            if 0 <= place < len(ordered) and UUID(str(ordered[place]["command"])) == UUID(str(snapshot.command)):
                begun, state = place + 1, snapshot.state
        rest = ordered[begun:]
        state = self._folded(state, ((row["type"], row["type_version"], row["data"]) for row in rest))
        return state, versions[-1]

    def extend(self, state: S, rows: Sequence[Mapping[str, Any]]) -> S:
        """Return the state after further events of its aggregate, in any order. Raises EventUndecodable."""
        ordered = sorted(rows, key=lambda row: row["version"])
        return self._folded(state, ((row["type"], row["type_version"], row["data"]) for row in ordered))

    def folded(self, table: pa.Table) -> Iterator[tuple[str, S, int, int]]:
        """Yield key, state, version and number of events of each aggregate of sorted events."""
        if not table.num_rows:
            return
        table = table.combine_chunks()
        encoded = pc.run_end_encode(table["aggregate"].combine_chunks())
        encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
        start = 0
        for key, end in zip(encoded.values.to_pylist(), encoded.run_ends.to_pylist(), strict=True):
            part = table.slice(start, end - start)
            versions = part["version"].to_pylist()
            kinds = part["type"].to_pylist()
            _check(key, versions, kinds[0])
            events = zip(kinds, part["type_version"].to_pylist(), part["data"].to_pylist(), strict=True)
            yield key, self._folded(self._aggregate.initial(), events), versions[-1], len(versions)
            start = end

    def _folded(self, state: S, events: Iterable[tuple[str, int, str]]) -> S:
        decode, fold = self._aggregate.events.decode, self._aggregate.fold
        for kind, version, data in events:
            state = self._aggregate.initial() if kind == ERASED else fold(state, decode(kind, version, data))
        return state


def _check(key: str, versions: Sequence[int], first: str) -> None:
    wanted = 1 if first != ERASED else versions[0]
    if versions[0] == wanted and versions[-1] - versions[0] + 1 == len(versions) == len(set(versions)):
        return
    expected = wanted
    for version in versions:
        if version != expected:
            break
        expected += 1
    what = f"version {version} comes where {expected} should" if versions[0] == wanted else f"begin at {versions[0]}"
    raise EventStreamDamaged(
        f"the events of aggregate {key!r} have a gap or a repetition ({what}): something else than an event store wrote"
        " to the collection; find it in the WAL"
    )
