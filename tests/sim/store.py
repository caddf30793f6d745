"""The meta store, and the ledger of broadcasts, as one process sees them.

Elsewhere, at times slow or down, with answers that get lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.base.errors import MetaAmbiguous, MetaUnavailable
from millrace.coord.broadcast.sqlite_ledger import SqliteLedger
from millrace.coord.broadcast.task import BroadcastDraft, BroadcastTask
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Entry, EventBatch, Listing, Mutation, RevisionEquals
from tests.sim.world import Broken, Network, Process, World

STORE = "store"
GIVES_UP = 0.5


@dataclass
class StoreHealth:
    """How the one store is."""

    store: MemoryStore
    down_until: float = 0.0
    slow: float = 0.0
    lost_answers: float = 0.0
    """The share of writes whose answer is lost; a third of those comes later, one is never done."""


@dataclass
class Remote:
    """What is elsewhere, for one process."""

    world: World
    network: Network
    health: StoreHealth
    process: Process

    def _pass(self) -> None:
        world = self.world
        delay = self.network.latency()
        if self.health.slow:
            world.faults["slow store"] += 1
            delay += self.health.slow * world.random.random()
        down = self.health.down_until > world.now
        if down or not self.network.passes(self.process.name, STORE):
            if down:
                world.faults["store down"] += 1
            world.sleep(self.process, GIVES_UP)
            raise MetaUnavailable("the store is not there")
        world.sleep(self.process, delay)

    def _return(self) -> None:
        """The way back of an answer; it can be as slow."""
        slow = self.health.slow * self.world.random.random() if self.health.slow else 0.0
        self.world.sleep(self.process, self.network.latency() + slow)

    def _read(self, call: Callable[[], Any]) -> Any:
        self._pass()
        if not self.network.passes(STORE, self.process.name):
            self.world.sleep(self.process, GIVES_UP)
            raise MetaUnavailable("no answer")
        found = call()
        self._return()
        return found

    def _write(self, call: Callable[[], Any]) -> Any:
        self._pass()
        world = self.world
        lost = self.health.lost_answers and world.random.random() < self.health.lost_answers
        if not lost and self.network.passes(STORE, self.process.name):
            found = call()
            self._return()
            return found
        world.faults["ambiguous"] += 1
        when = world.random.randrange(3)

        def anyhow() -> None:
            try:
                call()
            except Broken:
                raise
            except Exception:
                return  # nobody is there to be told

        if when == 0:
            anyhow()
        elif when == 1:
            world.later(GIVES_UP + world.random.random() * 2.0, anyhow)
        world.sleep(self.process, GIVES_UP)
        raise MetaAmbiguous("the answer was lost")


class RemoteLedger(Remote):
    """The protocol Ledger, for one process: the real one of a file, each of whose transactions is somewhere else."""

    def __init__(
        self, world: World, network: Network, health: StoreHealth, process: Process, kept: SqliteLedger
    ) -> None:
        super().__init__(world, network, health, process)
        self._kept = kept

    def add(
        self, draft: BroadcastDraft, check: Callable[[BroadcastTask, Any], None]
    ) -> BroadcastTask | tuple[BroadcastTask, ...]:
        return self._write(lambda: self._kept.add(draft, check))

    def task(self, number: int) -> BroadcastTask | None:
        return self._read(lambda: self._kept.task(number))

    def find_request(self, request: str) -> BroadcastTask | None:
        return self._read(lambda: self._kept.find_request(request))

    def open_tasks(self) -> list[BroadcastTask]:
        return self._read(self._kept.open_tasks)

    def acknowledge(self, number: int, ticks: Mapping[str, int]) -> None:
        self._write(lambda: self._kept.acknowledge(number, ticks))

    def finish(self, number: int, acked: Callable[[BroadcastTask], None]) -> BroadcastTask | None:
        return self._write(lambda: self._kept.finish(number, acked))

    def abandon(
        self, number: int, words: str, refused: Callable[[BroadcastTask], BroadcastDraft | None]
    ) -> BroadcastTask | None:
        return self._write(lambda: self._kept.abandon(number, words, refused))

    def note_reason(self, number: int, words: str) -> None:
        self._write(lambda: self._kept.note_reason(number, words))


class RemoteStore(Remote):
    """The protocol MetaStore, for one process."""

    def get(self, key: str) -> Entry | None:
        return self._read(lambda: self.health.store.get(key))

    def list(self, prefix: str, *, revision: int | None = None) -> Listing:
        return self._read(lambda: self.health.store.list(prefix, revision=revision))

    def changes(self, prefix: str, *, after: int) -> EventBatch:
        return self._read(lambda: self.health.store.changes(prefix, after=after))

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        return self._write(lambda: self.health.store.commit(then, when=when))

    def grant(self, seconds: float) -> int:
        return self._write(lambda: self.health.store.grant(seconds))

    def renew(self, lease: int) -> None:
        self._write(lambda: self.health.store.renew(lease))

    def revoke(self, lease: int) -> None:
        self._write(lambda: self.health.store.revoke(lease))

    def compact(self, revision: int) -> None:
        self._write(lambda: self.health.store.compact(revision))

    def close(self) -> None:
        """Nothing to release."""
