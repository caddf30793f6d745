"""Calls of a work queue at the server: what each answers, refuses, counts and bounds; see tests/sim for its faults."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import InvalidArgument, ServerFull
from millrace.base.metrics import Metrics
from millrace.node.append import work_queues as module
from millrace.node.append.queue_lanes import PROGRESS_SECONDS
from tests.node.append.queue_rig import GROUP, LANES, TASK_LEASE, Bench, Log, Queues, said
from tests.sim.group_world import LEASE, PCHANNELS, Hand, Positions, Server, Store
from tests.sim.tasks import World
from tests.waiting import until


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
    metrics = Metrics()
    bench = Bench(tmp_path, metrics)
    clock, queues = bench.clock, bench.queues
    bench.publish((9, 3))
    request = {"queue": "jobs", "group": GROUP, "consumer": "c1", "lanes": LANES, "last": 0, "most": 2, "lease": 1.0}
    assert not queues.take(request).parts
    [queue] = queues.queues()
    bench.read()
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


def test_who_comes_while_a_queue_closes_gets_the_next_one(tmp_path: Path) -> None:
    """Its last consumer leaves; the write of its state takes a while, and it leaves the group after that."""
    bench = Bench(tmp_path)
    bench.publish((1, 1))
    bench.take()
    writing, go_on = threading.Event(), threading.Event()
    move = bench.positions.move

    def slow(*moved: Any) -> None:
        writing.set()
        assert go_on.wait(10)
        move(*moved)

    bench.positions.move = slow  # type: ignore[method-assign]
    leaving = threading.Thread(target=bench.settle, kwargs={"leave": True})
    leaving.start()
    assert writing.wait(10)
    bench.positions.move = move  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(bench.take, "c2")
        bench.queues._close(bench.queues.queues())  # as another thread would: the one that closes takes it away
        assert wait([coming], timeout=0.2).not_done, "the next queue is the same member, which has not left yet"
        go_on.set()
        assert coming.result(10) == []
    leaving.join()
    bench.read()
    assert bench.take("c2", last=1) == [((LANES[0], 1, 0), 1)]
    [queue] = bench.queues.queues()
    assert not queue.closed


def test_a_take_that_waits_in_a_queue_that_closes_goes_on_in_the_next_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.take("c1")
    [queue] = bench.queues.queues()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(bench.take, "c2", wait=5.0)
        until(lambda: queue.consumers == 2, "it waits")
        queue._consumers.clear()  # as if it had come just after the last one left
        bench.queues._close([queue])
        until(lambda: bench.queues.queues() not in ([], [queue]), "another queue is there")
        bench.publish((1, 1))
        bench.read()
        assert coming.result(10) == [((LANES[0], 1, 0), 1)]


def test_who_left_is_no_consumer_again_by_a_take_that_waited(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.take("c1")
    [queue] = bench.queues.queues()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bench.take, "c1", wait=10.0)
        until(lambda: queue._consumers["ada", "c1"].turn == 2, "it waits")
        bench.settle("c1", leave=True)
        assert waiting.result(8.0) == [], "not once its time is over"
    assert not bench.queues.queues()


def test_a_server_holds_64_queues_of_64_vchannels_that_look_at_the_store_together_while_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, log = Hand(), Log()
    store = Store(clock, random.Random(1))
    positions = Positions(store)
    server = Server(Path("unused"), lambda: PCHANNELS, positions=lambda: positions, lease=LEASE, clock=clock)
    queues = Queues(server, log, "queue-0", clock)
    groups = {f"g{group}": [f"dml_{number % 2}_{7 + group}v{number}" for number in range(64)] for group in range(64)}
    for lanes in groups.values():
        log.units |= {lane: [] for lane in lanes}
    for group, lanes in groups.items():
        request = {"queue": "jobs", "group": group, "consumer": "c", "lanes": lanes, "last": 0, "most": 0}
        assert queues.take(request).lanes == 64
    queues.read_all()
    clock.now += PROGRESS_SECONDS  # the first position is written
    positions.renew()
    for queue in queues.queues():
        queue.tend()
    asked = Counter[str]()
    for name in ("get", "list", "commit"):
        call = getattr(store, name)
        setattr(store, name, lambda *given, call=call, name=name, **more: asked.update([name]) or call(*given, **more))
    rounds = 5
    for _ in range(rounds):  # each is due once
        clock.now += LEASE / 3
        positions.renew()
        for queue in queues.queues():
            queue.tend()
    assert asked["commit"] == 0, "an idle queue writes nothing"
    assert asked["list"] + asked["get"] <= 2 * rounds, "all queues look at the store together"
    for group, lanes in groups.items():
        assert server.handle({"group": group, "holder": "queue-0", "keep": lanes}) == {}, "it has all of them"
    monkeypatch.setattr("millrace.node.append.consumer_groups.MAX_LEASES", 64 * 64)
    with pytest.raises(ServerFull, match="4096 leases"):
        server.handle({"group": "one-more", "holder": "h", "take": "dml_0_7v0"})
