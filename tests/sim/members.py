"""Members of a group that join, leave, are suspended, are killed and lose server or store: seeded, on a virtual clock.

What breaks names its seed. Laws: of two consumers at most one can commit a lane; a group's position never goes back,
and everything up to it was processed; in the end everything was, and the lanes are divided evenly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from millrace.base.errors import LogUnavailable, MillraceError
from millrace.client.consume.membership import GroupMember, GroupShare, HeldLane
from tests.sim import group_world

GROUP = "mail"
LANES = [f"dml_{number % 2}_7v{number}" for number in range(6)]


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


class World(group_world.World[Model]):
    KINDS: ClassVar = {
        "sync": 20, "beat": 10, "work": 40, "commit": 12, "time": 14, "flush": 6, "publish": 8, "join": 2, "leave": 1,
        "kill": 1, "pause": 2, "store": 2, "restart": 1, "switch": 1, "cut": 2,
    }  # fmt: skip

    def __init__(self, seed: int, folder: Path | None) -> None:
        super().__init__(seed, folder)
        self.ends = dict.fromkeys(LANES, 0)
        self.processed: dict[str, set[int]] = {lane: set() for lane in LANES}
        self.times: Counter[tuple[str, int]] = Counter()
        self.stood = dict.fromkeys(LANES, 0)

    def do_join(self) -> None:
        if len(self.models) == 9:
            return
        self.made += 1
        model = Model(None, self.chance.randrange(len(self.servers)))  # type: ignore[arg-type]

        def call(request: dict[str, Any]) -> dict[str, Any]:
            if self.chance.random() < 0.03:
                raise LogUnavailable("the request was lost")
            answer = self.servers[model.server].handle(request)
            if self.chance.random() < 0.03:
                raise LogUnavailable("the answer was lost")
            return answer

        model.member = GroupMember(call, GROUP, LANES, name=f"m{self.made}", clock=self.clock)
        self.models.append(model)

    # -- what happens --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        super().step()
        self.check()

    def do_sync(self, model: Model | None = None) -> None:
        model = model or self.one()
        if model is None:
            return
        try:
            model.follow(model.member.sync({lane: its.claim for lane, its in model.lanes.items()}))
        except MillraceError:
            return
        self.give_up(model)

    def give_up(self, model: Model) -> None:
        assert model.share is not None
        for lane in sorted(model.lanes.keys() - model.share.share):
            try:
                model.member.move({lane: model.lanes[lane].done})
                model.member.release([lane])
                del model.lanes[lane]
            except MillraceError:
                pass  # again at the next sync

    def do_beat(self) -> None:
        """Renew several memberships at one server in one call, as the members of one client do."""
        server = self.chance.randrange(len(self.servers))
        models = [model for model in self.models if model.server == server and not model.paused]
        requests = [
            model.member.asking(
                {lane: its.claim for lane, its in model.lanes.items()},
                {lane: its.done for lane, its in model.lanes.items() if its.done and self.chance.random() < 0.5},
            )
            for model in models
        ]
        if self.chance.random() < 0.05:
            self.events["lost beat"] += 1
            return
        answers = self.servers[server].heartbeats(requests, lambda group: None)
        if self.chance.random() < 0.05:
            self.events["lost beat"] += 1
            return
        for model, answer in zip(models, answers, strict=True):
            if "error" not in answer:
                self.events["moved"] += bool(answer.get("moved"))
                model.follow(model.member.followed(answer))
                self.give_up(model)

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

    def do_flush(self) -> None:
        for server in self.servers:
            server.flush()

    def do_publish(self) -> None:
        for lane in LANES:
            self.ends[lane] += self.chance.randrange(3)

    def do_leave(self) -> None:
        if (model := self.one()) is not None and len(self.models) > 1:
            self.do_commit(model)
            model.member.leave()
            self.models.remove(model)

    def do_switch(self) -> None:
        if (model := self.one()) is not None:
            model.server = self.chance.randrange(len(self.servers))

    # -- what must hold ------------------------------------------------------------------------------------------------

    def stands(self) -> dict[str, int]:
        away, self.store.away = self.store.away, False
        links = [each.link for each in self.positions if isinstance(each, group_world.Positions)]
        cuts = [link.cut for link in links]
        for link in links:
            link.cut = False
        found = self.positions[0].groups().get(GROUP, {})
        self.store.away = away
        for link, cut in zip(links, cuts, strict=True):
            link.cut = cut
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
        self.recover()
        if not self.models:
            self.do_join()
        for _ in range(60):
            self.pass_time(1.0)
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


def play(seed: int, folder: Path | None = None, *, steps: int = 150) -> World:
    """Play one seed, with two servers or, with a `folder`, on one machine. Raises AssertionError."""
    with group_world.looks(seed):
        world = World(seed, folder)
        world.play(consumers=3, steps=steps)
        return world
