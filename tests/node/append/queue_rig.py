"""A log of tasks, and the server's queues without threads: a test calls what threads and consumers would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.base.metrics import Metrics
from millrace.client.consume.positions import FilePositions
from millrace.node.append.consumer_groups import ConsumerGroups
from millrace.node.append.queue_lanes import TaskRows
from millrace.node.append.work_queues import WorkQueue, WorkQueues
from tests.sim.group_world import LEASE, PCHANNELS, Hand, Server

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

    def require(self, lane: str) -> None: ...

    def start_tick(self, lane: str, start: str | int) -> int:
        return {"earliest": 0, "latest": self.now}[start] if isinstance(start, str) else start

    def names(self) -> list[Name]:
        return [
            (lane, tick, each) for lane, units in self.units.items() for tick, count in units for each in range(count)
        ]


class Reader:
    def __init__(self, log: Log, lane: str, after: int) -> None:
        self.log, self.lane, self.confirmed_tick = log, lane, after

    def poll(self) -> Iterator[TaskRows]:
        following = [unit for unit in self.log.units[self.lane] if unit[0] > self.confirmed_tick][:2]
        self.confirmed_tick = following[-1][0] if following else self.log.now
        if following:
            ticks = np.repeat(*np.array(following, np.int64).T)
            keys = pa.array((ticks % 3).tolist(), pa.int64())
            return iter([TaskRows(ticks, pa.RecordBatch.from_arrays([keys], ["id"]), "id", True)])
        return iter(())

    def on_news(self, call: Callable[[], None]) -> float | None:
        return 0.01

    def close(self) -> None: ...


class Queues(WorkQueues):
    """Those of a server without threads."""

    def __init__(
        self, groups: ConsumerGroups, log: Log, name: str, clock: Hand, metrics: Metrics | None = None
    ) -> None:
        super().__init__(groups, log, name=name, metrics=metrics, clock=clock, lease=LEASE, threads=0)

    def queues(self) -> list[WorkQueue]:
        return list(self._queues.values())

    def read_all(self) -> None:
        """Read ahead once on every VChannel of every queue."""
        for queue in self.queues():
            for lane in queue.lanes:
                if lane.window.room >= 8:
                    queue.lanes.read(lane)
                assert lane.window.room >= 0


class Bench:
    """One server on one machine whose log has tasks; the test calls what consumers and threads would."""

    def __init__(self, folder: Path, metrics: Metrics | None = None) -> None:
        self.clock, self.log, self.metrics = Hand(), Log(), metrics
        self.positions = FilePositions(folder)
        self.server = Server(folder, lambda: PCHANNELS, positions=lambda: self.positions, lease=LEASE, clock=self.clock)
        self.queues = Queues(self.server, self.log, "queue-0", self.clock, metrics)

    def publish(self, *units: tuple[int, int], lane: str = LANES[0]) -> None:
        self.log.now = units[-1][0]
        self.log.units[lane] += units

    def read(self) -> None:
        self.queues.read_all()

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
