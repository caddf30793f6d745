"""The log on Kafka against Kafka's own client on the same broker: what Millrace's log costs above confluent-kafka.

The bench starts its own broker (millrace.brokers). Subject and baseline have the same durability (acks=all, idempotent)
and the same sizes, each in its best arrangement. The baseline produces message by message with a delivery callback that
stores the offset (linger.ms at the client's default for throughput, 0 for single appends). It consumes in batches and
reads value, offset and timestamp of each message. The subject appends batches through Log.append, by one caller and by
two, and reads runs of Arrow columns. The plain client always has messages queued, whereas a caller of Log.append has
none while it waits for its last answer, so that two callers keep the log as busy. Subject and baseline alternate, each
time on a new topic. MB are 10**6 payload bytes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from bench.log_bench import Ratio, batch_of
from bench.log_server_bench import Latency
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.log.kafka.service import Kafka, open_location
from millrace.log.protocol import Log
from millrace.message.ids import EARLIEST

MIB = 1 << 20
BATCH_BYTES = MIB
"""Of one append through Millrace's log; several are under way only through its server."""


@dataclass(frozen=True)
class SizeResult:
    """Of one message size: appending and scanning, and single appends in milliseconds."""

    append: Ratio
    """By one caller."""
    append_by_two: Ratio
    scan: Ratio
    single: list[Latency]
    single_ratio_p50: float


@contextmanager
def deployment(directory: Path) -> Iterator[Kafka]:
    """Start a Kafka and the log service on it for as long as the block lasts."""
    with (
        KafkaBroker(directory / "kafka", settings=Settings(), heap="512m").start() as broker,
        open_location(f"{broker.address}/bench", {}) as service,
    ):
        yield service


def plain_producer(service: Kafka, **more: Any) -> Producer:
    """Return a confluent-kafka producer as its users have it, with the durability of the log."""
    limit = 64 * MIB
    return Producer(
        {"bootstrap.servers": service.settings.brokers, "acks": "all", "enable.idempotence": True,
         "message.max.bytes": limit, "log_level": 2, **more}
    )  # fmt: skip


def plain_append(service: Kafka, topic: str, values: list[bytes], times: int) -> float:
    """Return the seconds to produce `values` so often, until the last is acknowledged."""
    producer, offsets = plain_producer(service), []

    def delivered(error: Any, message: Message) -> None:
        assert error is None, error
        offsets.append(message.offset())

    producer.list_topics(topic, timeout=10)
    start = time.perf_counter()
    for _ in range(times):
        for value in values:
            while True:
                try:
                    producer.produce(topic, value, partition=0, on_delivery=delivered)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.poll(0)
    producer.flush()
    seconds = time.perf_counter() - start
    assert len(offsets) == len(values) * times
    return seconds


