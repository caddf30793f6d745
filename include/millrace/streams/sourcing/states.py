"""The states of aggregates: read from their events, and kept in a bounded cache.

Of an aggregate in the cache, a read fetches only the events since. Another is folded from all its events, or from those
after its snapshot.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import EventUndecodable, InvalidArgument, MillraceError, TickTooOld
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.client.produce.rows import key_rows
from millrace.message.ids import pchannel_of
from millrace.message.keys import vchannel_index
from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.rebuild import Events, events_by_key
from millrace.streams.sourcing.snapshots import Snapshots

S = TypeVar("S")

_log: Final = logging.getLogger(__name__)

_COLUMNS: Final = ("aggregate", "version", "type", "type_version", "data", "command")
_APPENDED: Final = pa.array(["insert", "upsert"])


@dataclass(slots=True)
class Known(Generic[S]):
    """An aggregate as it was read: it had `version` at `tick`."""

    state: S
    version: int
    tick: int
    lent: bool = False
    """Whether a caller may hold the state: then the next events are folded on a copy."""
    claimed: bool = False
    """Whether somebody folds further events on the state. Nobody else may use it then, nor its version's successor."""


class Read(NamedTuple):
    """An aggregate's events as a call has read them."""

    first: int
    """The first version that is known; 1 if all are."""
    events: Events


