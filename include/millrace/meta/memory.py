"""A meta store in memory, for the simulator and for a cluster inside one process. Thread-safe."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millrace.base.closeable import Closeable
from millrace.base.errors import LeaseNotFound
from millrace.meta.store import (
    RETAINED_REVISIONS,
    Delete,
    Entry,
    Event,
    EventBatch,
    Listing,
    Mutation,
    Put,
    RevisionEquals,
    check_commit,
    check_revision,
    check_seconds,
)


@dataclass(slots=True)
class _Lease:
    seconds: float
    ends: float
    keys: set[str] = field(default_factory=set)


class MemoryStore(Closeable):
    """A MetaStore in memory.

    `monotonic` is the store's clock, in seconds. `retained_revisions` stay readable.
    """

    def __init__(self, monotonic: Callable[[], float], *, retained_revisions: int = RETAINED_REVISIONS) -> None:
        self._monotonic = monotonic
        self._retained = retained_revisions
        self._lock = threading.RLock()
        self._revision = 0
        self._compacted = 0
        self._keys: list[str] = []
        self._entries: dict[str, Entry] = {}
        self._events: list[Event] = []
        """Events after `_compacted`, oldest first."""
        self._leases: dict[int, _Lease] = {}
        self._last_lease = 0
        self._earliest_end = float("inf")

    @property
    def revision(self) -> int:
        return self._revision

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def get(self, key: str) -> Entry | None:
        with self._lock:
            self._expire()
            return self._entries.get(key)

    def list(self, prefix: str, *, revision: int | None = None) -> Listing:
        with self._lock:
            self._expire()
            low, high = bisect_left(self._keys, prefix), bisect_left(self._keys, prefix + "\x7f")
            there = {key: self._entries[key] for key in self._keys[low:high]}
            if revision is None or revision == self._revision:
                return Listing(self._revision, tuple(there.values()))
            check_revision(revision, newest=self._revision, compacted=self._compacted)
            return Listing(revision, self._as_of(revision, prefix, there))

    def _as_of(self, revision: int, prefix: str, now: dict[str, Entry]) -> tuple[Entry, ...]:
        """Return the entries at `revision`: those untouched since, and the last earlier event of the others."""
        first = bisect_right(self._events, revision, key=lambda event: event.revision)
        touched = {event.key for event in self._events[first:] if event.key.startswith(prefix)}
        then = {key: entry for key, entry in now.items() if key not in touched}
        for event in self._events[:first]:
            if event.key in touched:
                if event.entry is None:
                    then.pop(event.key, None)
                else:
                    then[event.key] = event.entry
        return tuple(then[key] for key in sorted(then))

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        check_commit(then, when)
        with self._lock:
            self._expire()
            for condition in when:
                entry = self._entries.get(condition.key)
                if (0 if entry is None else entry.modified) != condition.revision:
                    return None
            for change in then:
                if isinstance(change, Put) and change.lease and change.lease not in self._leases:
                    raise LeaseNotFound(f"the lease {change.lease} has ended: nothing was written")
            return self._write(then)

    def _write(self, then: Sequence[Mutation]) -> int:
        revision = self._revision = self._revision + 1
        for change in then:
            old = self._entries.get(change.key)
            if old is not None and old.lease:
                self._leases[old.lease].keys.discard(change.key)
            if isinstance(change, Delete):
                if old is None:
                    continue
                del self._entries[change.key]
                self._keys.pop(bisect_left(self._keys, change.key))
                self._events.append(Event(revision, change.key, None))
                continue
            if old is None:
                insort(self._keys, change.key)
            created = revision if old is None else old.created
            entry = Entry(change.key, change.value, created, revision, change.lease)
            self._entries[change.key] = entry
            if change.lease:
                self._leases[change.lease].keys.add(change.key)
            self._events.append(Event(revision, change.key, entry))
        if revision - self._compacted > 2 * self._retained:
            self._compact(revision - self._retained)
        return revision

    def grant(self, seconds: float) -> int:
        check_seconds(seconds)
        with self._lock:
            self._expire()
            self._last_lease += 1
            self._leases[self._last_lease] = _Lease(seconds, self._monotonic() + seconds)
            self._earliest_end = min(self._earliest_end, self._monotonic() + seconds)
            return self._last_lease

    def renew(self, lease: int) -> None:
        with self._lock:
            self._expire()
            if lease not in self._leases:
                raise LeaseNotFound(f"the lease {lease} has ended")
            self._leases[lease].ends = self._monotonic() + self._leases[lease].seconds

    def revoke(self, lease: int) -> None:
        with self._lock:
            self._expire()
            if lease in self._leases:
                self._end([lease])

    def _expire(self) -> None:
        now = self._monotonic()
        if now < self._earliest_end:
            return
        self._end([number for number, lease in self._leases.items() if lease.ends <= now])
        self._earliest_end = min((lease.ends for lease in self._leases.values()), default=float("inf"))

    def _end(self, leases: Sequence[int]) -> None:
        for number in leases:
            if keys := sorted(self._leases[number].keys):
                self._write([Delete(key) for key in keys])
            del self._leases[number]

    def changes(self, prefix: str, *, after: int) -> EventBatch:
        with self._lock:
            self._expire()
            check_revision(after, newest=self._revision, compacted=self._compacted)
            first = bisect_right(self._events, after, key=lambda event: event.revision)
            found = tuple(event for event in self._events[first:] if event.key.startswith(prefix))
            return EventBatch(self._revision, found)

    def compact(self, revision: int) -> None:
        with self._lock:
            if revision > self._compacted:
                check_revision(revision, newest=self._revision, compacted=self._compacted)
                self._compact(revision)

    def _compact(self, revision: int) -> None:
        """Keep the last put of each key before `revision`: later listings are built from it."""
        first = bisect_right(self._events, revision, key=lambda event: event.revision)
        last = {event.key: event for event in self._events[:first]}
        puts = [event for event in last.values() if event.entry is not None]
        self._events[:first] = sorted(puts, key=lambda event: event.revision)
        self._compacted = revision
