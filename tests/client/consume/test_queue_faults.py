"""A consumer of a work queue whose server restarts, cannot wait or refuses: the server's code, without a network."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millrace.base.errors import LogUnavailable, PermissionDenied
from millrace.client.consume.positions import FilePositions
from millrace.client.consume.queue_consumer import QueueConsumer, Task
from millrace.node.append.queue_lanes import TaskRows
from millrace.node.append.server import wire_tasks
from millrace.node.append.work_queues import WorkQueues
from millrace.rpc.tasks import LeasedTasks, decode_tasks
from millrace.rpc.wire import from_json, to_json
from tests.sim.group_world import Server
from tests.waiting import until

LANES = ["dml_0_7v0", "dml_1_7v1"]


class Tasks:
    """Each VChannel has one unit of so many rows (implements TaskSource and TaskReader)."""

    def __init__(self, count: int, lane: str = "", after: int = 0) -> None:
        self.count, self.lane, self.confirmed_tick = count, lane, after

    def open(self, lane: str, after_tick: int) -> Tasks:
        return Tasks(self.count, lane, after_tick)

    def require(self, lane: str) -> None: ...

    def start_tick(self, lane: str, start: str | int) -> int:
        return 0

    def poll(self) -> Iterator[TaskRows] | None:
        if self.confirmed_tick or not self.count:
            return None
        self.confirmed_tick = 1
        ids = pa.RecordBatch.from_pydict({"id": pa.array(range(self.count), pa.int64())})
        return iter([TaskRows(np.ones(self.count, np.int64), ids, "id", True)])

    def on_news(self, call: Callable[[], None]) -> float | None:
        return 0.05

    def close(self) -> None: ...


class Direct:
    """The server's calls, in this process (implements QueueServer); it can be killed, and started again."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.calls: Counter[str] = Counter()
        self.may_wait = True
        self.refuses: Exception | None = None
        self.away: Exception | None = None
        self.start()

    def start(self) -> None:
        self.positions = FilePositions(self.folder)
        # Without threads: one of a killed server must not meet its closed positions.
        self.groups = Server(self.folder, lambda: ["dml_0", "dml_1"], positions=lambda: self.positions)
        self.queues = WorkQueues(self.groups, Tasks(self.count), name="queue-0")

    def kill(self) -> None:
        """End it without a farewell: what is durable stays."""
        self.positions.close()
        for queue in self.queues._queues.values():
            queue.stop()
            queue.lanes._closed = True
            for lane in queue.lanes:
                lane.gone = True
        self.queues._queues.clear()
        self.start()

    def take_tasks(self, request: dict[str, Any], *, seconds: float) -> LeasedTasks:
        self.calls["take"] += 1
        if self.away is not None:
            raise self.away
        answer = self.queues.take(request, may_wait=self.may_wait)
        parts = [decode_tasks(batch, from_json(said)) for batch, said in wire_tasks(answer.parts)]
        return LeasedTasks(answer.number, parts, answer.lanes, answer.reason)

    def settle_tasks(self, request: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        self.calls["settle"] += 1
        if self.refuses is not None:
            raise self.refuses
        found: dict[str, Any] = from_json(to_json(self.queues.handle(request)))
        return found


Make = Callable[..., tuple[Direct, QueueConsumer]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as closing:

        def made(count: int = 6, **options: Any) -> tuple[Direct, QueueConsumer]:
            server = Direct(tmp_path, count)
            queue = QueueConsumer(server, collection="jobs", lanes=LANES, group="workers", **options)
            closing.callback(server.queues.close)
            closing.callback(queue.close)
            return server, queue

        yield made


def polled(queue: QueueConsumer, count: int) -> list[Task]:
    found: list[Task] = []

    def came() -> bool:
        if (task := queue.poll(timeout=0.1)) is not None:
            found.append(task)
        return len(found) == count

    until(came, f"{count} tasks")
    return found


def test_a_long_task_is_renewed_across_a_kill_of_the_server_though_its_consumer_wants_no_other(make: Make) -> None:
    server, queue = make(count=1, prefetch=1, lease=20.0)
    [task] = polled(queue, 1)
    server.kill()

    def renewed() -> bool:
        try:
            queue.renew(task)
        except LogUnavailable:  # it is asked to dispatch the queue
            return False
        return True

    until(renewed, "the lease begins anew", seconds=5.0)
    assert task.lease_left > 15
    queue.acknowledge(task)
    queue.commit(timeout=5.0)


def test_a_server_that_cannot_wait_is_not_asked_in_a_hot_loop(make: Make) -> None:
    server, queue = make(count=0)
    server.may_wait = False
    before = server.calls["take"]
    time.sleep(1.0)
    assert server.calls["take"] - before < 15
    assert queue.poll(timeout=0.0) is None


def test_acknowledgements_one_by_one_go_together(make: Make) -> None:
    """Each call costs the server a durable write."""
    server, queue = make(count=500, prefetch=2000)
    for task in polled(queue, 1000):
        queue.acknowledge(task)
    queue.commit()
    assert server.calls["settle"] <= 20


def test_a_task_that_nobody_settles_takes_no_room_once_its_lease_is_over(make: Make) -> None:
    _, queue = make(count=2, prefetch=2, lease=1.0)
    forgotten = {task.id for task in polled(queue, 2)}
    assert queue.unsettled == 2
    later = polled(queue, 4)  # without room for them it would wait for good
    assert {task.id for task in later} | forgotten >= {f"{lane}/1/{row}" for lane in LANES for row in (0, 1)}


def test_a_consumer_that_asks_for_nothing_leaves_its_lost_tasks_to_another(make: Make) -> None:
    server, stuck = make(count=1, prefetch=2, lease=1.0)
    lost = {task.id for task in polled(stuck, 2)}
    time.sleep(2.0)  # their leases are over, and nobody else waits for them
    other = QueueConsumer(server, collection="jobs", lanes=LANES, group="workers", lease=30.0)
    again = polled(other, 2)
    other.close()
    assert {task.id: task.deliveries for task in again} == dict.fromkeys(lost, 2)


def test_what_the_server_refuses_for_good_is_raised_and_not_collected(make: Make) -> None:
    server, queue = make(count=2)
    [task, _] = polled(queue, 2)
    server.refuses = PermissionDenied("the grant was taken away")
    queue.acknowledge(task)
    with pytest.raises(PermissionDenied):
        queue.commit(timeout=20.0)
    time.sleep(1.5)
    assert len(queue._errors) <= 10
    with pytest.raises(PermissionDenied):
        queue.close()
    assert queue.closed


def test_an_error_that_nobody_expects_is_raised_and_ends_no_thread(make: Make) -> None:
    server, queue = make(count=2, prefetch=2)
    first = polled(queue, 2)
    server.refuses = server.away = ValueError("an answer that cannot be read")
    queue.acknowledge(first[0])
    with pytest.raises(ValueError, match="cannot be read"):
        queue.commit(timeout=20.0)
    with pytest.raises(ValueError, match="cannot be read"):
        queue.poll(timeout=20.0)
    server.refuses = None
    until(lambda: queue._failed is None, "the thread sends it again")
    queue.acknowledge(first[1])
    queue.commit(timeout=20.0)
    calls = server.calls["take"]
    until(lambda: server.calls["take"] > calls)
    queue._errors.clear()
    server.away = None

    def comes() -> bool:
        try:
            return queue.poll(timeout=1.0) is not None
        except ValueError:  # of a call that was under way
            return False

    until(comes)


def test_an_answer_that_comes_while_the_consumer_closes_gives_its_tasks_back_uncounted(make: Make) -> None:
    server, queue = make(count=3, prefetch=10)
    polled_one = polled(queue, 1)[0]
    queue.close()
    other = QueueConsumer(server, collection="jobs", lanes=LANES, group="workers")
    counts = {task.id: task.deliveries for task in polled(other, 6)}
    other.close()
    assert counts.pop(polled_one.id) == 2
    assert set(counts.values()) == {1}


def test_a_server_that_is_away_for_a_while_ends_no_loop_over_tasks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    server, queue = make(count=3, prefetch=1)
    back = threading.Timer(1.0, setattr, (server, "away", None))
    came: list[Task] = []
    for task in queue:
        queue.acknowledge(task)
        came.append(task)
        if len(came) == 2:
            server.away = LogUnavailable("the log's server is stopping: call again")
            back.start()
        if len({each.id for each in came}) == 6:
            break
    back.join()
    monkeypatch.setattr("millrace.client.consume.queue_consumer.PATIENCE", 0.5)
    server.away = LogUnavailable("nobody is there")

    def raises() -> bool:
        try:
            queue.poll(timeout=0.2)
        except LogUnavailable:
            return True
        return False

    until(raises, "what lasts is raised", seconds=20)