class States(Generic[S]):
    """The states of one event store. Thread-safe."""

    def __init__(
        self,
        database: Database,
        collection: Collection,
        aggregate: Aggregate[S],
        *,
        snapshots: Snapshots[S] | None,
        size: int,
    ) -> None:
        """`size` is the number of aggregates in the cache."""
        if size < 1:
            raise InvalidArgument(f"an event store caches 1 or more aggregates, not {size}")
        self._database = database
        self._collection = collection
        self._aggregate = aggregate
        self._snapshots = snapshots
        self._size = size
        self._guard = threading.Lock()
        self._entries: OrderedDict[str, Known[S]] = OrderedDict()
        self._ticks: dict[str, int] = {}
        """By PChannel a tick that was decided already."""

    def __len__(self) -> int:
        """Return the number of aggregates in the cache."""
        return len(self._entries)

    def cached(self, key: str, *, lend: bool = False) -> Known[S] | None:
        """Return an aggregate of the cache as it is there. With `lend`, the caller may keep the state."""
        with self._guard:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                found.lent |= lend
            return found

    def keep(self, key: str, entry: Known[S]) -> None:
        """Put an aggregate into the cache, unless it is newer there."""
        with self._guard:
            known = self._entries.get(key)
            if known is None or (known.version, known.tick) <= (entry.version, entry.tick):
                self._entries[key] = entry
                self._entries.move_to_end(key)
                while len(self._entries) > self._size:
                    self._entries.popitem(last=False)

    def claim(self, key: str, entry: Known[S]) -> bool:
        """Take an aggregate out of the cache to fold further events on its state. Returns whether nobody else does."""
        with self._guard:
            if self._entries.get(key) is entry:
                del self._entries[key]
            mine, entry.claimed = not entry.claimed, True
            return mine

    def read(
        self,
        keys: Sequence[str],
        at: int | None = None,
        *,
        lend: bool = False,
        failed: dict[str, MillraceError] | None = None,
        read: dict[str, Read] | None = None,
    ) -> dict[str, Known[S]]:
        """Return aggregates by key as of a tick, or now; then they are in the cache.

        Of an aggregate in the cache, only the events since are read. With `failed`, what cannot be folded is there
        instead of raised. `read` takes who appended the events that were read.
        """
        if not keys:
            return {}
        if at is not None:
            return self._read_whole(keys, dict.fromkeys(keys, at), at, lend, failed, read)
        observed = self._observed(keys)
        found = self._read_further(keys, observed, lend, failed, read)
        rest = [key for key in keys if key not in found and (failed is None or key not in failed)]
        return found | self._read_whole(rest, observed, None, lend, failed, read)

    def _read_whole(
        self,
        keys: Sequence[str],
        observed: Mapping[str, int],
        at: int | None,
        lend: bool,
        failed: dict[str, MillraceError] | None,
        read: dict[str, Read] | None,
    ) -> dict[str, Known[S]]:
        """Return aggregates folded from all their events."""
        if not keys:
            return {}
        # Before the events: a snapshot is then never newer than they are.
        taken = {} if self._snapshots is None else self._snapshots.load(keys, at)
        rows = self._collection.get(list(keys), at=at, columns=list(_COLUMNS))
        found = {}
        for key, events in events_by_key(rows, keys).items():
            with _failing(key, failed):
                state = events.state(self._aggregate, taken.get(key))
                version = int(events.versions[-1]) if len(events) else 0
                found[key] = Known(state, version, observed[key], lend)
            if key not in found:
                continue
            if read is not None:
                read[key] = Read(1, events)
            if at is None:
                self.keep(key, found[key])
                if key in taken and self._snapshots is not None and events.erased_after(taken[key].version):
                    self._forget(key)  # an erasure stopped before it could
        return found

    def _forget(self, key: str) -> None:
        assert self._snapshots is not None
        try:
            self._snapshots.forget(key)
        except MillraceError as error:  # a reader may not delete
            _log.warning("the snapshot of the erased events of %r was not deleted: %s", key, error)

    def _read_further(
        self,
        keys: Sequence[str],
        observed: Mapping[str, int],
        lend: bool,
        failed: dict[str, MillraceError] | None,
        read: dict[str, Read] | None,
    ) -> dict[str, Known[S]]:
        """Return those of the aggregates that are in the cache, with the events that were appended since.

        Leaves out an aggregate whose later changes do not follow on the cached version.
        """
        begun = {key: entry for key in keys if (entry := self.cached(key)) is not None}
        if not begun:
            return {}
        definition = self._collection.definition
        try:
            changes = self._database.tables.history(
                definition,
                key_rows(list(begun), definition),
                after=min(entry.tick for entry in begun.values()),
                until=None,
                seconds=self._database.settings.read_deadline,
                columns=_COLUMNS,
            )
        except TickTooOld:  # compaction folded what follows the cached tick
            return {}
        other = set(changes.filter(pc.invert(pc.is_in(changes["_change"], _APPENDED)))["aggregate"].to_pylist())
        found = {}
        for key, events in events_by_key(changes, begun.keys() - other).items():
            entry = begun[key]
            # The cached state may have events of after its tick, which was decided before they were read.
            newer = Events(key, events.rows.slice(int(np.searchsorted(events.versions, entry.version, side="right"))))
            count = len(newer)
            if not np.array_equal(newer.versions, np.arange(entry.version + 1, entry.version + 1 + count)):
                continue
            lent = entry.lent
            if not self.claim(key, entry):
                continue
            with _failing(key, failed):
                state = newer.fold(self._aggregate, deepcopy(entry.state) if lent or entry.lent else entry.state)
                found[key] = Known(state, entry.version + count, observed[key], lend)
                self.keep(key, found[key])
            if key in found and read is not None:
                read[key] = Read(entry.version + 1, newer)
        return found

    def version_after(self, key: str, command: UUID) -> int | None:
        """Return the version of an aggregate after a command's events; None if there are none of it."""
        rows = self._collection.get([key], columns=["version", "command"])
        found: int | None = pc.max(rows.filter(pc.equal(rows["command"], str(command)))["version"]).as_py()
        return found

    def _observed(self, keys: Sequence[str]) -> dict[str, int]:
        """Return by key a tick that is decided already: a read that follows has everything up to it."""
        channels = dict(zip(keys, map(pchannel_of, self.vchannels(keys)), strict=True))
        for name in sorted(set(channels.values()) - self._ticks.keys()):
            self.saw(name, self._database.current_tick([name]))
        return {key: self._ticks[name] for key, name in channels.items()}

    def saw(self, pchannel: str, tick: int) -> None:
        """Note that a PChannel was decided up to `tick`."""
        with self._guard:
            self._ticks[pchannel] = max(tick, self._ticks.get(pchannel, 0))

    def vchannels(self, keys: Sequence[str]) -> list[str]:
        """Return the VChannel of each aggregate."""
        names = self._collection.definition.vchannels
        return [names[place] for place in vchannel_index(pa.array(keys, pa.utf8()), len(names)).tolist()]


@contextmanager
def _failing(key: str, failed: dict[str, MillraceError] | None) -> Iterator[None]:
    """Note an aggregate that cannot be folded in `failed`, if there is one, instead of raising its error."""
    try:
        yield
    except Exception as error:
        if failed is None:
            raise
        if not isinstance(error, MillraceError):  # the fold is the user's code and may raise anything
            words = f"the events of aggregate {key!r} cannot be folded ({type(error).__name__}: {error})"
            error = EventUndecodable(f"{words}: correct the fold")
        failed[key] = error
