"""Members of a group that join, leave, are suspended, are killed and lose server or store: seeded, on a virtual clock.

What breaks names its seed. Laws: of two consumers at most one can commit a lane; a group's position never goes back,
and everything up to it was processed; in the end everything was, and the lanes are divided evenly.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import LogUnavailable, MetaAmbiguous, MetaUnavailable, MillraceError
from millrace.client.consume.membership import GroupMember, GroupShare, HeldLane
from millrace.client.consume.positions import FilePositions
from millrace.coord.consumer_positions import MetaStorePositions
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Mutation, RevisionEquals
from millrace.node.append.consumer_groups import ConsumerGroups

GROUP, LEASE, SESSION = "mail", 10.0, 8.0
LANES = [f"dml_{number % 2}_7v{number}" for number in range(6)]


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


class Server(ConsumerGroups):
    """One without threads: the world calls what they would."""

    def _watch(self) -> None: ...

    def _flush_often(self) -> None: ...


class Positions(MetaStorePositions):
    def __init__(self, store: Store) -> None:
        super().__init__(store, seconds=SESSION, patience=0.0, clock=store.clock)
        self._keeping = threading.Thread()  # the world renews


@dataclass
class Lane:
    claim: int
    done: int
    """Processed up to here."""


@dataclass
class Model:
    """A consumer as far as the group is concerned: it processes one message after the other."""

    member: GroupMember
    server: int
    lanes: dict[str, Lane] = field(default_factory=dict)
    share: GroupShare | None = None
    paused: bool = False

    def follow(self, found: GroupShare) -> None:
        self.share = found
        for lane in [lane for lane, its in self.lanes.items() if not _same(found.held.get(lane), its)]:
            del self.lanes[lane]
        for lane, held in found.held.items():
            if lane not in self.lanes:
                self.lanes[lane] = Lane(held.claim, held.start or 0)


def _same(held: HeldLane | None, lane: Lane) -> bool:
    return held is not None and held.claim == lane.claim


class World:
    def __init__(self, seed: int, folder: Path | None) -> None:
        """With a `folder`, one server on one machine; else two servers on a meta store."""
        self.chance = random.Random(seed)
        self.clock = Hand()
        self.folder = folder
        self.store = Store(self.clock, self.chance)
        self.ends = dict.fromkeys(LANES, 0)
        self.processed: dict[str, set[int]] = {lane: set() for lane in LANES}
        self.times: Counter[tuple[str, int]] = Counter()
        self.stood = dict.fromkeys(LANES, 0)
        self.events: Counter[str] = Counter()
        self.models: list[Model] = []
        self.names = 0
        self.positions: list[Any] = []
        self.servers = [self.new_server() for _ in range(1 if folder else 2)]

    def new_server(self) -> Server:
        positions: Any = Positions(self.store) if self.folder is None else FilePositions(self.folder)
        self.positions.append(positions)
        return Server(
            Path("unused"), lambda: ["dml_0", "dml_1"], positions=lambda: positions, lease=LEASE, clock=self.clock
        )

    def join(self) -> None:
        self.names += 1
        model = Model(None, self.chance.randrange(len(self.servers)))  # type: ignore[arg-type]

        def call(request: dict[str, Any]) -> dict[str, Any]:
            if self.chance.random() < 0.03:
                raise LogUnavailable("the request was lost")
            answer = self.servers[model.server].handle(request)
            if self.chance.random() < 0.03:
                raise LogUnavailable("the answer was lost")
            return answer

        model.member = GroupMember(call, GROUP, LANES, name=f"m{self.names}", clock=self.clock)
        self.models.append(model)

    # -- what happens --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        kinds = {
            "sync": 30, "work": 40, "commit": 12, "time": 14, "flush": 6, "publish": 8, "join": 2, "leave": 1,
            "kill": 1, "pause": 2, "store": 2, "restart": 1, "switch": 1,
        }  # fmt: skip
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        self.events[kind] += 1
        getattr(self, f"do_{kind}")()
        self.check()

    def one(self) -> Model | None:
        awake = [model for model in self.models if not model.paused]
        return self.chance.choice(awake) if awake else None

    def do_sync(self, model: Model | None = None) -> None:
        model = model or self.one()
        if model is None:
            return
        try:
            model.follow(model.member.sync({lane: its.claim for lane, its in model.lanes.items()}))
        except MillraceError:
            return
        assert model.share is not None
        for lane in sorted(model.lanes.keys() - model.share.share):
            try:
                model.member.move({lane: model.lanes[lane].done})
                model.member.release([lane])
                del model.lanes[lane]
            except MillraceError:
                pass  # again at the next sync

    def do_work(self, model: Model | None = None) -> None:
        model = model or self.one()
        if model is None or model.member.expired or model.share is None:
            return
        for lane, its in model.lanes.items():
            if lane in model.share.share and its.done < self.ends[lane]:
                its.done += 1
                self.processed[lane].add(its.done)
                self.times[lane, its.done] += 1

    def do_commit(self, model: Model | None = None) -> None:
        model = model or self.one()
        if model is not None and model.lanes:
            try:
                ticks = {lane: its.done for lane, its in model.lanes.items() if its.done}
                if ticks:
                    model.member.move(ticks, later=self.chance.random() < 0.7)
            except MillraceError:
                pass

    def do_time(self) -> None:
        passes = self.chance.choice([0.3, 1.0, 1.0, 2.0, 3.0])
        self.clock.now += passes
        for positions in self.positions:
            if isinstance(positions, Positions):
                positions.renew()
        for server in self.servers:
            server.release_silent()
        for model in self.models:
            if model.paused and self.chance.random() < 0.15:
                model.paused = False

    def do_flush(self) -> None:
        for server in self.servers:
            server.flush()

    def do_publish(self) -> None:
        for lane in LANES:
            self.ends[lane] += self.chance.randrange(3)

    def do_join(self) -> None:
        if len(self.models) < 9:
            self.join()

    def do_leave(self) -> None:
        if (model := self.one()) is not None and len(self.models) > 1:
            self.do_commit(model)
            model.member.leave()
            self.models.remove(model)

    def do_kill(self) -> None:
        if self.models and len(self.models) > 1:
            self.models.remove(self.chance.choice(self.models))

    def do_pause(self) -> None:
        if (model := self.one()) is not None:
            model.paused = True

    def do_store(self) -> None:
        self.store.away = not self.store.away and self.chance.random() < 0.5
        self.store.loses = 0.1 if self.chance.random() < 0.5 else 0.0

    def do_restart(self) -> None:
        number = self.chance.randrange(len(self.servers))
        dead = self.positions.index(self.servers[number]._opened())
        if self.folder is not None:
            self.positions[dead].close()  # a killed process keeps no lock
        del self.positions[dead]  # nobody renews its lease
        self.servers[number] = self.new_server()

    def do_switch(self) -> None:
        if (model := self.one()) is not None:
            model.server = self.chance.randrange(len(self.servers))

    # -- what must hold ------------------------------------------------------------------------------------------------

    def stands(self) -> dict[str, int]:
        away, self.store.away = self.store.away, False
        found = self.positions[0].groups().get(GROUP, {})
        self.store.away = away
        return {lane: found.get(lane, 0) for lane in LANES}

    def check(self) -> None:
        stands = self.stands()
        for lane, tick in stands.items():
            assert tick >= self.stood[lane], f"{lane} went back"
            assert self.processed[lane] >= set(range(1, tick + 1)), f"{lane}: something was lost"
        self.stood = stands
        if self.chance.random() < 0.1:
            for lane in LANES:
                self.one_can_commit(lane)

    def one_can_commit(self, lane: str) -> None:
        able = []
        for model in self.models:
            if lane in model.lanes:
                try:
                    model.member.move({lane: max(model.lanes[lane].done, self.stood[lane])})
                except MillraceError:
                    continue
                able.append(model.member.name)
        assert len(able) <= 1, f"{able} commit {lane}"

    def settle(self) -> None:
        """Everything is well again: everything is processed, and the lanes are divided."""
        self.store.away, self.store.loses = False, 0.0
        for model in self.models:
            model.paused = False
        if not self.models:
            self.join()
        for _ in range(60):
            self.clock.now += 1.0
            for positions in self.positions:
                if isinstance(positions, Positions):
                    positions.renew()
            for server in self.servers:
                server.release_silent()
            for model in self.models:
                self.do_sync(model)
                self.do_work(model)
                self.do_commit(model)
            self.do_flush()
        for _ in range(max(self.ends.values())):
            for model in self.models:
                self.do_work(model)
        for _ in range(5):
            for model in self.models:
                self.do_sync(model)
                self.do_commit(model)
        self.do_flush()
        self.check()
        assert self.stands() == self.ends
        sizes = [len(model.lanes) for model in self.models]
        assert sum(sizes) == len(LANES)
        assert max(sizes) - min(sizes) <= 1
        for model in self.models:
            assert model.share is not None
            assert model.lanes or "in reserve" in model.share.reason


def play(seed: int, folder: Path | None = None, steps: int = 150) -> World:
    world = World(seed, folder)
    for _ in range(3):
        world.join()
    try:
        for _ in range(steps):
            world.step()
        world.settle()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return world


@pytest.mark.parametrize("part", range(4))
def test_of_a_shared_group_nothing_is_lost_and_a_lane_has_one_committer(part: int) -> None:
    events, again = Counter[str](), 0
    for seed in range(part * 25, part * 25 + 25):
        world = play(seed)
        events += world.events
        again += sum(count > 1 for count in world.times.values())
    assert min(events[kind] for kind in ("kill", "pause", "store", "restart", "switch", "leave")) > 10, events
    assert again, "lanes were lost with messages in flight, which came again"


def test_the_same_on_one_machine(tmp_path: Path) -> None:
    for seed in range(8):
        play(seed, tmp_path / str(seed), steps=100)
