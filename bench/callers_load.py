"""One process of callers or consumers, for bench.callers_bench: it has a GIL of its own.

    python -m bench.callers_load '{"backend": "millrace", "where": "/data", "kind": "threads", "count": 16, ...}'

It connects, makes a first call with each caller, prints "ready", waits for a line on its standard input, works for
`seconds` and prints what it found as one JSON object.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, Protocol

NAME: Final = "callers"
"""The collection, and Kafka's topic."""
SAMPLES: Final = 20_000
"""Latencies that a process reports, chosen at random."""
_ANSWER_SECONDS: Final = 60.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What a process does."""

    backend: str
    """``millrace`` or ``kafka``."""
    where: str
    """The data folder, or the broker's address."""
    kind: str
    """``threads`` and ``tasks`` wait for each answer; ``batch`` makes calls of `count` dicts; ``consume`` reads."""
    count: int
    """Callers, consumers, or the rows of a call."""
    seconds: float
    pause: float = 0.0
    """Seconds between two calls of a caller."""


@dataclass
class Found:
    """What a process found."""

    calls: int = 0
    rows: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """In seconds: of calls until their answer, or of rows from their creation until a consumer has decoded them."""
    cpu: float = 0.0
    switches: int = 0


class Backend(Protocol):
    """Callers and consumers of one system. A call returns once its rows are durable."""

    def insert(self, row: Row) -> None: ...

    def tasks(self) -> Awaitable[Callable[[Row], Awaitable[None]]]:
        """Return the awaitable call of one row, in the running loop."""
        ...

    def batch(self) -> Callable[[int, Callable[[], None]], None]:
        """Return the call that takes a number of rows and calls back once they are durable."""
        ...

    def flush(self) -> None: ...

    def consumer(self) -> Callable[[], list[int]]:
        """Return a call that returns the times (nanoseconds) in the next rows; perhaps none, after a short wait."""
        ...


_numbers: Final = itertools.count(os.getpid() << 32)


def new_row() -> Row:
    """Return a row of a sensor, with the time in nanoseconds."""
    number = next(_numbers)
    return {"id": number, "device": f"sensor-{number % 100}", "value": number % 1000 / 10, "at": time.time_ns()}


class MillraceBackend:
    """One Database for all callers and consumers of the process."""

    def __init__(self, where: str, closing: ExitStack) -> None:
        from pathlib import Path

        import millrace

        self._closing = closing
        self._db = closing.enter_context(millrace.connect(Path(where)))
        self._collection = self._db.collection(NAME)
        self._batch: Any = None

    def insert(self, row: Row) -> None:
        self._collection.insert([row])

    async def tasks(self) -> Callable[[Row], Awaitable[None]]:
        from millrace.client.produce.async_producer import AsyncProducer

        producer = AsyncProducer(self._db.new_producer())

        async def insert(row: Row) -> None:
            await producer.insert(NAME, [row])

        return insert

    def batch(self) -> Callable[[int, Callable[[], None]], None]:
        self._batch = batch = self._closing.enter_context(self._collection.batch())

        def insert(rows: int, done: Callable[[], None]) -> None:
            def decided(future: Future[Any]) -> None:
                future.result().checked()
                done()

            batch.insert([new_row() for _ in range(rows)]).add_done_callback(decided)

        return insert

    def flush(self) -> None:
        self._batch.flush()

    def consumer(self) -> Callable[[], list[int]]:
        from millrace.message.types import MessageType
        from millrace.wal.scanner import Latest, TypeFilter

        consumer = self._db.consumer(NAME, start=Latest(), filters=[TypeFilter({MessageType.INSERT})])

        def poll() -> list[int]:
            delivery = consumer.poll(timeout=0.2)
            if delivery is None:
                return []
            times = [at for change in delivery.changes() for at in change.rows.column("at").to_pylist()]
            consumer.acknowledge(delivery)
            return times

        return poll


class KafkaBackend:
    """One shared KafkaProducer of kafka-python: acks=all, idempotent, no linger, as its defaults are."""

    def __init__(self, where: str, closing: ExitStack) -> None:
        from kafka import KafkaProducer

        self._where = where
        self._producer = KafkaProducer(bootstrap_servers=where, acks="all")
        closing.callback(self._producer.close)

    def _send(self, row: Row) -> Any:
        return self._producer.send(NAME, json.dumps(row).encode())

    def insert(self, row: Row) -> None:
        self._send(row).get(_ANSWER_SECONDS)

    async def tasks(self) -> Callable[[Row], Awaitable[None]]:
        loop = asyncio.get_running_loop()

        async def insert(row: Row) -> None:
            answer: asyncio.Future[Any] = loop.create_future()
            sent = self._send(row)
            sent.add_callback(lambda found: loop.call_soon_threadsafe(answer.set_result, found))
            sent.add_errback(lambda error: loop.call_soon_threadsafe(answer.set_exception, error))
            await answer

        return insert

    def batch(self) -> Callable[[int, Callable[[], None]], None]:
        def insert(rows: int, done: Callable[[], None]) -> None:
            for _ in range(rows):
                sent = self._send(new_row())
            sent.add_callback(lambda found: done())

        return insert

    def flush(self) -> None:
        self._producer.flush(_ANSWER_SECONDS)

    def consumer(self) -> Callable[[], list[int]]:
        from kafka import KafkaConsumer, TopicPartition

        consumer = KafkaConsumer(bootstrap_servers=self._where, enable_auto_commit=False, value_deserializer=json.loads)
        partition = TopicPartition(NAME, 0)
        consumer.assign([partition])
        consumer.seek_to_end(partition)
        consumer.position(partition)

        def poll() -> list[int]:
            found = consumer.poll(timeout_ms=200)
            return [record.value["at"] for records in found.values() for record in records]

        return poll


