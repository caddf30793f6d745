"""A key held under a lease: a node's session, or the leader key.

The store counts a lease from the renewal's arrival. The holder counts from before it sent the renewal, by its own
monotonic clock, and subtracts CLOCK_DRIFT. So the holder stops acting before any other process can see the key gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from millrace.base.errors import LeaseNotFound, MetaAmbiguous, MetaUnavailable
from millrace.coord.clock import Clock
from millrace.meta.store import MetaStore, Put, RevisionEquals

CLOCK_DRIFT: Final = 0.05
"""Relative drift of two monotonic clocks that a lease allows for."""


class LeasedKey:
    """One key under a lease of `seconds`. :meth:`step` acquires and renews it; :meth:`held` tells whether it is
    valid.
    """

    def __init__(
        self,
        store: MetaStore,
        clock: Clock,
        *,
        key: Callable[[int], str],
        value: bytes,
        seconds: float,
        beside: Callable[[int], Sequence[Put]] = lambda lease: (),
    ) -> None:
        """`key` derives the key from the lease's number, and `beside` what is put together with it. While another
        holder has the key, :meth:`step` waits for it.
        """
        self._beside = beside
        self._store = store
        self._clock = clock
        self._key = key
        self._value = value
        self._seconds = seconds
        self._until = float("-inf")
        self.lease = 0
        self.key = ""
        self.revision = 0
        """Revision of the key while it is held. Commits can be bound to it."""

    def held(self) -> bool:
        """Return whether the lease is valid by this process's own clock."""
        return self._clock.monotonic() < self._until

    def step(self) -> float:
        """Acquire the key, or renew its lease; return the seconds until the next call is due."""
        if self.lease and not self.held():
            self.release()
            # Never renew a lease that has expired by the own clock: users of the key have stopped.
            return 0.0  # the caller sees the loss before the key is acquired again
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
        # Measure from before the call: the store's lease starts during the call, so the own clock ends it first.
        asked, lease = self._clock.monotonic(), self.lease
        self._store.renew(lease)
        there = self._store.get(self.key)
        if there is None or there.modified != self.revision:  # the coordinator evicted this holder
            raise LeaseNotFound(f"{self.key} was taken away")
        if not self.held():  # expired during the call: users of the key have stopped and must not see it valid again
            raise LeaseNotFound(f"{self.key} was renewed too late")
        # `release` may have run in another thread during the call.
        if self.lease == lease:
            self._until = self._ends(asked)

    def _take(self) -> None:
        # Look first: granting a lease only to lose the commit would cost the store a lease on every poll.
        if self._store.get(self._key(0)) is not None:
            return
        asked = self._clock.monotonic()
        lease = self._store.grant(self._seconds)
        key = self._key(lease)
        try:
            revision = self._store.commit(
                [Put(key, self._value, lease), *self._beside(lease)], when=[RevisionEquals(key, 0)]
            )
        except MetaAmbiguous:
            there = self._store.get(key)
            # The answer was lost: the key tells by its lease whether the commit was ours.
            revision = there.modified if there is not None and there.lease == lease else None
        if revision is None:
            self._store.revoke(lease)
            return
        self.lease, self.key, self.revision, self._until = lease, key, revision, self._ends(asked)

    def _ends(self, asked: float) -> float:
        # Clocks may drift: stop using the key a little before the store gives it to another holder.
        return asked + self._seconds * (1 - CLOCK_DRIFT)

    def release(self) -> None:
        """Stop holding the key. The lease is revoked if the store answers, and expires otherwise."""
        lease, self.lease, self.revision, self._until = self.lease, 0, 0, float("-inf")
        if lease:
            try:
                self._store.revoke(lease)
            except (MetaUnavailable, MetaAmbiguous):
                pass  # it expires
