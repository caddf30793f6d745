"""One coordinator leads, by a lease; others stand by and take over. What a leader writes is bound to its place: the commit of
one that was deposed, however late it comes, does nothing."""

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
        """`address`: where it serves people and programs, if it does."""
        self.store = store
        value = json.dumps([name, address]).encode()
        self._tenure = LeasedKey(store, clock, key=lambda lease: LEADER_KEY, value=value, seconds=seconds)

    def step(self) -> float:
        """Campaign, or stay; the seconds until this is to be called again."""
        return self._tenure.step()

    def resign(self) -> None:
        self._tenure.release()

    @property
    def epoch(self) -> int:
        """Another number each time somebody comes to lead; 0 while this one does not."""
        return self._tenure.revision if self._tenure.held() else 0

    def commit(self, epoch: int, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        """What :meth:`MetaStore.commit` does, while `epoch` lasts. Raises NotLeader: nothing was done."""
        if epoch == 0 or self.epoch != epoch:
            raise NotLeader("this coordinator does not lead: ask the one that does")
        revision = self.store.commit(then, when=[RevisionEquals(LEADER_KEY, epoch), *when])
        if revision is None:
            there = self.store.get(LEADER_KEY)
            if there is None or there.modified != epoch:
                raise NotLeader("another coordinator took over: ask that one")
        return revision
