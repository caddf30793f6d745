"""Work queues: acknowledged tasks/s of one consumer, four processes and 64 callers, and what idle queues cost.

A task is a row of 1,000 bytes, inserted by itself, decoded to Arrow and acknowledged by itself. Consumers take a
backlog; the time runs until the last acknowledgement is durable. The part beside Kafka has as many records of that size
in as many partitions, for its group consumer (confluent-kafka; a position for each partition) and its share consumer
(KIP-932; an acknowledgement for each record, committed with each poll). No Python client speaks the share protocol, so
its consumers are threads of one JVM (ShareConsumers.java), which decode no rows.

``idle`` has queues of which each has a consumer that waits, and no tasks come: memory, threads and open files of the
server, and its CPU. ``month`` acknowledges tasks round by round, one in a hundred after its neighbours, and measures
the durable state.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from bench.deployment import LANES, ROOT, SCHEMA, backlog, kafka_backlog, poll_backlog
from millrace.base.settings import Settings
from millrace.brokers.jars import broker_jars
from millrace.brokers.server import java_command
from millrace.client.database import Database, connect
from millrace.rpc.discovery import read_record


def queue(folder: Path, *, tasks: int, members: Sequence[int] = (1, 4), callers: int = 64) -> dict[str, Any]:
    """Measure consumers of so many processes, and of `callers` threads, each on the same backlog."""
    found: dict[str, Any] = {"tasks": tasks, "lanes": LANES}
    with backlog(folder / "data", tasks) as database:
        for count in members:
            found[f"{count} processes"] = _processes(folder / "data", tasks, count)
        found[f"{callers} callers in a process"] = _callers(database, tasks, callers)
    return found


def _processes(data: Path, tasks: int, count: int) -> dict[str, float]:
    go = data / f"go-{count}"
    command = [sys.executable, "-m", "bench.queues_bench", str(data), f"of-{count}", str(go)]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for each in running:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    start = time.time()
    go.touch()
    told = [each.communicate(timeout=600)[0].split() for each in running]
    taken, last = sum(int(each[0]) for each in told), max(float(each[1]) for each in told)
    assert taken >= tasks, f"{taken} of {tasks}"
    return {"acknowledged_per_s": round(tasks / (last - start)), "taken": taken}


def _member(data: str, group: str, go: str) -> None:
    """Work until nothing has come for two seconds, and at first for longer."""
    count, last = 0, 0.0
    with connect(settings=Settings(data_dir=Path(data)), start=False) as database:
        print("ready", flush=True)
        while not Path(go).exists():
            time.sleep(0.005)
        with database.consumer("tasks", group=group, mode="queue", prefetch=2000) as consumer:
            while (task := consumer.poll(timeout=2.0 if count else 30.0)) is not None:
                assert task.rows.num_rows == 1
                consumer.acknowledge(task)
                count += 1
                if count % 1000 == 0:
                    consumer.commit()
                    last = time.time()
                elif not consumer.unsettled:
                    last = time.time()
            consumer.commit()
    print(count, last)


def _callers(database: Database, tasks: int, callers: int) -> dict[str, float]:
    counts, start, last = [0] * callers, time.perf_counter(), [0.0] * callers
    record = read_record(database.settings.log_path)
    assert record is not None
    server = psutil.Process(record.pid)
    before = server.cpu_times()

    def work(number: int) -> None:
        with database.consumer("tasks", group="callers", mode="queue", prefetch=100) as consumer:
            while (task := consumer.poll(timeout=5.0)) is not None:
                consumer.acknowledge(task)
                counts[number] += 1
                last[number] = time.perf_counter()
            consumer.commit()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) >= tasks, f"{sum(counts)} of {tasks}"
    after = server.cpu_times()
    seconds = max(last) - start
    return {
        "acknowledged_per_s": round(tasks / seconds),
        "fewest of one": min(counts),
        "server CPU us a task": round(1e6 * (after.user + after.system - before.user - before.system) / tasks, 1),
    }


def idle(folder: Path, *, queues: int, lanes: int, seconds: float) -> dict[str, Any]:
    """Measure the server with so many queues over collections of so many VChannels in all."""
    settings = Settings(data_dir=folder / "idle", cache_dir=Settings.load().cache_dir)
    with ExitStack() as closing:
        database = closing.enter_context(connect(settings=settings, create=True))
        database.catalog.ensure_pchannels(4)
        for number in range(lanes):
            database.catalog.create_collection(f"tasks{number}", SCHEMA, vchannels=1)
        record = read_record(settings.log_path)
        assert record is not None
        server = psutil.Process(record.pid)
        before = _held(server)
        names = [(f"tasks{number % lanes}", f"group{number}") for number in range(queues)]
        request = {"consumer": "c", "client": "bench", "lease": 30.0, "last": 0, "most": 0, "wait": 0.0}
        channels = {f"tasks{number}": list(database.definition(f"tasks{number}").vchannels) for number in range(lanes)}
        start = time.perf_counter()

        def ask(name: tuple[str, str]) -> None:
            wanted = {"queue": name[0], "group": name[1], "lanes": channels[name[0]], "start": "earliest"}
            database.connection.take_tasks({**request, **wanted}, seconds=30.0)

        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(ask, names):
                pass
        opened = time.perf_counter() - start
        time.sleep(8.0)  # a new queue's first position is written after five seconds
        held, cpu, start = _held(server), server.cpu_times(), time.perf_counter()
        time.sleep(seconds)  # shorter than consumers and queues without calls live
        after, passed = server.cpu_times(), time.perf_counter() - start
        database.connection.service.shutdown()
    return {
        "queues": queues,
        "seconds_to_open": round(opened, 1),
        **{f"{name} a queue": round((held[name] - before[name]) / queues, 2) for name in before},
        "idle CPU percent": round(100 * (after.user + after.system - cpu.user - cpu.system) / passed, 1),
    }


def _held(server: psutil.Process) -> dict[str, float]:
    return {
        "KiB": server.memory_info().rss / 1024,
        "threads": server.num_threads(),
        "files": server.num_fds(),
    }


def month(*, tasks: int, a_round: int) -> dict[str, Any]:
    """Measure a window's durable state after so many tasks, of which some are always late."""
    from millrace.node.append.task_window import TaskWindow

    window, largest, held = TaskWindow(0, None, now=0.0, ordered=False, size=8192), 0, []
    chance = np.random.default_rng(1)
    rows = pa.RecordBatch.from_pydict({"id": np.arange(a_round)})
    start = time.perf_counter()
    for tick in range(1, 1 + tasks // a_round):
        window.add(np.full(a_round, tick, np.int64), rows, last=True, keys=None)
        window.confirm(tick)
        places, _ = window.take(float(tick), holder=1, lease=1e9, most=a_round, max_bytes=1 << 30)
        late = places[chance.random(len(places)) < 0.01]
        window.acknowledge(window.names(np.setdiff1d(places, late)), 1)
        largest = max(largest, len(window.encoded()))
        held.append(window.names(late))
        if len(held) > 10:
            window.acknowledge(held.pop(0), 1)
    seconds = time.perf_counter() - start
    for names in held:
        window.acknowledge(names, 1)
    return {
        "tasks": tasks,
        "largest state bytes": largest,
        "state bytes at the end": len(window.encoded()),
        "window us a task": round(1e6 * seconds / tasks, 2),
    }


def kafka(folder: Path, *, tasks: int) -> dict[str, Any]:
    """Measure Kafka's group consumer and its share consumers on a broker of the project."""
    settings = Settings()
    with kafka_backlog(folder / "kafka", tasks) as servers:
        found: dict[str, Any] = {
            "group consumer, a commit for 1,000 records_per_s": round(tasks / poll_backlog(servers, tasks, commit=True))
        }
        for count in (1, 4):
            command = java_command(
                broker_jars("kafka", settings),
                heap="512m",
                main=str(Path(__file__).with_name("ShareConsumers.java")),
                temporary=folder / "share-consumers",
            )
            done = subprocess.run(
                [*command, str(servers["bootstrap.servers"]), "tasks", f"share-{count}", str(count), str(tasks)],
                capture_output=True, text=True, timeout=400, check=False,
            )  # fmt: skip
            found[f"{count} share consumers, acknowledged_per_s"] = (
                round(tasks / float(done.stdout.split()[-1])) if done.returncode == 0 else done.stderr[-400:]
            )
    return found


def parts(folder: Path, quick: bool) -> dict[str, Callable[[], Any]]:
    """Return the parts of the section."""
    tasks = 5_000 if quick else 50_000
    return {
        "queue": partial(queue, folder, tasks=tasks),
        "idle queues": partial(
            idle, folder, queues=100 if quick else 1_000, lanes=16 if quick else 64, seconds=10.0 if quick else 20.0
        ),
        "queue after a month": partial(month, tasks=200_000 if quick else 10_000_000, a_round=500),
        "kafka's queue": partial(kafka, folder, tasks=tasks),
    }


if __name__ == "__main__":
    _member(*sys.argv[1:])
