"""The meta stores that the conformance suite runs against, each on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from millrace.meta.memory import MemoryStore
from millrace.meta.sql import SqlStore
from millrace.meta.store import MetaStore


@dataclass
class Hand:
    """A monotonic clock that stands until somebody moves it."""

    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Rig:
    """One store, opened; `pass_time` lets seconds pass on every clock that it goes by, with somebody watching its leases."""

    store: MetaStore
    clock: Hand
    again: Callable[[], MetaStore] | None = None
    """Opens the same store once more, as another process would; None where it lives in one process."""
    opened: list[MetaStore] = field(default_factory=list)

    def pass_time(self, seconds: float) -> None:
        steps = 20
        for _ in range(steps):
            self.store.get("a-look")
            self.clock.now += seconds / steps
        self.store.get("a-look")

    def another(self) -> MetaStore:
        """The same store as another process has it, or itself."""
        if self.again is None:
            return self.store
        self.opened.append(self.again())
        return self.opened[-1]

    def close(self) -> None:
        for store in [self.store, *self.opened]:
            store.close()


def memory(folder: Path, kept: int) -> Rig:
    clock = Hand()
    return Rig(MemoryStore(clock, kept=kept), clock)


def sqlite(folder: Path, kept: int) -> Rig:
    clock = Hand()

    def opened() -> MetaStore:
        return SqlStore.in_file(folder / "meta.db", clock, kept=kept)

    return Rig(opened(), clock, opened)


STORES: dict[str, Callable[[Path, int], Rig]] = {"memory": memory, "sqlite": sqlite}
