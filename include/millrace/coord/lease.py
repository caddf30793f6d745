"""A key that is held under a lease: a node's session, the leader's place.

The store counts a lease from when it gets a renewal. The holder counts from before it sent one, by its own monotonic clock,
and takes the difference that clocks may run apart off: so what it may do ends before anybody else can see the key gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millrace.base.errors import LeaseNotFound, MetaAmbiguous, MetaUnavailable
from millrace.coord.clock import Clock
from millrace.meta.store import MetaStore, Put, RevisionEquals

CLOCK_DRIFT: Final = 0.05
"""How far two monotonic clocks may run apart in a lease: its holder counts on so much less of it."""


class LeasedKey:
    """One key under leases of `seconds`; :meth:`step` takes and keeps it, :meth:`held` says whether it may be relied on."""

    def __init__(
        self, store: MetaStore, clock: Clock, *, key: Callable[[int], str], value: bytes, seconds: float
    ) -> None:
        """`key` makes the key from the number of the lease. Where it is taken, the tenure waits until it goes."""
        self._store = store
        self._clock = clock
        self._key = key
        self._value = value
        self._seconds = seconds
        self._until = float("-inf")
        self.lease = 0
        self.key = ""
        self.revision = 0
        """Of the key, while it is held: what a commit can be bound to."""

    def held(self) -> bool:
        return self._clock.monotonic() < self._until

    def step(self) -> float:
        """Take the key, or renew its lease; the seconds until this is to be called again."""
        if self.lease and not self.held():
            self.release()
            return 0.0  # whoever relied on it hears of that before the next one is taken
        try:
            if self.lease:
                self._renew()
            else:
                self._take()
        except LeaseNotFound:
            self.release()
            return 0.0
        except (MetaUnavailable, MetaAmbiguous):
            return self._seconds / 10
        return self._seconds / 3 if self.lease else self._seconds / 6

    def _renew(self) -> None:
        asked, lease = self._clock.monotonic(), self.lease
        self._store.renew(lease)
        there = self._store.get(self.key)
        if there is None or there.modified != self.revision:  # somebody put this holder out
            raise LeaseNotFound(f"{self.key} was taken away")
        if not self.held():  # it lapsed meanwhile: whoever relied on it gave up, and must not find it again
            raise LeaseNotFound(f"{self.key} was renewed too late")
        if self.lease == lease:
            self._until = self._ends(asked)

    def _take(self) -> None:
        if self._store.get(self._key(0)) is not None:
            return
        asked = self._clock.monotonic()
        lease = self._store.grant(self._seconds)
        key = self._key(lease)
        try:
            revision = self._store.commit([Put(key, self._value, lease)], when=[RevisionEquals(key, 0)])
        except MetaAmbiguous:
            there = self._store.get(key)
            revision = there.modified if there is not None and there.lease == lease else None
        if revision is None:
            self._store.revoke(lease)
            return
        self.lease, self.key, self.revision, self._until = lease, key, revision, self._ends(asked)

    def _ends(self, asked: float) -> float:
        return asked + self._seconds * (1 - CLOCK_DRIFT)

    def release(self) -> None:
        """From now on nothing is held; the lease ends where the store can be reached, and runs out where it cannot."""
        lease, self.lease, self.revision, self._until = self.lease, 0, 0, float("-inf")
        if lease:
            try:
                self._store.revoke(lease)
            except (MetaUnavailable, MetaAmbiguous):
                pass  # it runs out
