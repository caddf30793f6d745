"""VChannels of a work queue at the server: what is read ahead and written, and its cost; see tests/sim for faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millrace.base.errors import CollectionNotFound, MetaUnavailable, MillraceError
from millrace.base.job_pool import Job, JobPool
from millrace.node.append import queue_lanes as module
from tests.node.append.queue_rig import GROUP, LANES, Bench, Reader, said
from tests.sim.group_world import LEASE
from tests.waiting import until


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
    lane = queue.lanes.get(LANES[0])
    assert lane is not None
    pool = JobPool("read", threads=1)
    lane.job = pool.start(partial(queue.lanes.read_on, lane))

    def comes() -> bool:
        try:
            return bool(bench.take(last=1))
        except MillraceError:  # the consumer sees why it waits
            return False

    until(comes, "the task comes")
    assert not errors
    assert lane.error is None
    bench.queues.close()
    assert len(pool) == 0, "it is read no more"
    pool.close()


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
        return sum(lane.window.bytes for lane in queue.lanes)

    assert held() == bench.queues.memory.bytes
    assert 1500 <= held() < 1500 + len(LANES) * 6 * (8 + 80), "each reads one message more at most"
    assert all(lane.window.bytes for lane in queue.lanes), "and none starves"
    tasks = bench.take(last=1, most=50)
    bench.settle(done=said(*tasks))
    assert held() == bench.queues.memory.bytes < 1500
    bench.queues.close()
    assert bench.queues.memory.bytes == 0


def test_an_idle_queue_costs_next_to_nothing(tmp_path: Path) -> None:
    """Other messages of its PChannels pass; a consumer waits."""
    bench = Bench(tmp_path)
    bench.take()
    [queue] = bench.queues.queues()
    calls, writes = Counter[str](), Counter[str]()
    handle, move = bench.server.handle, bench.positions.move
    queue.lanes._member._call = lambda request: calls.update(["sync"]) or handle(request)
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


def test_vchannels_whose_first_write_failed_are_read_as_well(tmp_path: Path) -> None:
    """Else a queue that gets another server's VChannels while the store is away never delivers their tasks."""
    bench = Bench(tmp_path)
    bench.publish((1, 1))
    started: list[str] = []
    start = bench.queues._reading.start

    def noted(run: Callable[[], float | None], *, name: str = "") -> Job:
        started.append(name)
        return start(run, name=name)

    bench.queues._reading.start = noted  # type: ignore[method-assign]
    move = bench.positions.move

    def fail(*moved: Any) -> None:
        raise MetaUnavailable("the store is away")

    bench.take(lanes=LANES, most=0)
    [queue] = bench.queues.queues()
    [lane] = [lane for lane in queue.lanes if lane.name == LANES[0]]
    bench.server.handle({"group": GROUP, "holder": "queue-0", "leave": [LANES[0]]})
    bench.clock.now += LEASE
    started.clear()
    bench.positions.move = fail  # type: ignore[method-assign]
    with pytest.raises(MetaUnavailable):
        queue.tend()
    bench.positions.move = move  # type: ignore[method-assign]
    assert lane.gone
    assert any(LANES[0] in name for name in started)
    queue.tend()
    bench.read()
    assert [name for name, _ in bench.take(last=1)] == [(LANES[0], 1, 0)]
