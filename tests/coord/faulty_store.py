"""A meta store in memory whose calls fail as a test says.

Not done, done and unheard, unheard and not done, done later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from millrace.base.errors import MetaAmbiguous, MetaUnavailable
from millrace.coord.clock import SystemClock
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Mutation, RevisionEquals

Fault = Callable[[Callable[[], Any]], Any]


class FaultyStore(MemoryStore):
    """Calls meet the faults of `script`, first to last; then none."""

    def __init__(self) -> None:
        super().__init__(SystemClock().monotonic)
        self.script: list[Fault | None] = []
        self.commits = 0

    def _meet(self, call: Callable[[], Any]) -> Any:
        fault = self.script.pop(0) if self.script else None
        return call() if fault is None else fault(call)

    def get(self, key: str) -> Any:
        return self._meet(lambda: MemoryStore.get(self, key))

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        self.commits += 1
        found: int | None = self._meet(lambda: MemoryStore.commit(self, then, when=when))
        return found


def down(call: Callable[[], Any]) -> Any:
    raise MetaUnavailable("down")


def done_unheard(call: Callable[[], Any]) -> Any:
    call()
    raise MetaAmbiguous("the answer was lost")


def lost(call: Callable[[], Any]) -> Any:
    raise MetaAmbiguous("nobody knows")


class Late:
    """Faults that answer nothing, and do what they were asked for when `come` is called."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def __call__(self, call: Callable[[], Any]) -> Any:
        self.calls.append(call)
        raise MetaAmbiguous("nobody knows yet")

    def come(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()
