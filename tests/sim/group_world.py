"""Consumer groups whose consumers, servers and store fail: what the seeded worlds of members and of queues share.

A world has one server on one machine, or two servers on a meta store, and a virtual clock. What breaks names its seed.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from unittest.mock import patch

from millrace.base.errors import MetaAmbiguous, MetaUnavailable
from millrace.client.consume.positions import FilePositions
from millrace.coord.consumer_positions import MetaStorePositions
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Mutation, RevisionEquals
from millrace.node.append.consumer_groups import ConsumerGroups

LEASE, SESSION = 10.0, 8.0
PCHANNELS = ["dml_0", "dml_1"]


@contextmanager
def looks(seed: int) -> Iterator[None]:
    """Let servers look at all groups of the store together in every other world, as those of many groups do."""
    with patch("millrace.node.append.consumer_groups._LISTED_GROUPS", 0 if seed % 2 else 8):
        yield


class Hand:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Store(MemoryStore):
    """A store that is away at times, and whose answers are lost at times."""

    def __init__(self, clock: Hand, chance: random.Random) -> None:
        super().__init__(clock)
        self.clock = clock
        self.away = False
        self.loses = 0.0
        self.commits = 0
        self._chance = chance

    def get(self, key: str) -> Any:
        self._there()
        return super().get(key)

    def list(self, prefix: str, *, revision: int | None = None) -> Any:
        self._there()
        return super().list(prefix, revision=revision)

    def renew(self, lease: int) -> None:
        self._there()
        super().renew(lease)

    def grant(self, seconds: float) -> int:
        self._there()
        return super().grant(seconds)

    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        self._there()
        self.commits += 1
        lost = self._chance.random() < self.loses
        if lost and self._chance.random() < 0.5:
            raise MetaAmbiguous("no answer, and nothing was done")
        found = super().commit(then, when=when)
        if lost:
            raise MetaAmbiguous("no answer")
        return found

    def _there(self) -> None:
        if self.away:
            raise MetaUnavailable("not there")


class Link:
    """A server's way to the store, which may be cut (implements MetaStore)."""

    def __init__(self, store: Store) -> None:
        self.store, self.cut = store, False

    def __getattr__(self, name: str) -> Any:
        if self.cut and name != "clock":
            raise MetaUnavailable("no way to the store")
        return getattr(self.store, name)


class Server(ConsumerGroups):
    """One without threads: the world calls what they would."""

    def _watch(self) -> None: ...

    def _flush_often(self) -> None: ...


class Positions(MetaStorePositions):
    def __init__(self, store: Store) -> None:
        self.link: Any = Link(store)
        super().__init__(self.link, seconds=SESSION, patience=0.0, clock=store.clock)
        self._keeping = threading.Thread()  # the world renews


class Consumer(Protocol):
    """A consumer of a world."""

    server: int
    paused: bool


C = TypeVar("C", bound=Consumer)


class World(ABC, Generic[C]):
    """Servers and consumers to which things happen by chance."""

    KINDS: ClassVar[dict[str, int]] = {}
    """What happens, as methods ``do_<kind>``, with weights."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        """With a `folder`, one server on one machine; else two servers on a meta store."""
        self.seed = seed
        self.chance = random.Random(seed)
        self.clock = Hand()
        self.folder = folder
        self.store = Store(self.clock, self.chance)
        self.events: Counter[str] = Counter()
        self.models: list[C] = []
        self.made = 0
        self.positions: list[Any] = []
        self.servers: list[Server] = []
        for number in range(1 if folder else 2):
            self.start_server(number)

    def play(self, *, consumers: int, steps: int) -> None:
        """Let things happen to so many consumers, then let everything be well again.

        Raises AssertionError, with the seed, if a law is broken.
        """
        for _ in range(consumers):
            self.do_join()
        try:
            for _ in range(steps):
                self.step()
            self.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}: {error}") from error

    @abstractmethod
    def do_join(self) -> None:
        """Let a consumer come, if there are not too many."""

    @abstractmethod
    def settle(self) -> None:
        """Let everything be well again, and check what must hold then."""

    def start_server(self, number: int) -> None:
        """Start a server, or start it again after a kill."""
        positions: Any = Positions(self.store) if self.folder is None else FilePositions(self.folder)
        server = Server(Path("unused"), lambda: PCHANNELS, positions=lambda: positions, lease=LEASE, clock=self.clock)
        if number < len(self.servers):
            self.servers[number], self.positions[number] = server, positions
        else:
            self.servers.append(server)
            self.positions.append(positions)

    def step(self) -> None:
        kind = self.chance.choices(list(self.KINDS), list(self.KINDS.values()))[0]
        self.events[kind] += 1
        getattr(self, f"do_{kind}")()

    def one(self) -> C | None:
        """Return a consumer that is awake, if there is one."""
        awake = [model for model in self.models if not model.paused]
        return self.chance.choice(awake) if awake else None

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        for positions in self.positions:
            if isinstance(positions, Positions):
                positions.renew()
        for server in self.servers:
            server.release_silent()

    def do_time(self) -> None:
        self.pass_time(self.chance.choice([0.3, 1.0, 1.0, 2.0, 3.0]))
        for model in self.models:
            if model.paused and self.chance.random() < 0.15:
                model.paused = False

    def do_kill(self) -> None:
        if len(self.models) > 1:
            self.models.remove(self.chance.choice(self.models))

    def do_pause(self) -> None:
        if (model := self.one()) is not None:
            model.paused = True

    def do_store(self) -> None:
        self.store.away = not self.store.away and self.chance.random() < 0.5
        self.store.loses = 0.1 if self.chance.random() < 0.5 else 0.0

    def do_cut(self) -> None:
        """Cut one server off the store, or mend it: others may take over while it serves its consumers."""
        links = [each.link for each in self.positions if isinstance(each, Positions)]
        for link in links:
            link.cut = not link.cut and self.chance.random() < 0.5

    def do_restart(self) -> None:
        """Kill a server, which nobody's lease survives by, and start it again."""
        number = self.chance.randrange(len(self.servers))
        if self.folder is not None:
            self.positions[number].close()  # a killed process keeps no lock
        self.start_server(number)

    def recover(self) -> None:
        """Let everything be well again."""
        self.store.away, self.store.loses = False, 0.0
        for positions in self.positions:
            if isinstance(positions, Positions):
                positions.link.cut = False
        for model in self.models:
            model.paused = False
