"""The protocol of a meta store, its values, and the checks that every implementation makes first.

A store maps keys to bytes and has one revision for all of it. Each commit that changes something takes the next
revision; every entry knows the revision that created it and the one that last wrote it. Whatever needs agreement is a
commit that succeeds only if the entries that its writer read are unchanged.

A lost answer raises MetaAmbiguous: the commit took effect or did not, and only reading tells. MetaUnavailable means
that nothing was done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from millrace.base.errors import InvalidArgument, RevisionCompacted

MAX_KEY: Final = 256
"""Maximum characters of a key: letters, digits and ``._:/@-``."""
MAX_VALUE: Final = 512 * 1024
"""Maximum bytes of a value."""
MAX_BYTES: Final = 1 << 20
"""Maximum bytes of all values of one commit; etcd accepts 1.5 MiB by default."""
MAX_CHANGES: Final = 128
"""Maximum puts and deletes of one commit, as in etcd."""
RETAINED_REVISIONS: Final = 10_000
"""Revisions that a store keeps by itself; older ones are compacted away."""

_KEY: Final = re.compile(rf"[A-Za-z0-9._:/@-]{{1,{MAX_KEY}}}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key with its value."""

    key: str
    value: bytes
    created: int
    """The revision that created the key; a key that was deleted and put again has a new one."""
    modified: int
    """The revision of its last put."""
    lease: int = 0
    """The lease that the key ends with; 0 for none."""


@dataclass(frozen=True, slots=True)
class RevisionEquals:
    """A condition: the key's last put was in `revision`; 0: the key does not exist."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key; no effect if it does not exist."""

    key: str


Mutation: TypeAlias = Put | Delete


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries under a prefix, ordered by key, all as of one revision."""

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """The effect of one revision on one key: `entry` is its new value, None if it was deleted."""

    revision: int
    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class EventBatch:
    """All events after the requested revision up to `revision`, oldest first; continue from there."""

    revision: int
    events: tuple[Event, ...]


class MetaStore(Protocol):
    """The meta store's protocol.

    Every call raises MetaUnavailable if nothing was done. Writes raise MetaAmbiguous if the answer was lost.
    """

    def get(self, key: str) -> Entry | None: ...

    def list(self, prefix: str, *, revision: int | None = None) -> Listing:
        """Return the entries under `prefix` ("" for all), now or as of `revision`. Raises RevisionCompacted."""
        ...

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        """Apply all changes in one new revision if all conditions hold.

        Returns that revision, or None if a condition does not hold.
        Raises LeaseNotFound if a put names a lease that has ended, InvalidArgument.
        """
        ...

    def grant(self, seconds: float) -> int:
        """Grant a lease that ends `seconds` after its last renewal by the store's clock, and not earlier. Returns its
        id.
        """
        ...

    def renew(self, lease: int) -> None:
        """Renew a lease. Raises LeaseNotFound if it has ended: its keys are gone, and it cannot be revived."""
        ...

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys in one revision; no effect if it has ended."""
        ...

    def changes(self, prefix: str, *, after: int) -> EventBatch:
        """Return the events under `prefix` after the revision `after`.

        Raises RevisionCompacted: list again, and continue from the listing's revision.
        Raises InvalidArgument if the revision does not exist yet (it is another store's).
        """
        ...

    def compact(self, revision: int) -> None:
        """Discard the history before `revision`: older listings and changes raise RevisionCompacted from now on."""
        ...

    def close(self) -> None: ...


def check_commit(then: Sequence[Mutation], when: Sequence[RevisionEquals]) -> None:
    """Check a commit against the limits of all stores. Raises InvalidArgument."""
    if not then or len(then) > MAX_CHANGES or len(when) > MAX_CHANGES:
        raise InvalidArgument(f"a commit has 1 to {MAX_CHANGES} changes and at most as many conditions")
    keys = [change.key for change in then]
    if len(set(keys)) != len(keys):
        raise InvalidArgument("a commit may change each key once")
    for key in [*keys, *(each.key for each in when)]:
        if _KEY.fullmatch(key) is None:
            raise InvalidArgument(f"{key[:80]!r} is not a key: use 1 to {MAX_KEY} letters, digits and ._:/@-")
    if (size := sum(len(change.value) for change in then if isinstance(change, Put))) > MAX_BYTES:
        raise InvalidArgument(f"a commit's values have {size:,} bytes; at most {MAX_BYTES:,}")
    for change in then:
        if isinstance(change, Put) and len(change.value) > MAX_VALUE:
            raise InvalidArgument(f"the value of {change.key} has {len(change.value):,} bytes; at most {MAX_VALUE:,}")


def check_revision(revision: int, *, newest: int, compacted: int) -> None:
    """Check that a revision can be read.

    Raises InvalidArgument if it does not exist yet, RevisionCompacted if it was compacted.
    """
    if revision > newest:
        raise InvalidArgument(f"revision {revision} does not exist: the newest is {newest}")
    if revision < compacted:
        raise RevisionCompacted(
            f"revision {revision} was compacted away: list again, the earliest is {compacted}", earliest=compacted
        )


def check_seconds(seconds: float) -> None:
    """Check the length of a lease. Raises InvalidArgument."""
    if not 0.1 <= seconds <= 86_400:
        raise InvalidArgument(f"a lease lasts 0.1 s to a day, not {seconds} s")
