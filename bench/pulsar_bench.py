"""Pulsar as the log against pulsar-client itself: same broker, sizes, batching and durability, interleaved in one run.

The plain client is used as documented: `send_async` with batching and one callback per message, `read_next`, `send`.
MB are 10**6 payload bytes. The bench starts its own standalone, over a folder on the disk to be measured.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import _pulsar
import pulsar
import pyarrow as pa
import pyarrow.compute as pc

from bench.log_bench import MIB, Ratio, batch_of, pairs
from millrace.base.settings import Settings
from millrace.brokers.pulsar import PulsarBroker
from millrace.log.pulsar.service import PulsarService
from millrace.log.pulsar.settings import PulsarSettings, topic_of
from millrace.message.ids import EARLIEST

BATCH_BYTES = 8 * MIB
WAIT = 120.0


class Rig:
    """One broker, a service on it, and a plain client beside it."""

    def __init__(self, broker: PulsarBroker) -> None:
        self.settings = PulsarSettings.of(f"{broker.address}/millrace/log", {"admin": broker.admin_url})
        self.service = PulsarService(self.settings)
        self.client: Any = pulsar.Client(
            self.settings.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        )

    def topic(self) -> str:
        """Return a new, empty log."""
        name = uuid.uuid4().hex
        self.service.create(name)
        return name

    def producer(self, name: str) -> Any:
        """Return the plain client's producer with the settings of ours."""
        return self.client.create_producer(
            self.settings.topic_url(topic_of(self.settings.prefix, name)),
            access_mode=_pulsar.ProducerAccessMode.ExclusiveWithFencing,
            batching_enabled=True,
            batching_max_messages=self.settings.batch_messages,
            batching_max_allowed_size_in_bytes=self.settings.batch_bytes,
            batching_max_publish_delay_ms=1,
            max_pending_messages=10_000,
            block_if_queue_full=True,
        )

    def close(self) -> None:
        self.client.close()
        self.service.close()


@contextmanager
def rig(folder: Path) -> Iterator[Rig]:
    """Start a Pulsar below `folder` for as long as the block lasts."""
    with PulsarBroker(folder / "pulsar", settings=Settings.load(), heap="1g") as broker:
        found = Rig(broker)
        try:
            yield found
        finally:
            found.close()


def payload(values: pa.LargeBinaryArray) -> int:
    """Return the bytes of the values."""
    return int(pc.sum(pc.binary_length(values)).as_py())


def log_append(rig: Rig, batch: pa.LargeBinaryArray, batches: int) -> float:
    """Return the MB/s of appends of `batch`, one after the other."""
    name = rig.topic()
    log = rig.service.open(name)
    log.append([b"warm"])
    start = time.perf_counter()
    for _ in range(batches):
        log.append(batch)
    seconds = time.perf_counter() - start
    rig.service.drop(name)
    return payload(batch) * batches / seconds / 1e6


def plain_append(rig: Rig, batch: pa.LargeBinaryArray, batches: int) -> float:
    """Return the MB/s of the same values through `send_async`, all acknowledged at the end."""
    name = rig.topic()
    producer = rig.producer(name)
    producer.send(b"warm")
    values, count, done = batch.to_pylist(), [0], threading.Event()
    total = len(values) * batches

    def acknowledged(result: Any, message_id: Any) -> None:
        assert result == pulsar.Result.Ok
        count[0] += 1
        if count[0] == total:
            done.set()

    start = time.perf_counter()
    for _ in range(batches):
        for value in values:
            producer.send_async(value, acknowledged)
    producer.flush()
    assert done.wait(WAIT)
    seconds = time.perf_counter() - start
    producer.close()
    rig.service.drop(name)
    return payload(batch) * batches / seconds / 1e6


def log_scan(rig: Rig, name: str, entries: int) -> float:
    """Return the MB/s of reading a log from its beginning, in runs of 8 MiB."""
    with PulsarService(rig.settings) as service:
        log = service.open(name)
        log.read(
            EARLIEST, end=EARLIEST.following()
        )  # connects, as the plain client is; its reader gets none of the log
        position, seen, size = EARLIEST, 0, 0
        start = time.perf_counter()
        while seen < entries:
            run = log.read(position, max_bytes=BATCH_BYTES, timeout=10.0)
            seen, size, position = seen + run.batch.num_rows, size + payload(run.batch.column("value")), run.next
        return size / (time.perf_counter() - start) / 1e6


def plain_scan(rig: Rig, name: str, entries: int) -> float:
    """Return the MB/s of the client's reader over the same topic."""
    topic = rig.settings.topic_url(topic_of(rig.settings.prefix, name))
    start = time.perf_counter()
    reader = rig.client.create_reader(topic, pulsar.MessageId.earliest)
    size = 0
    for _ in range(entries):
        message = reader.read_next(10_000)
        size += len(message.data())
        message.message_id()
    seconds = time.perf_counter() - start
    reader.close()
    return size / seconds / 1e6


def single(call: Callable[[], object], count: int) -> list[float]:
    """Return the milliseconds of each of `count` calls, in ascending order."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
    return sorted(found)


def latencies(rig: Rig, *, count: int, rounds: int) -> list[Ratio]:
    """Compare one append of 1 KiB with one plain `send`: p50 and p99."""
    value = os.urandom(1 << 10)
    names = rig.topic(), rig.topic()
    log, producer = rig.service.open(names[0]), rig.producer(names[1])
    single(lambda: log.append([value]), 50)
    single(lambda: producer.send(value), 50)
    found = []
    for label, place in (("p50", 0.5), ("p99", 0.99)):
        found.append(
            pairs(
                f"one append of 1 KiB, {label}",
                "ms",
                lambda: single(lambda: log.append([value]), count)[int(count * place)],  # noqa: B023
                lambda: single(lambda: producer.send(value), count)[int(count * place)],  # noqa: B023
                rounds,
            )
        )
    producer.close()
    for name in names:
        rig.service.drop(name)
    return found


def run(folder: Path, *, total: int = 256 * MIB, count: int = 7, appends: int = 400) -> list[Ratio]:
    """Run all measurements."""
    results: list[Ratio] = []
    with rig(folder) as found:
        for size, part in ((1 << 10, total // 4), (64 << 10, total)):
            batch, batches = batch_of(size, BATCH_BYTES), max(1, part // BATCH_BYTES)
            label = f"{size >> 10} KiB"
            results.append(
                pairs(
                    f"append, {label}",
                    "MB/s",
                    partial(log_append, found, batch, batches),
                    partial(plain_append, found, batch, batches),
                    count,
                )
            )
            name = found.topic()
            log = found.service.open(name)
            entries = sum(len(log.append(batch)) for _ in range(batches))
            results.append(
                pairs(
                    f"scan, {label}",
                    "MB/s",
                    partial(log_scan, found, name, entries),
                    partial(plain_scan, found, name, entries),
                    count,
                )
            )
            found.service.drop(name)
        results += latencies(found, count=appends, rounds=count)
    return results


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    small = {"total": int(sys.argv[2]) * MIB, "count": int(sys.argv[3]), "appends": 200} if len(sys.argv) > 3 else {}
    for result in run(target, **small):
        print(json.dumps(asdict(result)))
