"""A work queue whose consumers, servers and store fail: seeded, on a virtual clock.

What breaks names its seed. Laws: a task whose acknowledgement was answered never comes again; no task has two holders
whose leases run; a window keeps its bound; in the end every task was processed and is done.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millrace.base.errors import MillraceError
from millrace.base.metrics import Metrics
from millrace.client.consume.membership import GroupMember
from millrace.client.consume.positions import FilePositions
from millrace.node.append import work_queues as module
from millrace.node.append.work_queues import TaskRows, WorkQueue, WorkQueues
from tests.node.append.test_group_sharing import Hand, Positions, Server, Store

GROUP, LEASE, TASK_LEASE, WINDOW = "work", 10.0, 8.0, 48
LANES = [f"dml_{number % 2}_7v{number}" for number in range(4)]
Name = tuple[str, int, int]


class Log:
    """The units of each VChannel: ticks and numbers of rows (implements TaskSource)."""

    def __init__(self) -> None:
        self.units: dict[str, list[tuple[int, int]]] = {lane: [] for lane in LANES}
        self.now = 1

    def open(self, lane: str, after_tick: int) -> Reader:
        return Reader(self, lane, after_tick)

    def start_tick(self, lane: str, start: str | int) -> int:
        return {"earliest": 0, "latest": self.now}[start] if isinstance(start, str) else start

    def names(self) -> list[Name]:
        return [
            (lane, tick, each) for lane, units in self.units.items() for tick, count in units for each in range(count)
        ]


class Reader:
    def __init__(self, log: Log, lane: str, after: int) -> None:
        self.log, self.lane, self.confirmed_tick = log, lane, after

    def poll(self, *, timeout: float) -> Iterator[TaskRows]:
        following = [unit for unit in self.log.units[self.lane] if unit[0] > self.confirmed_tick][:2]
        self.confirmed_tick = following[-1][0] if following else self.log.now
        if following:
            ticks = np.repeat(*np.array(following, np.int64).T)
            keys = pa.array((ticks % 3).tolist(), pa.int64())
            yield TaskRows(ticks, pa.RecordBatch.from_arrays([keys], ["id"]), "id", True)

    def close(self) -> None: ...


class Queue(WorkQueue):
    """One without threads: the world calls what they would."""

    def _start_keeper(self) -> None: ...

    def _read(self, lane: Any) -> None: ...

    def read_all(self) -> None:
        for lane in list(self._lanes.values()):
            if lane.window.room >= 8:
                self.read(lane, timeout=0.0)
            assert lane.window.room >= 0

    def held_by_lane(self) -> dict[str, Any]:
        return self._lanes


class Queues(WorkQueues):
    def _make(self, group: str, collection: str, order: str, start: str | int, member: GroupMember) -> WorkQueue:
        return Queue(
            self, group, collection, member, self._groups, self._source, order=order, start=start, clock=self._clock,
            metrics=self._metrics,
        )  # fmt: skip

    def queues(self) -> list[Queue]:
        return [queue for queue in self._queues.values() if isinstance(queue, Queue)]


@dataclass
class Model:
    """A consumer, by the server's calls."""

    name: str
    server: int
    last: int = 0
    held: dict[Name, tuple[int, float]] = field(default_factory=dict)
    """Delivery count and end of the lease by the own clock."""
    paused: bool = False


