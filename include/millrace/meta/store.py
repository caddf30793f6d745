"""The protocol of a meta store, its values, and what every implementation checks before it does anything.

A store is a map from keys to bytes with one revision for all of it. Each commit that changes something takes the next
revision; every entry knows in which it was made and in which it was last written. Whatever needs agreement is a commit that
holds only while the entries that its writer read are as they were.

An answer that was lost is an error of its own (MetaAmbiguous): the commit stands or does not, and only reading tells. What
raises MetaUnavailable was not done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from millrace.base.errors import InvalidArgument, RevisionCompacted

MAX_KEY: Final = 256
"""Characters of a key: letters, digits and ``._:/@-``."""
MAX_VALUE: Final = 512 * 1024
"""Bytes of a value."""
MAX_BYTES: Final = 1 << 20
"""Bytes of all values of one commit: etcd takes 1.5 MiB by default."""
MAX_CHANGES: Final = 128
"""Puts and deletes of one commit, as etcd has it."""
RETAINED_REVISIONS: Final = 10_000
"""Revisions behind the newest that a store keeps by itself: older ones are compacted away."""

_KEY: Final = re.compile(rf"[A-Za-z0-9._:/@-]{{1,{MAX_KEY}}}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key as it stands."""

    key: str
    value: bytes
    created: int
    """The revision in which the key came to be; another one after it was deleted and put again."""
    modified: int
    """The revision of its last put."""
    lease: int = 0
    """The lease with whose end the key goes, 0 for none."""


@dataclass(frozen=True, slots=True)
class RevisionEquals:
    """A condition: the key was last put in `revision`; 0: it is not there."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Take a key away; no effect where it is not there."""

    key: str


Mutation: TypeAlias = Put | Delete


@dataclass(frozen=True, slots=True)
class Listing:
    """The entries under a prefix, by key, all as of one revision."""

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """What one revision did to one key: `entry` is what it is since, None where it went."""

    revision: int
    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class EventBatch:
    """All events behind the revision that was asked for up to `revision`, oldest first; ask on from there."""

    revision: int
    events: tuple[Event, ...]


class MetaStore(Protocol):
    """Every call raises MetaUnavailable where nothing was done. Those that write raise MetaAmbiguous where the answer was lost."""

    def get(self, key: str) -> Entry | None: ...

    def list(self, prefix: str, *, revision: int | None = None) -> Listing:
        """What stands under `prefix` ("" for all), now or as of `revision`. Raises RevisionCompacted."""
        ...

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        """Make all changes in one new revision, and only where all conditions hold: that revision, or None where one does
        not. Raises LeaseNotFound for a put with a lease that has ended, InvalidArgument."""
        ...

    def grant(self, seconds: float) -> int:
        """A lease that ends `seconds` after its last renewal, by the store's clock, and not earlier; its number."""
        ...

    def renew(self, lease: int) -> None:
        """Raises LeaseNotFound where it has ended: its keys are gone or go now, and it comes back no more."""
        ...

    def revoke(self, lease: int) -> None:
        """End a lease, and take its keys away in one revision; no effect where it has ended."""
        ...

    def changes(self, prefix: str, *, after: int) -> EventBatch:
        """What happened under `prefix` behind the revision `after`. Raises RevisionCompacted: list anew, and go on from
        the listing's revision; InvalidArgument for a revision that is not there yet (another store's)."""
        ...

    def compact(self, revision: int) -> None:
        """Forget what was before `revision`: older listings and changes are RevisionCompacted from now on."""
        ...

    def close(self) -> None: ...


def check_commit(then: Sequence[Mutation], when: Sequence[RevisionEquals]) -> None:
    """Raises InvalidArgument for a commit that no store takes."""
    if not then or len(then) > MAX_CHANGES or len(when) > MAX_CHANGES:
        raise InvalidArgument(f"a commit has 1 to {MAX_CHANGES} changes and at most as many conditions")
    keys = [change.key for change in then]
    if len(set(keys)) != len(keys):
        raise InvalidArgument("a commit changes a key once")
    for key in [*keys, *(each.key for each in when)]:
        if _KEY.fullmatch(key) is None:
            raise InvalidArgument(f"{key[:80]!r} is no key: 1 to {MAX_KEY} letters, digits and ._:/@-")
    if (size := sum(len(change.value) for change in then if isinstance(change, Put))) > MAX_BYTES:
        raise InvalidArgument(f"a commit's values have {size:,} bytes; at most {MAX_BYTES:,}")
    for change in then:
        if isinstance(change, Put) and len(change.value) > MAX_VALUE:
            raise InvalidArgument(f"the value of {change.key} has {len(change.value):,} bytes; at most {MAX_VALUE:,}")


def check_revision(revision: int, *, newest: int, compacted: int) -> None:
    """Raises InvalidArgument for a revision that is not there yet, RevisionCompacted for one that is not there any more."""
    if revision > newest:
        raise InvalidArgument(f"revision {revision} is not there: the newest is {newest}")
    if revision < compacted:
        raise RevisionCompacted(
            f"revision {revision} was compacted away: list anew, the earliest is {compacted}", earliest=compacted
        )


def check_seconds(seconds: float) -> None:
    """Raises InvalidArgument for the length of a lease that no store takes."""
    if not 0.1 <= seconds <= 86_400:
        raise InvalidArgument(f"a lease lasts 0.1 s to a day, not {seconds} s")
