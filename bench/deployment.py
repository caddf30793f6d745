"""A deployment to measure: a data folder, the log server with the append host, and a Spark driver in its usual form."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.queries import started_path

ROOT = Path(__file__).parents[1]
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "binary", True)), "id")
NAME = "bench"
LANES = 8
"""VChannels of a backlog's collection, and partitions of a backlog's topic."""
BODY = 1000
"""Bytes of a row's or record's body in a backlog."""


@contextmanager
def deployment(
    folder: Path, *, pchannels: int = 2, meta_store: str = "", tables: str = ""
) -> Iterator[tuple[Settings, Database, CollectionInfo]]:
    """Make a deployment with one collection over `pchannels` PChannels; its log server ends with the block."""
    settings = Settings(
        data_dir=folder,
        cache_dir=Settings.load().cache_dir,
        pchannels=pchannels,
        meta_store=meta_store,
        tables=tables,
    )
    with connect(settings=settings) as db:
        db.catalog.ensure_pchannels(pchannels)
        collection = db.catalog.create_collection(NAME, SCHEMA, vchannels=pchannels)
        try:
            yield settings, db, collection
        finally:
            db.connection.service.shutdown()


@contextmanager
def spark_job(settings: Settings, *arguments: str) -> Iterator[ChildProcess]:
    """Run the streaming node (and flusher) as a driver of its own for as long as the block lasts."""
    ready = started_path(settings, "millrace-streaming-node")
    ready.unlink(missing_ok=True)
    job = ChildProcess(
        [sys.executable, str(ROOT / "jobs" / "streaming_node.py"), *arguments],
        log_file=settings.run_path / "bench-job.log",
        env=settings.environment(),
    )
    try:
        job.wait_ready(ready.exists, deadline=settings.start_deadline)
        yield job
    finally:
        job.stop(deadline=settings.stop_deadline)


def rows(first: int, count: int, *, size: int = 1000) -> pa.Table:
    """Return `count` rows with ids from `first` on and bodies of `size` random bytes (of a few that repeat)."""
    bodies = [np.random.default_rng(seed).bytes(size) for seed in range(8)]
    return pa.table({"id": range(first, first + count), "body": [bodies[number % 8] for number in range(count)]})


@contextmanager
def backlog(folder: Path, count: int) -> Iterator[Database]:
    """Make a deployment whose collection ``tasks`` holds `count` rows of BODY bytes, each inserted by itself.

    Its log server ends with the block.
    """
    settings = Settings(data_dir=folder, cache_dir=Settings.load().cache_dir)
    with connect(settings=settings, create=True) as database:
        database.catalog.ensure_pchannels(4)
        tasks, producer = database.catalog.create_collection("tasks", SCHEMA, vchannels=LANES), database.new_producer()
        bodies = [np.random.default_rng(number).bytes(BODY) for number in range(64)]

        def insert(key: int) -> None:
            producer.insert(tasks, pa.table({"id": [key], "body": pa.array([bodies[key % 64]], pa.binary())}))

        with ThreadPoolExecutor(16) as pool:
            for _ in pool.map(insert, range(count)):
                pass
        try:
            yield database
        finally:
            database.connection.service.shutdown()


@contextmanager
def kafka_backlog(folder: Path, count: int) -> Iterator[dict[str, str | int | float | bool]]:
    """Run a broker whose topic ``tasks`` holds `count` records of BODY bytes; give what a client connects with."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    with KafkaBroker(folder, settings=Settings(), heap="512m").start() as broker:
        servers: dict[str, str | int | float | bool] = {"bootstrap.servers": broker.address, "log_level": 2}
        admin = AdminClient(servers)  # its calls end with it
        for future in admin.create_topics([NewTopic("tasks", LANES, 1)]).values():
            future.result(30)
        producer, body = Producer(servers), bytes(BODY)
        for number in range(count):
            while True:
                try:
                    producer.produce("tasks", body, key=str(number))
                    break
                except BufferError:
                    producer.poll(0.05)
        assert producer.flush(120) == 0
        yield servers


def poll_backlog(servers: dict[str, str | int | float | bool], count: int, *, commit: bool = False) -> float:
    """Read a backlog's topic with confluent-kafka's group consumer; return the seconds from its first record on."""
    from confluent_kafka import Consumer

    consumer = Consumer(
        {**servers, "group.id": "one", "auto.offset.reset": "earliest", "enable.auto.commit": not commit}
    )
    consumer.subscribe(["tasks"])
    assert consumer.poll(60.0) is not None
    start, taken = time.perf_counter(), 1
    while taken < count:
        taken += len(consumer.consume(1000, 1.0))
        if commit:
            consumer.commit(asynchronous=False)
    seconds = time.perf_counter() - start
    consumer.close()
    return seconds