class World:
    def __init__(self, seed: int, folder: Path | None, *, order: str = "") -> None:
        self.chance = random.Random(seed)
        self.clock = Hand()
        self.folder, self.order = folder, order
        self.store = Store(self.clock, self.chance)
        self.log = Log()
        self.done: set[Name] = set()
        """Acknowledged, and answered."""
        self.sent: set[Name] = set()
        """Acknowledged, perhaps by somebody who never got the answer."""
        self.times: Counter[Name] = Counter()
        self.events: Counter[str] = Counter()
        self.models: list[Model] = []
        self.made = 0
        self.positions: list[Any] = []
        self.servers: list[Server] = []
        self.queues: list[Queues] = []
        for number in range(1 if folder else 2):
            self.new_server(number)

    def new_server(self, number: int) -> None:
        positions: Any = Positions(self.store) if self.folder is None else FilePositions(self.folder)
        server = Server(
            Path("unused"), lambda: ["dml_0", "dml_1"], positions=lambda: positions, lease=LEASE, clock=self.clock
        )
        queues = Queues(server, self.log, name=f"queue-{number}", clock=self.clock, lease=LEASE)
        if number < len(self.servers):
            self.servers[number], self.queues[number], self.positions[number] = server, queues, positions
        else:
            self.servers.append(server)
            self.queues.append(queues)
            self.positions.append(positions)

    # -- what happens --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        kinds = {
            "take": 30, "settle": 30, "read": 20, "tend": 14, "time": 12, "publish": 8, "join": 2, "leave": 1,
            "kill": 1, "pause": 2, "store": 2, "restart": 1, "switch": 1,
        }  # fmt: skip
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        self.events[kind] += 1
        getattr(self, f"do_{kind}")()

    def one(self) -> Model | None:
        awake = [model for model in self.models if not model.paused]
        return self.chance.choice(awake) if awake else None

    def do_take(self, model: Model | None = None, *, whole: bool = False) -> None:
        model = model or self.one()
        if model is None or len(model.held) > 12:
            return
        asked = self.clock.now
        lost = 0.0 if whole else 0.04
        if self.chance.random() < lost:
            return
        request = {
            "queue": "jobs", "group": GROUP, "consumer": model.name, "lanes": LANES, "last": model.last,
            "most": self.chance.choice([1, 3, 10]), "lease": TASK_LEASE, "order": self.order,
        }  # fmt: skip
        try:
            answer = self.queues[model.server].take(request)
        except MillraceError as error:
            self.refused(error)
            return
        if self.chance.random() < lost:
            self.events["lost answer"] += 1
            return
        model.last = answer.number
        for part in answer.parts:
            columns = (part.names.ticks, part.names.ordinals, part.names.deliveries)
            for tick, ordinal, count in zip(*(column.tolist() for column in columns), strict=True):
                self.delivered(model, (part.lane, tick, ordinal), count, asked + TASK_LEASE)

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
                if place in unread or kind == "release":
                    continue
                if place in lost:
                    del model.held[name]
                elif kind == "renew":
                    model.held[name] = (model.held[name][0], max(model.held[name][1], asked + TASK_LEASE))
                else:
                    self.done.add(name)
                    del model.held[name]

    def do_read(self) -> None:
        for queues in self.queues:
            for queue in queues.queues():
                queue.read_all()

    def do_tend(self) -> None:
        for queues in self.queues:
            for queue in queues.queues():
                try:
                    queue.tend()
                except MillraceError:
                    pass

    def do_time(self) -> None:
        self.clock.now += self.chance.choice([0.3, 1.0, 1.0, 2.0, 3.0])
        for positions in self.positions:
            if isinstance(positions, Positions):
                positions.renew()
        for server in self.servers:
            server.release_silent()
        for model in self.models:
            if model.paused and self.chance.random() < 0.15:
                model.paused = False

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

    def do_kill(self) -> None:
        if len(self.models) > 1:
            self.models.remove(self.chance.choice(self.models))

    def do_pause(self) -> None:
        if (model := self.one()) is not None:
            model.paused = True

    def do_store(self) -> None:
        self.store.away = not self.store.away and self.chance.random() < 0.5
        self.store.loses = 0.1 if self.chance.random() < 0.5 else 0.0

    def do_restart(self) -> None:
        number = self.chance.randrange(len(self.servers))
        if self.folder is not None:
            self.positions[number].close()  # a killed process keeps no lock
        self.new_server(number)

    def do_switch(self) -> None:
        if (model := self.one()) is not None:
            model.server, model.last = self.chance.randrange(len(self.servers)), model.last + 1

    # -- what must hold ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.store.away, self.store.loses = False, 0.0
        if not self.models:
            self.do_join()
        for model in self.models:
            model.paused = False
        for number in range(len(self.servers)):  # every server has a consumer: it dispatches its part
            if not any(model.server == number for model in self.models):
                self.made += 1
                self.models.append(Model(f"c{self.made}", number))
        everything = set(self.log.names())
        for _ in range(400):
            if self.sent >= everything and all(not model.held for model in self.models):
                break
            self.clock.now += 1.0
            for positions in self.positions:
                if isinstance(positions, Positions):
                    positions.renew()
            for server in self.servers:
                server.release_silent()
            self.do_tend()
            for model in self.models:
                self.do_take(model, whole=True)
                self.do_read()
                self.do_take(model, whole=True)
                self.do_settle(model, whole=True)
        assert self.sent >= everything, f"{len(everything - self.sent)} of {len(everything)} tasks were not done"
        assert set(self.times) >= everything
        for _ in range(40):
            self.clock.now += 1.0
            self.do_tend()
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