def own_append(log: Log, batch: pa.LargeBinaryArray, times: int, joined: int, callers: int) -> float:
    """Return the seconds to append the batch so often, `joined` of them in one call, by so many callers at once."""
    whole = pa.concat_arrays([batch] * joined)
    with ThreadPoolExecutor(callers) as pool:
        start = time.perf_counter()
        for _ in pool.map(log.append, [whole] * (times // joined)):
            pass
        return time.perf_counter() - start


def plain_scan(service: Kafka, topic: str, count: int) -> float:
    """Return the seconds to consume `count` messages from the beginning, with value, offset and timestamp of each."""
    consumer = Consumer(
        {"bootstrap.servers": service.settings.brokers, "group.id": "plain", "enable.auto.commit": False,
         "receive.message.max.bytes": 100 * MIB, "log_level": 2}
    )  # fmt: skip
    start = time.perf_counter()
    consumer.assign([TopicPartition(topic, 0, 0)])
    taken = 0
    while taken < count:
        messages = consumer.consume(min(1000, count - taken), 1.0)
        kept = [(message.value(), message.offset(), message.timestamp()) for message in messages]
        taken += len(kept)
    seconds = time.perf_counter() - start
    consumer.close()
    return seconds


def own_scan(service: Kafka, pchannel: str, count: int) -> float:
    """Return the seconds to read as many entries in runs of 16 MiB."""
    log = service.open(pchannel)
    start = time.perf_counter()
    position, taken = EARLIEST, 0
    while taken < count:
        run = log.read(position, max_bytes=16 * MIB, timeout=1.0)
        taken += run.batch.num_rows
        position = run.next
    return time.perf_counter() - start


def _ratio(name: str, size: int, pairs: list[tuple[float, float]]) -> Ratio:
    """Return the ratio of (subject, baseline) seconds for `size` bytes."""
    ratios = [baseline / subject for subject, baseline in pairs]
    subject, baseline = (statistics.median(size / each[side] / 1e6 for each in pairs) for side in (0, 1))
    return Ratio(name, "MB/s", len(pairs), subject, baseline, statistics.median(ratios), min(ratios), max(ratios))


def measure(directory: Path, *, message_bytes: int, total: int, pairs: int, singles: int) -> SizeResult:
    """Measure all of one message size, interleaved."""
    batch = batch_of(message_bytes, BATCH_BYTES)
    values: list[bytes] = batch.to_pylist()
    times = max(16, total // BATCH_BYTES // 16 * 16)
    size, count = times * len(values) * message_bytes, times * len(values)
    appends: list[tuple[float, ...]] = []
    scans: list[tuple[float, ...]] = []
    with deployment(directory) as service:
        for pair in range(pairs + 1):  # the first one warms the broker's compiler
            own, two, plain = f"own{pair}", f"two{pair}", f"plain{pair}"
            for name in (own, two, plain):
                service.create(name)
            logs = [service.open(name) for name in (own, two)]
            for log in logs:
                log.append([b""])  # its producer is made once a process
            topic = service.settings.topic(plain)
            ways: list[Callable[[], float]] = [
                partial(own_append, log, batch, times, 16, callers) for callers, log in enumerate(logs, start=1)
            ]
            found = _in_turn([*ways, partial(plain_append, service, topic, values, times)], pair)
            scanned = _in_turn(
                [
                    partial(own_scan, service, own, count),
                    partial(plain_scan, service, topic, count),
                ],
                pair,
            )
            for name in (own, two, plain):
                service.drop(name)
            if pair:
                appends.append(found)
                scans.append(scanned)
        single = single_appends(service, message_bytes=message_bytes, count=singles)
    return SizeResult(
        append=_ratio(f"append {message_bytes} B", size, [(alone, plain) for alone, _, plain in appends]),
        append_by_two=_ratio(f"append {message_bytes} B by two", size, [(two, plain) for _, two, plain in appends]),
        scan=_ratio(f"scan {message_bytes} B", size, [(own, plain) for own, plain in scans]),
        single=single,
        single_ratio_p50=single[0].p50 / single[1].p50,
    )


def _in_turn(ways: Sequence[Callable[[], float]], pair: int) -> tuple[float, ...]:
    """Return what each of `ways` gives, in their order; another one begins every time."""
    found = [0.0] * len(ways)
    for step in range(len(ways)):
        place = (pair + step) % len(ways)
        found[place] = ways[place]()
    return tuple(found)


def single_appends(service: Kafka, *, message_bytes: int, count: int) -> list[Latency]:
    """Compare one append with its acknowledgement through the log and through the plain client, interleaved."""
    for name in ("single", "single-plain"):
        service.create(name)
    log, topic = service.open("single"), service.settings.topic("single-plain")
    producer, value = plain_producer(service, **{"linger.ms": 0}), os.urandom(message_bytes)
    times: dict[str, list[float]] = {"millrace": [], "confluent-kafka": []}
    for number in range(count + 20):
        start = time.perf_counter()
        log.append([value])
        middle = time.perf_counter()
        producer.produce(topic, value, partition=0, on_delivery=lambda error, message: None)
        producer.flush()
        end = time.perf_counter()
        if number >= 20:
            times["millrace"].append(middle - start)
            times["confluent-kafka"].append(end - middle)
    for name in ("single", "single-plain"):
        service.drop(name)
    return [
        Latency(name, count, 1e3 * statistics.median(each), 1e3 * sorted(each)[int(count * 0.99)])
        for name, each in times.items()
    ]


def run(directory: Path, *, total: int, pairs: int, singles: int) -> dict[str, SizeResult]:
    """Measure both message sizes."""
    return {
        f"{size >> 10} KiB": measure(
            directory / str(size), message_bytes=size, total=total, pairs=pairs, singles=singles
        )
        for size in (1 << 10, 64 << 10)
    }
