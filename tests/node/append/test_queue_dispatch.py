"""A work queue whose consumers, servers and store fail: seeded, on a virtual clock.

What breaks names its seed. Laws: a task whose acknowledgement was answered never comes again; no task has two holders
whose leases run; a window keeps its bound; in the end every task was processed and is done.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from millrace.base.errors import CollectionNotFound, InvalidArgument, MillraceError, ServerFull
from millrace.base.metrics import Metrics
from millrace.client.consume.membership import GroupMember
from millrace.client.consume.positions import FilePositions
from millrace.node.append import work_queues as module
from millrace.node.append.work_queues import TaskRows, WorkQueue, WorkQueues
from tests.node.append import group_rig as rig
from tests.node.append.group_rig import LEASE, PCHANNELS, Hand, Server
from tests.waiting import until

GROUP, TASK_LEASE, WINDOW = "work", 8.0, 48
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


class World(rig.World[Model]):
    KINDS: ClassVar = {
        "take": 30, "settle": 30, "read": 20, "tend": 14, "time": 12, "publish": 8, "join": 2, "leave": 1, "kill": 1,
        "pause": 2, "store": 2, "restart": 1, "switch": 1,
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
        super().__init__(seed, folder)

    def start_server(self, number: int) -> None:
        super().start_server(number)
        queues = Queues(self.servers[number], self.log, name=f"queue-{number}", clock=self.clock, lease=LEASE)
        self.queues[number : number + 1] = [queues]

    # -- what happens --------------------------------------------------------------------------------------------------

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
    monkeypatch.setattr(module, "DRAIN_SECONDS", 3.0)


class Bench:
    """One server on one machine whose log has tasks; the test calls what consumers and threads would."""

    def __init__(self, folder: Path, metrics: Metrics | None = None) -> None:
        self.clock, self.log, self.metrics = Hand(), Log(), metrics
        self.positions = FilePositions(folder)
        self.server = Server(folder, lambda: PCHANNELS, positions=lambda: self.positions, lease=LEASE, clock=self.clock)
        self.queues = Queues(self.server, self.log, name="queue-0", clock=self.clock, lease=LEASE, metrics=metrics)

    def publish(self, *units: tuple[int, int], lane: str = LANES[0]) -> None:
        self.log.now = units[-1][0]
        self.log.units[lane] += units

    def read(self) -> None:
        for queue in self.queues.queues():
            queue.read_all()

    def take(self, consumer: str = "c1", *, caller: str = "ada", **options: Any) -> list[tuple[Name, int]]:
        """Return the names and delivery counts of tasks."""
        request = {
            "queue": "jobs", "group": GROUP, "consumer": consumer, "lanes": LANES, "last": 0, "most": 10,
            "lease": TASK_LEASE, **options,
        }  # fmt: skip
        found = []
        for part in self.queues.take(request, caller=caller).parts:
            columns = (part.names.ticks.tolist(), part.names.ordinals.tolist(), part.names.deliveries.tolist())
            found += [((part.lane, tick, ordinal), count) for tick, ordinal, count in zip(*columns, strict=True)]
        return found

    def settle(self, consumer: str = "c1", *, caller: str = "ada", **lists: Any) -> dict[str, Any]:
        return self.queues.handle({"group": GROUP, "consumer": consumer, **lists}, caller=caller)


def said(*tasks: tuple[Name, int]) -> list[list[Any]]:
    """Return tasks as a call names them."""
    return [[lane, [tick], [ordinal], [count]] for (lane, tick, ordinal), count in tasks]


def test_what_a_consumer_has_when_it_leaves_comes_again_counted_unless_it_never_got_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.publish((1, 3))
    assert bench.take() == []
    bench.read()
    [got] = bench.take(last=1, most=1)
    bench.take("c2", most=0)  # the queue stays open
    bench.take(last=2, most=2)  # the answer never comes
    bench.settle(leave=True, last=2)
    again = dict(bench.take("c2", last=1))
    assert again[got[0]] == 2, "a task at which its consumers fail is counted, so that it becomes a dead letter"
    assert sorted(again.values()) == [1, 1, 2]


def test_another_principal_settles_nothing_under_the_name_of_a_consumer(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.publish((1, 1))
    bench.take()
    bench.read()
    [task] = bench.take(last=1)
    for kind in ("done", "renew"):
        assert bench.settle(caller="eve", **{kind: said(task)})["lost"] == {kind: [[0, 0]]}
    assert bench.settle(caller="eve", release=[[*said(task)[0], 0.0, True]])["lost"]
    bench.settle(caller="eve", leave=True)
    assert bench.take("c2") == []
    assert bench.settle(done=said(task)) == {"lost": {}, "unread": {}}


@pytest.mark.parametrize(
    "lists",
    [
        {"release": [[LANES[0], [1], [0], [1], 0.5]]},
        {"release": [[LANES[0], [1], [0], [1], float("nan"), True]]},
        {"release": [[LANES[0], [1], [0], [1], -1.0, True]]},
        {"done": [[LANES[0], [1], [0, 1], [1]]]},
        {"done": [[LANES[0], [1 << 70], [0], [1]]]},
        {"done": [[LANES[0], [True], [0], [1]]]},
        {"done": [[LANES[0], [], [], []]] * (module.MAX_TASKS + 1)},
        {"done": [[LANES[0], [1] * 3000, [0] * 3000, [1] * 3000]] * 2},
        {"renew": "abc"},
        {"renew": 5},
    ],
)
def test_a_call_that_names_tasks_wrongly_is_refused(tmp_path: Path, lists: dict[str, Any]) -> None:
    bench = Bench(tmp_path)
    bench.take()
    with pytest.raises(InvalidArgument):
        bench.settle(**lists)


def test_names_that_no_task_has_change_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.publish((5, 2))
    bench.take()
    bench.read()
    [first, second] = bench.take(last=1)
    edge = (1 << 63) - 1
    for tick, ordinal, count in ((5, -1, 1), (5, edge, 1), (-edge, 0, 1), (edge, edge, 1), (5, 0, 2), (5, 0, -1)):
        bench.settle(done=[[LANES[0], [tick], [ordinal], [count]]])
    assert bench.settle(renew=said(first, second)) == {"lost": {}, "unread": {}}, "they are leased as before"


@pytest.mark.parametrize(
    "options",
    [{"lanes": [f"dml_0_7v{n}" for n in range(module.MAX_LANES + 1)]}, {"start": "noon"}, {"start": -1},
     {"most": module.MAX_TASKS + 1}, {"most": -1}, {"lease": float("nan")}, {"last": -1}],
)  # fmt: skip
def test_a_take_with_wrong_arguments_opens_no_queue(tmp_path: Path, options: dict[str, Any]) -> None:
    bench = Bench(tmp_path)
    with pytest.raises(InvalidArgument):
        bench.take(**options)
    assert not bench.queues.queues()


def test_consumers_of_one_queue_leave_room_for_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUE_CONSUMERS", 3)
    bench = Bench(tmp_path)
    bench.take()
    for number in (2, 3):
        bench.settle(f"c{number}", done=said(((LANES[0], 1, 0), 1)))
    with pytest.raises(ServerFull):
        bench.take("c4")
    bench.settle("c5")  # names nothing, and is no consumer
    assert bench.take("c1", last=1) == []


def test_who_leaves_a_queue_closes_no_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.take(group="other")
    [other] = bench.queues.queues()
    other._consumers.clear()  # as between the making of a queue and its first consumer
    bench.take()
    bench.settle(leave=True)
    assert bench.queues.queues() == [other]
    assert not other.closed


def test_a_vchannel_that_could_not_be_read_is_read_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.publish((1, 1))
    errors = [CollectionNotFound("the catalog does not know the schema yet"), TypeError("a fault")]

    def open_reader(lane: str, after_tick: int) -> Reader:
        if lane == LANES[0] and errors:
            raise errors.pop()
        return Reader(bench.log, lane, after_tick)

    bench.log.open = open_reader  # type: ignore[method-assign]
    bench.take()
    [queue] = bench.queues.queues()
    lane = queue.held_by_lane()[LANES[0]]
    thread = threading.Thread(target=queue._read_on, args=(lane,), daemon=True)
    thread.start()

    def comes() -> bool:
        try:
            return bool(bench.take(last=1))
        except MillraceError:  # the consumer sees why it waits
            return False

    until(comes, "the task comes")
    assert not errors
    assert lane.error is None
    bench.queues.close()
    thread.join(5.0)
    assert not thread.is_alive()


def test_what_windows_hold_is_counted_and_bounds_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES", 1500)
    bench = Bench(tmp_path)
    for lane in LANES:
        bench.publish(*((tick, 3) for tick in range(1, 6)), lane=lane)
    bench.take()
    [queue] = bench.queues.queues()
    for _ in range(9):
        bench.read()

    def held() -> int:
        return sum(lane.window.bytes for lane in queue.held_by_lane().values())

    assert held() == bench.queues.bytes
    assert 1500 <= held() < 1500 + len(LANES) * 6 * (8 + 80), "each reads one message more at most"
    assert all(lane.window.bytes for lane in queue.held_by_lane().values()), "and none starves"
    tasks = bench.take(last=1, most=50)
    bench.settle(done=said(*tasks))
    assert held() == bench.queues.bytes < 1500
    bench.queues.close()
    assert bench.queues.bytes == 0


def test_an_idle_queue_costs_next_to_nothing(tmp_path: Path) -> None:
    """Other messages of its PChannels pass; a consumer waits."""
    bench = Bench(tmp_path)
    bench.take()
    [queue] = bench.queues.queues()
    calls, writes = Counter[str](), Counter[str]()
    handle, move = bench.server.handle, bench.positions.move
    queue._member._call = lambda request: calls.update(["sync"]) or handle(request)
    bench.positions.move = lambda *moved: writes.update(["move"]) or move(*moved)  # type: ignore[method-assign]
    for second in range(60):
        bench.log.now += 1
        bench.clock.now += 1.0
        bench.read()
        queue.tend()
        bench.take(last=second + 1)
    assert calls["sync"] <= 60 / (LEASE / 4) + 1
    assert writes["move"] <= 60 / module.PROGRESS_SECONDS + 1
    stands = bench.positions.groups()[GROUP]
    assert min(stands.values()) > bench.log.now - 10, "yet it moves, so that retention can"


def test_two_servers_agree_on_the_order(tmp_path: Path) -> None:
    world = World(1, None)
    world.store.loses = 0.0
    request = {"queue": "jobs", "group": GROUP, "consumer": "c", "lanes": LANES, "lease": TASK_LEASE}
    world.queues[0].take(request | {"order": "key"})
    with pytest.raises(InvalidArgument, match="order"):
        world.queues[1].take(request)
    world.queues[1].take(request | {"order": "key"})


def test_counters_of_a_group_end_with_it(tmp_path: Path) -> None:
    metrics = Metrics()
    bench = Bench(tmp_path, metrics)
    bench.publish((1, 1))
    bench.take()
    bench.read()
    bench.settle(done=said(*bench.take(last=1)), leave=True)
    assert f'{{group="{GROUP}"}}' in metrics.render().decode()
    bench.queues.forget(GROUP)
    assert f'{{group="{GROUP}"}}' not in metrics.render().decode()


def test_what_a_queue_does_is_counted(tmp_path: Path) -> None:
    clock, log, metrics = Hand(), Log(), Metrics()
    positions = FilePositions(tmp_path)
    server = Server(tmp_path, lambda: PCHANNELS, positions=lambda: positions, lease=LEASE, clock=clock)
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