def play(seed: int, folder: Path | None = None, *, order: str = "", steps: int = 250) -> World:
    world = World(seed, folder, order=order)
    for _ in range(3):
        world.do_join()
    try:
        for _ in range(steps):
            world.step()
        world.settle()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return world


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_TASKS", WINDOW)
    monkeypatch.setattr("millrace.node.append.task_window.RESERVE_TASKS", 8)
    monkeypatch.setattr(module, "DRAIN_SECONDS", 0.0)


def test_what_a_queue_does_is_counted(tmp_path: Path) -> None:
    clock, log, metrics = Hand(), Log(), Metrics()
    positions = FilePositions(tmp_path)
    server = Server(tmp_path, lambda: ["dml_0", "dml_1"], positions=lambda: positions, lease=LEASE, clock=clock)
    queues = Queues(server, log, name="queue-0", clock=clock, lease=LEASE, metrics=metrics)
    log.now = 9
    log.units[LANES[0]].append((9, 3))
    request = {"queue": "jobs", "group": GROUP, "consumer": "c1", "lanes": LANES, "last": 0, "most": 2, "lease": 1.0}
    assert not queues.take(request).parts
    [queue] = queues.queues()
    queue.read_all()
    [part] = queues.take(request | {"last": 1}).parts
    queue.tend()
    name = f'{{group="{GROUP}"}}'

    def value(family: str) -> float:
        [line] = [each for each in metrics.render().decode().splitlines() if f"{family}{name} " in each]
        return float(line.split()[-1])

    assert (value("queue_ready_tasks"), value("queue_in_flight_tasks")) == (1, 2)
    assert value("queue_oldest_task_seconds") > 0
    done = [
        [part.lane, *(column[:1].tolist() for column in (part.names.ticks, part.names.ordinals, part.names.deliveries))]
    ]
    queues.handle({"group": GROUP, "consumer": "c1", "done": done})
    clock.now += 2.0
    queue.tend()
    queues.take(request | {"last": 2})
    assert value("queue_deliveries_total") == 4
    assert value("queue_redeliveries_total") == 1
    assert value("queue_acknowledged_total") == 1
    assert value("queue_expired_leases_total") == 1
    queues.close()
    assert f"queue_ready_tasks{name}" not in metrics.render().decode(), "a queue that is closed has no gauges"


@pytest.mark.parametrize("order", ["", "key"])
@pytest.mark.parametrize("part", range(2))
def test_of_a_queue_on_two_servers_nothing_is_lost_and_a_task_has_one_holder(part: int, order: str) -> None:
    events, again = Counter[str](), 0
    for seed in range(part * 12, part * 12 + 12):
        world = play(seed, order=order)
        events += world.events
        again += sum(count > 1 for count in world.times.values())
    assert min(events[kind] for kind in ("kill", "pause", "store", "restart", "switch", "leave", "lost answer")) > 3, (
        events
    )
    assert again, "leases ended, and tasks came again"


@pytest.mark.parametrize("order", ["", "key"])
def test_the_same_on_one_machine(tmp_path: Path, order: str) -> None:
    for seed in range(6):
        play(seed, tmp_path / str(seed), order=order, steps=150)
