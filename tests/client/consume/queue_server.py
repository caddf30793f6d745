"""The calls of a log's server that queue consumers make, in this process: the server's code, without a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.base.errors import LogUnavailable
from millrace.client.consume.positions import FilePositions
from millrace.client.consume.queue_consumer import QueueConsumer, Task
from millrace.node.append.queue_lanes import TaskRows
from millrace.node.append.server import wire_tasks
from millrace.node.append.work_queues import WorkQueues
from millrace.rpc.tasks import LeasedTasks, TaskNews, decode_tasks
from millrace.rpc.wire import from_json, to_json
from tests.sim.group_world import Server
from tests.waiting import until

LANES = ["dml_0_7v0", "dml_1_7v1"]


class Tasks:
    """Units of so many rows on each VChannel, with ticks from 1 on (implements TaskSource and TaskReader)."""

    def __init__(self, units: dict[str, list[int]], lane: str = "", after: int = 0) -> None:
        self.units, self.lane, self.confirmed_tick = units, lane, after

    def open(self, lane: str, after_tick: int) -> Tasks:
        return Tasks(self.units, lane, after_tick)

    def require(self, lane: str) -> None: ...

    def start_tick(self, lane: str, start: str | int) -> int:
        return 0

    def poll(self) -> Iterator[TaskRows] | None:
        units = self.units.get(self.lane, [])
        if self.confirmed_tick >= len(units):
            return None
        self.confirmed_tick += 1
        count = units[self.confirmed_tick - 1]
        ids = pa.RecordBatch.from_pydict({"id": pa.array(range(count), pa.int64())})
        return iter([TaskRows(np.full(count, self.confirmed_tick, np.int64), ids, "id", True)])

    def on_news(self, call: Callable[[], None]) -> float | None:
        return 0.05

    def close(self) -> None: ...


class Direct:
    """The server's calls, in this process (implements QueueServer); it can be killed, and started again."""

    def __init__(self, folder: Path, count: int) -> None:
        """Each of LANES has one unit of `count` rows."""
        self.folder = folder
        self.units: dict[str, list[int]] = {lane: [count] for lane in LANES} if count else {}
        self.calls: Counter[str] = Counter()
        self.may_wait = True
        self.loses_news = 0
        """So many answers that tell of tasks are lost."""
        self.refuses: Exception | None = None
        self.away: Exception | None = None
        self.start()

    def start(self) -> None:
        self.positions = FilePositions(self.folder)
        # Without threads: one of a killed server must not meet its closed positions.
        self.groups = Server(self.folder, lambda: ["dml_0", "dml_1"], positions=lambda: self.positions)
        self.queues = WorkQueues(self.groups, Tasks(self.units), name="queue-0")

    def kill(self) -> None:
        """End it without a farewell: what is durable stays."""
        self.positions.close()
        self.queues.sessions.close()
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
        return LeasedTasks(answer.number, parts, answer.lanes, answer.reason, answer.session)

    def task_news(self, request: dict[str, Any], *, seconds: float) -> TaskNews:
        self.calls["news"] += 1
        if self.away is not None:
            raise self.away
        found = self.queues.news(request, may_wait=self.may_wait)
        if found.ready and self.loses_news:
            self.loses_news -= 1
            raise LogUnavailable("the answer was lost")
        return found

    def publish(self, lane: str, count: int = 1) -> None:
        """Publish a unit of so many rows."""
        self.units.setdefault(lane, []).append(count)

    def settle_tasks(self, request: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        self.calls["settle"] += 1
        if self.refuses is not None:
            raise self.refuses
        found: dict[str, Any] = from_json(to_json(self.queues.handle(request)))
        return found


def polled(queue: QueueConsumer, count: int) -> list[Task]:
    found: list[Task] = []

    def came() -> bool:
        while len(found) < count and (task := queue.poll(timeout=0.1)) is not None:
            found.append(task)
        return len(found) == count

    until(came, f"{count} tasks")
    return found
