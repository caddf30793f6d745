"""Processes that compete for a queue's tasks: one is killed, one is stopped beyond its lease, one joins, and the server
is killed with leases out. Nothing is lost, and a task has one holder at a time.

Each process writes what it gets, until when by its own belief, and what `commit` has made durable.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa
import pytest

from millrace.base.errors import TaskLeaseLost
from millrace.base.settings import Settings
from millrace.client.consume.membership import boot_clock
from millrace.client.database import Database, connect
from millrace.rpc.discovery import read_record
from tests.crash.consumer_rig import SCHEMA, ConsumerProcesses
from tests.waiting import until

LEASE = 3.0
LEASE_SECONDS = "TEST_QUEUE_LEASE"
"""The variable that tells a worker its lease."""
PREFETCH = 200
TASKS_AT_ONCE, WORK_SECONDS = 50, 0.02
"""A worker has so many tasks in hand, for so long."""
COMMIT_TASKS = 100


def worker_main(data: str, out: str) -> None:
    """Work on tasks in a process of its own, until there is a file `stop`."""
    settings = Settings(data_dir=Path(data))
    with (
        open(out, "a", buffering=1) as file,
        connect(settings=settings) as database,
        database.consumer(
            "jobs", group="workers", mode="queue", lease=float(os.environ[LEASE_SECONDS]), prefetch=PREFETCH
        ) as queue,
    ):
        settled: list[int] = []

        def commit() -> None:
            try:
                queue.commit(timeout=60.0)
                file.write(f"done {boot_clock()} {' '.join(map(str, settled))}\n")
            except TaskLeaseLost:
                file.write(f"late {boot_clock()} {' '.join(map(str, settled))}\n")
            settled.clear()

        while not Path(data, "stop").exists():
            tasks = []
            while len(tasks) < TASKS_AT_ONCE and (task := queue.poll(timeout=0.02)) is not None:
                now, left = boot_clock(), task.lease_left
                if left:  # else it was suspended just now, and the task is another's
                    file.write(f"got {now} {task.row['id']} {task.deliveries} {now + left}\n")
                    tasks.append(task)
            if tasks:
                file.write(f"work {boot_clock()}\n")
            time.sleep(WORK_SECONDS)
            file.write(f"worked {boot_clock()}\n")
            queue.acknowledge(*tasks)
            settled += [task.row["id"] for task in tasks]
            if len(settled) >= COMMIT_TASKS or (settled and not tasks):
                commit()
        commit()


class Got(NamedTuple):
    """A delivery, as its holder saw it."""

    at: float
    deliveries: int
    expires: float
    worker: str


class Workers(ConsumerProcesses):
    """The processes, and what they wrote."""

    program = f"{__name__}:worker_main"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lease = LEASE
        self.got: defaultdict[int, list[Got]] = defaultdict(list)
        self.done: dict[int, float] = {}
        """When each task was known to be durably done."""
        self.count: Counter[str] = Counter()
        """Deliveries by worker."""
        self.in_hand: defaultdict[str, set[int]] = defaultdict(set)
        """Tasks that each worker works on, and has not acknowledged."""
        self.working: set[str] = set()
        """Workers that have all tasks of a turn in hand."""

    def environment(self) -> dict[str, str]:
        return {LEASE_SECONDS: str(self.lease)}

    def read(self) -> int:
        """Read what was written since; return how many tasks were delivered."""
        for name in self.running:
            for line in self.new_lines(name):
                kind, at, *words = line.split()
                if kind == "got":
                    self.in_hand[name].add(int(words[0]))
                    self.got[int(words[0])].append(Got(float(at), int(words[1]), float(words[2]), name))
                    self.count[name] += 1
                elif kind == "work":
                    self.working.add(name)
                elif kind == "worked":
                    self.working.discard(name)
                    self.in_hand[name].clear()
                elif kind == "done":
                    for key in map(int, words):
                        self.done[key] = min(float(at), self.done.get(key, float(at)))
        return len(self.got)

    def suspend_amid_work(self, name: str) -> None:
        """Suspend a worker that has tasks in hand and has not acknowledged them."""
        process = psutil.Process(self.running[name].pid)

        def amid_work() -> bool:
            process.suspend()
            until(lambda: process.status() == psutil.STATUS_STOPPED, "it stands still")
            self.read()
            if name in self.working:
                return True
            process.resume()
            return False

        until(amid_work, f"{name} is suspended with tasks")

    def check(self) -> Counter[str]:
        """Check that tasks had one holder at a time; return the deliveries that came again, by whose came first."""
        again: Counter[str] = Counter()
        for key, deliveries in self.got.items():
            deliveries.sort()
            for first, second in pairwise(deliveries):
                assert second.at >= first.expires, f"task {key} had two holders: {first} and {second}"
                assert second.deliveries > first.deliveries, f"task {key} came again uncounted: {first} and {second}"
                again[first.worker] += 1
            if key in self.done:
                assert deliveries[-1].at <= self.done[key], f"task {key} was done, and came again: {deliveries[-1]}"
        return again


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.stop()


def fill(database: Database, tasks: int) -> None:
    database.catalog.ensure_pchannels(4)
    jobs, producer = database.catalog.create_collection("jobs", SCHEMA, vchannels=8), database.new_producer()
    for first in range(0, tasks, 500):
        ids = list(range(first, min(first + 500, tasks)))
        producer.insert(jobs, pa.table({"id": ids, "body": ["x"] * len(ids)}))


def taken_over(workers: Workers, name: str) -> float:
    """Wait until others got all tasks that a worker has in hand; return how long that took."""
    begun, tasks = boot_clock(), sorted(workers.in_hand[name])

    def others_have() -> bool:
        workers.read()
        return all(workers.got[task][-1].worker != name for task in tasks)

    until(others_have, f"others got {tasks} of {name}")
    return boot_clock() - begun


def finish(database: Database, workers: Workers, tasks: int) -> Counter[str]:
    """Wait for the last task, and check everything; return what came again."""
    until(lambda: workers.read() == tasks, f"all of {tasks} tasks are delivered", seconds=300)
    workers.stop()
    workers.read()
    again = workers.check()
    with database.consumer("jobs", group="workers", mode="queue", prefetch=1) as after:
        assert after.poll(timeout=0.5) is None, "none is left"
        [group] = [each for each in database.consumer_groups() if each["group"] == "workers"]
        assert len(group["queue"]["lanes"]) == 8
        for lane in group["queue"]["lanes"].values():
            assert (lane["ready"], lane["in_flight"], lane["done"]) == (0, 0, 0), (
                "none is in hand, nor waits for another"
            )
    assert set(group["positions"]) == set(database.definition("jobs").vchannels)
    assert len(workers.done) > tasks * 0.9, "what is known to be durable"
    return again


def test_of_a_killed_worker_the_other_has_the_tasks_after_a_lease(tmp_path: Path, workers: Workers) -> None:
    tasks, workers.lease = 2000, 1.5
    with connect(settings=Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache"), create=True) as database:
        fill(database, tasks)
        workers.start("a", "b")
        until(lambda: workers.read() and workers.count["a"], "the first works", seconds=60)
        workers.suspend_amid_work("a")
        workers.running["a"].kill()
        begun = boot_clock()
        again = finish(database, workers, tasks)
        assert set(again) == {"a"}, "what it had in hand came again, and nothing else"
        took = max(each[-1].at for each in workers.got.values()) - begun
        assert took < workers.lease + 10
        database.connection.service.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_of_a_hundred_thousand_tasks_none_is_lost_through_kills_a_stop_and_a_join(
    tmp_path: Path, workers: Workers
) -> None:
    tasks = 100_000
    settings = Settings(data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")
    took: dict[str, float] = {}
    with connect(settings=settings, create=True) as database:
        fill(database, tasks)
        workers.start("a", "b", "c", "d")
        until(lambda: workers.read() > tasks // 10 and len(workers.count) == 4, "all four work", seconds=120)
        start = boot_clock()

        workers.suspend_amid_work("a")
        workers.running["a"].kill()
        took["one killed"] = taken_over(workers, "a")

        until(lambda: workers.read() > tasks // 4, "the others go on")
        workers.suspend_amid_work("b")
        took["one stopped"] = taken_over(workers, "b")
        before = workers.count["b"]
        os.kill(workers.running["b"].pid, signal.SIGCONT)
        begun = boot_clock()
        until(lambda: workers.read() and workers.count["b"] > before, "it goes on")
        took["and back"] = boot_clock() - begun

        begun = boot_clock()
        workers.start("e")
        until(lambda: workers.read() and workers.count["e"], "it has tasks")
        took["one joined"] = boot_clock() - begun

        until(lambda: workers.read() > tasks // 2, "they go on")
        record = read_record(settings.log_path)
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        begun, before = boot_clock(), workers.read()
        with connect(settings=settings) as again_there:
            again_there.connection.service.ping()
        until(lambda: workers.read() > before + 5 * PREFETCH, "tasks come from the server that took over")
        took["server killed"] = boot_clock() - begun
        again = finish(database, workers, tasks)
        seconds = max(each[-1].at for each in workers.got.values()) - start
        database.connection.service.shutdown()
    print(
        f"time to take over: {', '.join(f'{what} {each:.1f} s' for what, each in took.items())};"
        f" {tasks / seconds:.0f} tasks/s; again {dict(again)}; by worker {dict(workers.count)}"
    )
    assert set(again) >= {"a", "b"}, "those that failed had tasks in hand"
    assert sum(again.values()) < 10 * PREFETCH, f"more than the leases of those that failed: {again}"
    assert took["one killed"] < LEASE + 10
    assert took["one stopped"] < LEASE + 10
