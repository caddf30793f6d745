"""A work queue whose consumers, servers and store fail: seeded, on a virtual clock.

What breaks names its seed. Laws: a task whose acknowledgement was answered never comes again; no task has two holders
whose leases run; with an order, of a key one task is in flight; a window keeps its bound; in the end every task was
processed and is done.

The consumers of one server are one client: those that found no task may wait in its session until they are told. In the
end, who waits takes only once it is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from millrace.base.errors import MillraceError
from tests.node.append.queue_rig import GROUP, LANES, TASK_LEASE, WINDOW, Log, Name, Queues
from tests.sim import group_world


@dataclass
class Model:
    """A consumer, by the server's calls."""

    name: str
    server: int
    last: int = 0
    held: dict[Name, tuple[int, float]] = field(default_factory=dict)
    """Delivery count and end of the lease by the own clock."""
    paused: bool = False
    waits: bool = False
    """Whether it waits in the client's session."""


@dataclass
class Client:
    """What the consumers of one server share."""

    session: int = 0
    last: int = 0


class World(group_world.World[Model]):
    KINDS: ClassVar = {
        "take": 30, "news": 15, "settle": 30, "read": 20, "tend": 14, "time": 12, "publish": 8, "join": 2, "leave": 1,
        "kill": 1, "pause": 2, "store": 2, "restart": 1, "switch": 1, "cut": 2,
    }  # fmt: skip

    def __init__(self, seed: int, folder: Path | None, *, order: str = "") -> None:
        self.order = order
        self.log = Log()
        self.done: set[Name] = set()
        """Acknowledged, and answered."""
        self.sent: set[Name] = set()
        """Acknowledged, perhaps by somebody who never got the answer."""
        self.times: Counter[Name] = Counter()
        self.queues: list[Queues] = []
        self.clients: list[Client] = []
        super().__init__(seed, folder)
        self.clients += [Client() for _ in self.servers]

    def start_server(self, number: int) -> None:
        super().start_server(number)
        queues = Queues(self.servers[number], self.log, f"queue-{number}", self.clock)
        self.queues[number : number + 1] = [queues]

    # -- what happens --------------------------------------------------------------------------------------------------

    def do_take(self, model: Model | None = None, *, whole: bool = False) -> None:
        model = model or self.one()
        if model is None or len(model.held) > 12:
            return
        if model.waits and (whole or self.chance.random() < 0.8):
            return
        asked = self.clock.now
        lost = 0.0 if whole else 0.04
        if self.chance.random() < lost:
            return
        request = {
            "queue": "jobs", "group": GROUP, "consumer": model.name, "lanes": LANES, "last": model.last,
            "most": self.chance.choice([1, 3, 10]), "lease": TASK_LEASE, "order": self.order,
        }  # fmt: skip
        if whole or self.chance.random() < 0.7:
            request["session"] = "client"
        try:
            answer = self.queues[model.server].take(request)
        except MillraceError as error:
            self.refused(error)
            return
        if self.chance.random() < lost:
            self.events["lost answer"] += 1
            return
        model.last = answer.number
        model.waits = bool(answer.session)
        if answer.session:
            self.events["wait"] += 1
            self.follow(model.server, answer.session, but=model)
        for part in answer.parts:
            columns = (part.names.ticks, part.names.ordinals, part.names.deliveries)
            for tick, ordinal, count in zip(*(column.tolist() for column in columns), strict=True):
                self.delivered(model, (part.lane, tick, ordinal), count, asked + TASK_LEASE)

    def follow(self, server: int, session: int, *, but: Model | None = None) -> None:
        """Let all consumers of a client take again if the server knows another session than before."""
        client = self.clients[server]
        if session != client.session:
            client.session = session
            for model in self.models:
                if model.server == server and model is not but:
                    model.waits = False

    def do_news(self, server: int | None = None, *, whole: bool = False) -> None:
        server = self.chance.randrange(len(self.servers)) if server is None else server
        client = self.clients[server]
        found = self.queues[server].news({"session": "client", "last": client.last})
        if not whole and self.chance.random() < 0.1:
            self.events["lost news"] += 1
            return
        client.last = found.number
        self.follow(server, found.session)
        for model in self.models:
            if model.server == server and (GROUP, model.name) in found.ready:
                self.events["told"] += 1
                model.waits = False

    def refused(self, error: MillraceError) -> None:
        if not error.retriable and error.code != "GROUP_BUSY":
            raise AssertionError(f"a consumer cannot go on after {error!r}")

    def delivered(self, model: Model, name: Name, count: int, expires: float) -> None:
        assert name not in self.done, f"{name} was acknowledged and came again"
        for other in self.models:
            if other is not model and name in other.held:
                assert other.held[name][1] <= self.clock.now, f"{name} has two holders, {other.name} and {model.name}"
            if self.order and other is not model:
                for mine, (_, until) in other.held.items():
                    if mine in self.sent:  # it is finished with, though the answer was lost
                        continue
                    same = (mine[0], mine[1] % 3) == (name[0], name[1] % 3)
                    assert not same or until <= self.clock.now, f"of the key of {name} another is in flight"
        model.held[name] = (count, expires)
        self.times[name] += 1

    def do_settle(self, model: Model | None = None, *, whole: bool = False) -> None:
        model = model or self.one()
        if model is None or not model.held:
            return
        names = sorted(model.held)
        chosen = names if whole else [name for name in names if self.chance.random() < 0.6]
        kinds: dict[str, list[Name]] = {"done": [], "renew": [], "release": []}
        for name in chosen:
            kinds["done" if whole else self.chance.choices(["done", "renew", "release"], [8, 1, 1])[0]].append(name)
        request: dict[str, Any] = {"group": GROUP, "consumer": model.name, "lease": TASK_LEASE}
        for kind, each in kinds.items():
            request[kind] = [
                [
                    lane,
                    [tick],
                    [ordinal],
                    [model.held[lane, tick, ordinal][0]],
                    *((0.0, False) if kind == "release" else ()),
                ]
                for lane, tick, ordinal in each
            ]
        for name in kinds["release"]:  # given up, whether the call arrives or not
            del model.held[name]
        asked = self.clock.now
        if not whole and self.chance.random() < 0.04:
            return
        self.sent |= set(kinds["done"])
        try:
            answer = self.queues[model.server].handle(request)
        except MillraceError as error:
            self.refused(error)
            return
        if not whole and self.chance.random() < 0.04:
            return
        for kind, each in kinds.items():
            lost = {place for place, _ in answer["lost"].get(kind, [])}
            unread = {place for place, _ in answer["unread"].get(kind, [])}
            for place, name in enumerate(each):
                if kind == "release":
                    continue
                # As QueueConsumer: again, as long as it is of use. Another server may have the VChannel for good.
                late = place in unread and self.clock.now > model.held[name][1] + TASK_LEASE
                if place in unread and not late:
                    continue
                if place in lost or late:
                    del model.held[name]
                elif kind == "renew":
                    model.held[name] = (model.held[name][0], max(model.held[name][1], asked + TASK_LEASE))
                else:
                    self.done.add(name)
                    del model.held[name]

    def do_read(self) -> None:
        for queues in self.queues:
            queues.read_all()

    def do_tend(self) -> None:
        for queues in self.queues:
            for queue in queues.queues():
                try:
                    queue.tend()
                except MillraceError:
                    pass

    def do_publish(self) -> None:
        for lane in LANES:
            for _ in range(self.chance.randrange(3)):
                self.log.now += 1
                self.log.units[lane].append((self.log.now, self.chance.choice([1, 1, 2, 3])))

    def do_join(self) -> None:
        if len(self.models) < 6:
            self.made += 1
            self.models.append(Model(f"c{self.made}", self.chance.randrange(len(self.servers))))

    def do_leave(self) -> None:
        if (model := self.one()) is not None and len(self.models) > 1:
            self.models.remove(model)
            try:
                self.queues[model.server].handle({"group": GROUP, "consumer": model.name, "leave": True})
            except MillraceError:
                pass

    def do_switch(self) -> None:
        if (model := self.one()) is not None:
            model.server, model.last = self.chance.randrange(len(self.servers)), model.last + 1
            model.waits = False

    # -- what must hold ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.recover()
        if not self.models:
            self.do_join()
        for number in range(len(self.servers)):  # every server has a consumer: it dispatches its part
            if not any(model.server == number for model in self.models):
                self.made += 1
                self.models.append(Model(f"c{self.made}", number))
        everything = set(self.log.names())
        for _ in range(400):
            if self.sent >= everything and all(not model.held for model in self.models):
                break
            self.pass_time(1.0)
            self.do_tend()
            for server in range(len(self.servers)):
                self.do_news(server, whole=True)
            for model in self.models:
                self.do_take(model, whole=True)
                self.do_read()
                self.do_take(model, whole=True)
                self.do_settle(model, whole=True)
        assert self.sent >= everything, f"{len(everything - self.sent)} of {len(everything)} tasks were not done"
        assert set(self.times) >= everything
        for _ in range(40):
            self.pass_time(1.0)
            self.do_tend()
            for server in range(len(self.servers)):
                self.do_news(server, whole=True)
            for model in self.models:
                self.do_take(model, whole=True)
                self.do_settle(model, whole=True)
            self.do_read()
            stands = self.positions[0].groups().get(GROUP, {})
            if all(stands.get(lane, 0) >= units[-1][0] for lane, units in self.log.units.items() if units):
                break
        else:
            raise AssertionError(f"the positions stay behind: {stands}")
        for queues in self.queues:
            queues.close()


@contextmanager
def small_windows() -> Iterator[None]:
    """Let windows be full, and reserves be used up, after few tasks."""
    with (
        patch("millrace.node.append.queue_lanes.WINDOW_TASKS", WINDOW),
        patch("millrace.node.append.task_window.RESERVE_TASKS", 8),
        patch("millrace.node.append.queue_lanes.DRAIN_SECONDS", 3.0),
    ):
        yield


def play(seed: int, folder: Path | None = None, *, order: str = "", steps: int = 250) -> World:
    """Play one seed, with two servers or, with a `folder`, on one machine. Raises AssertionError."""
    with small_windows(), group_world.looks(seed):
        world = World(seed, folder, order=order)
        world.play(consumers=3, steps=steps)
        return world
