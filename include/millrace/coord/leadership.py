"""Leader election by a lease.

A leader's writes are bound to its leader key, so a late commit of a deposed leader has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from millrace.base.errors import NotLeader
from millrace.coord.clock import Clock
from millrace.coord.lease import LeasedKey
from millrace.meta.store import MetaStore, Mutation, RevisionEquals

LEADER_KEY: Final = "leader"
LEADER_SECONDS: Final = 10.0


class Leadership:
    """One coordinator's candidacy."""

    def __init__(
        self, store: MetaStore, clock: Clock, name: str, *, address: str = "", seconds: float = LEADER_SECONDS
    ) -> None:
        """`address`: where this coordinator serves HTTP, or ""."""
        self.store = store
        value = json.dumps([name, address]).encode()
        self._tenure = LeasedKey(store, clock, key=lambda lease: LEADER_KEY, value=value, seconds=seconds)

    def step(self) -> float:
        """Campaign, or renew leadership; return the seconds until the next call is due."""
        return self._tenure.step()

    def resign(self) -> None:
        """Give up leadership."""
        self._tenure.release()

    @property
    def epoch(self) -> int:
        """Number of this leadership, 0 while another coordinator leads. Each leadership has a new number."""
        return self._tenure.revision if self._tenure.held() else 0

    def commit(self, epoch: int, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        """Commit to the meta store as :meth:`MetaStore.commit` does, while `epoch` lasts.

        Raises NotLeader: nothing was done.
        """
        if epoch == 0 or self.epoch != epoch:
            raise NotLeader("this coordinator does not lead: ask the one that does")
        revision = self.store.commit(then, when=[RevisionEquals(LEADER_KEY, epoch), *when])
        if revision is None:
            there = self.store.get(LEADER_KEY)
            if there is None or there.modified != epoch:
                raise NotLeader("another coordinator took over: ask that one")
        return revision