@contextmanager
def measured(found: Found) -> Iterator[None]:
    """Add the time, the CPU time and the context switches of this process during the block."""
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    yield
    after = resource.getrusage(resource.RUSAGE_SELF)
    found.seconds = time.perf_counter() - begun
    found.cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found.switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw


def threads(backend: Backend, task: Task, begin: Callable[[], None]) -> Found:
    """Call with `count` threads that share the backend; each waits for its answers."""
    found, spent = Found(), [list[float]() for _ in range(task.count)]
    end = 0.0
    started = threading.Event()
    warm = threading.Barrier(task.count + 1)

    def work(mine: list[float]) -> None:
        backend.insert(new_row())
        warm.wait()
        started.wait()
        while (start := time.perf_counter()) < end:
            backend.insert(new_row())
            mine.append(time.perf_counter() - start)
            if task.pause:
                time.sleep(task.pause)

    workers = [threading.Thread(target=work, args=(mine,)) for mine in spent]
    for worker in workers:
        worker.start()
    warm.wait()
    begin()
    with measured(found):
        end = time.perf_counter() + task.seconds
        started.set()
        for worker in workers:
            worker.join()
    found.latencies = [each for mine in spent for each in mine]
    found.calls = found.rows = len(found.latencies)
    return found


def tasks(backend: Backend, task: Task, begin: Callable[[], None]) -> Found:
    """Call with `count` tasks of one event loop; each awaits its answers."""
    found = Found()

    async def work(insert: Callable[[Row], Awaitable[None]], end: float) -> None:
        while (start := time.perf_counter()) < end:
            await insert(new_row())
            found.latencies.append(time.perf_counter() - start)

    async def run() -> None:
        insert = await backend.tasks()
        await asyncio.gather(*(insert(new_row()) for _ in range(task.count)))
        begin()
        with measured(found):
            end = time.perf_counter() + task.seconds
            await asyncio.gather(*(work(insert, end) for _ in range(task.count)))

    asyncio.run(run())
    found.calls = found.rows = len(found.latencies)
    return found


def batch(backend: Backend, task: Task, begin: Callable[[], None]) -> Found:
    """Make calls of `count` rows one after the other, and wait for their answers at the end."""
    found, insert = Found(), backend.batch()

    def done(start: float) -> None:
        found.latencies.append(time.perf_counter() - start)

    insert(task.count, lambda: None)
    backend.flush()
    begin()
    with measured(found):
        end = time.perf_counter() + task.seconds
        while (start := time.perf_counter()) < end:
            insert(task.count, partial(done, start))
            found.calls += 1
        backend.flush()
    found.rows = found.calls * task.count
    return found


def consume(backend: Backend, task: Task, begin: Callable[[], None]) -> Found:
    """Read with `count` consumers, each in a thread of its own, that begin at the log's end."""
    found, lags = Found(), [list[float]() for _ in range(task.count)]
    ended = threading.Event()
    polls = [backend.consumer() for _ in range(task.count)]
    for poll in polls:
        poll()

    def work(poll: Callable[[], list[int]], mine: list[float]) -> None:
        while not ended.is_set():
            times = poll()
            now = time.time_ns()
            mine.extend((now - at) / 1e9 for at in times)

    workers = [threading.Thread(target=work, args=each) for each in zip(polls, lags, strict=True)]
    begin()
    with measured(found):
        for worker in workers:
            worker.start()
        time.sleep(task.seconds)
        ended.set()
        for worker in workers:
            worker.join()
    found.latencies = [each for mine in lags for each in mine]
    found.rows = len(found.latencies)
    return found


KINDS: Final[dict[str, Callable[[Backend, Task, Callable[[], None]], Found]]] = {
    "threads": threads,
    "tasks": tasks,
    "batch": batch,
    "consume": consume,
}
BACKENDS: Final[dict[str, Callable[[str, ExitStack], Backend]]] = {
    "millrace": MillraceBackend,
    "kafka": KafkaBackend,
}


def begin() -> None:
    """Tell the bench that this process is ready, and wait until all are."""
    print("ready", flush=True)
    sys.stdin.readline()


def main() -> None:
    """Do one task."""
    task = Task(**json.loads(sys.argv[1]))
    with ExitStack() as closing:
        found = KINDS[task.kind](BACKENDS[task.backend](task.where, closing), task, begin)
        if len(found.latencies) > SAMPLES:
            found.latencies = random.sample(found.latencies, SAMPLES)
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
