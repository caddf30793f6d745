"""A pipeline against opensearch-py's parallel_bulk: same topic, same transform by hand, same OpenSearch, alternating.

The baseline uses the best of a few settings that are tried first (threads and chunk sizes). Then the latency from a
topic, and from a collection, to acknowledged and to searchable, at 1,000 documents per second.
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from opensearchpy import OpenSearch, helpers

from bench.deployment import deployment, spark_job
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.opensearch import OpenSearchServer
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.flows.range_host.supervision import read_status
from millrace.flows.records import Record
from millrace.flows.transform.transform import Transform
from millrace.message import builders
from millrace.message.keys import vchannel_index
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.pipelines.declaration import pipeline_of

PARTITIONS = 2
ROWS = "paced-rows"
WARM_SECONDS = 4.0
STEPS: list[dict[str, Any]] = [
    {"kind": "rename", "fields": {"dep_delay": "delay"}},
    {"kind": "cast", "fields": {"flight": "string", "distance": "float"}},
    {"kind": "drop", "fields": ["tailnum"]},
    {"kind": "constant", "fields": {"source": "bench"}},
]
CHECKS: list[dict[str, Any]] = [
    {
        "kind": "json_schema",
        "schema": {
            "type": "object",
            "required": ["carrier", "flight", "distance"],
            "properties": {"carrier": {"type": "string", "maxLength": 2}, "distance": {"type": "number", "minimum": 0}},
        },
    },
    {"kind": "filter", "keep": "doc.distance > 100.0"},
]
SETTINGS = [(2, 1000), (2, 5000), (4, 1000), (4, 5000)]
"""Of parallel_bulk: threads and documents a chunk."""


def document(number: int) -> dict[str, Any]:
    """Return a JSON document of about 1 KB."""
    made: dict[str, Any] = {
        "year": 2013, "month": 1, "day": 1, "dep_time": 517, "dep_delay": 2.0, "arr_time": 830, "carrier": "UA",
        "flight": number, "tailnum": "N14228", "origin": "EWR", "dest": "IAH", "air_time": 227.0, "distance": 1400,
        "time_hour": "2013-01-01T05:00:00Z",
    }  # fmt: skip
    return {**made, "note": "n" * (1000 - len(json.dumps(made)))}


def run_all(folder: Path, *, documents: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Run all measurements."""
    found: dict[str, Any] = {"transform": transform_speed(documents)}
    settings = Settings(data_dir=folder / "data", cache_dir=Settings.load().cache_dir)
    with (
        KafkaBroker(folder / "kafka", settings=settings) as kafka,
        OpenSearchServer(folder / "opensearch", settings=settings) as server,
    ):
        admin = AdminClient({"bootstrap.servers": kafka.address})
        for topic in ("load", "paced"):
            admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
        _fill(kafka.address, "load", documents)
        tried = {
            f"{threads} x {chunk}": _theirs(kafka.address, server.url, threads, chunk, documents // 4)
            for threads, chunk in SETTINGS
        }
        best = SETTINGS[max(range(len(SETTINGS)), key=list(tried.values()).__getitem__)]
        ours, theirs = [], []
        for pair in range(pairs + 1):
            ours.append(_ours(settings, kafka.address, server.url, documents, pair))
            theirs.append(_theirs(kafka.address, server.url, *best, documents))
        del ours[0], theirs[0]  # the first pair warms both up
        found["speed"] = {
            "parallel_bulk tried": {name: round(value) for name, value in tried.items()},
            "best": f"{best[0]} threads, chunks of {best[1]}",
            "ours": round(statistics.median(ours)),
            "theirs": round(statistics.median(theirs)),
            "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
            "ratios": [round(a / b, 2) for a, b in zip(ours, theirs, strict=True)],
        }
        found["latency"] = _latency(settings, kafka.address, server.url, seconds)
        found["latency of rows"] = _latency_of_rows(folder / "millrace", kafka.address, server.url, seconds)
    return found


def transform_speed(documents: int) -> dict[str, int]:
    """Return the documents per second of a core."""
    records = [
        Record("t", 0, place, b"k", json.dumps(document(place)).encode(), 0) for place in range(min(documents, 50_000))
    ]
    found = {}
    for name, steps in (("four plain steps", STEPS), ("with JSON Schema and CEL", [*STEPS, *CHECKS])):
        made = Transform(_pipeline("a:1", "http://a:1", "t", "x", steps))
        made.run(records[:1000])
        begun = time.process_time()
        assert len(made.run(records).actions) == len(records)
        found[name] = round(len(records) / (time.process_time() - begun))
    return found


def _pipeline(brokers: str, url: str, topic: str, name: str, steps: list[dict[str, Any]]) -> Flow:
    source = {"kind": "kafka", "bootstrap": [brokers], "topics": [topic]}
    sink = {"kind": "opensearch", "hosts": [url], "index_base": name, "create_index": True}
    return pipeline_of({"id": name, "source": source, "sink": sink, "steps": steps, "resources": {"tasks": PARTITIONS}})


def _fill(brokers: str, topic: str, documents: int) -> None:
    producer = Producer({"bootstrap.servers": brokers, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for number in range(documents):
        producer.produce(topic, json.dumps(document(number)).encode(), partition=number % PARTITIONS)
        if number % 1000 == 0:
            producer.poll(0)
    assert producer.flush(120) == 0


def _count(url: str, index: str) -> int:
    client = OpenSearch(url)
    client.indices.refresh(index=index)
    found = int(client.count(index=index)["count"])
    client.indices.delete(index=index)
    client.close()
    return found


def _ours(settings: Settings, brokers: str, url: str, documents: int, pair: int) -> float:
    name = f"ours-{pair}"
    begun = time.perf_counter()
    run(FlowRun(settings, _pipeline(brokers, url, "load", name, STEPS)), stop=threading.Event(), until_end=True)
    speed = documents / (time.perf_counter() - begun)
    assert _count(url, name) == documents
    return speed


def _theirs(brokers: str, url: str, threads: int, chunk: int, documents: int) -> float:
    client = OpenSearch(url, maxsize=threads, timeout=60)
    client.indices.create(index="theirs")
    begun = time.perf_counter()
    done = helpers.parallel_bulk(
        client,
        _by_hand(brokers, documents),
        thread_count=threads,
        chunk_size=chunk,
        max_chunk_bytes=5 << 20,
        queue_size=threads,
    )
    assert sum(taken for taken, _ in done) == documents
    speed = documents / (time.perf_counter() - begun)
    assert _count(url, "theirs") == documents
    client.close()
    return speed


def _by_hand(brokers: str, documents: int) -> Iterator[dict[str, Any]]:
    """Transform as one would by hand for helpers.bulk."""
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": "bench", "enable.auto.commit": False})
    consumer.assign([TopicPartition("load", number, 0) for number in range(PARTITIONS)])
    left = documents
    try:
        while left:
            for message in consumer.consume(min(2000, left), timeout=5.0):
                value = json.loads(message.value() or b"")
                value["delay"] = value.pop("dep_delay")
                value["flight"] = str(value["flight"])
                value["distance"] = float(value["distance"])
                del value["tailnum"]
                value["source"] = "bench"
                left -= 1
                place = f"{message.topic()}-{message.partition()}-{message.offset()}"
                yield {"_index": "theirs", "_id": place, "_source": value}
    finally:
        consumer.close()


CALL, CALL_ROWS = 10, 20
"""Documents that are sent at once, and rows: an append is waited for until it is judged."""


def _latency(settings: Settings, brokers: str, url: str, seconds: float) -> dict[str, Any]:
    """Measure a topic's records at 1,000 per second, from timestamp until acknowledged and until searchable."""
    producer = Producer({"bootstrap.servers": brokers, "linger.ms": 5})

    def send(first: int) -> None:
        for number in range(first, first + CALL):
            producer.produce("paced", json.dumps(document(number)).encode(), partition=number % PARTITIONS)
        producer.poll(0)

    found = _paced(settings, _pipeline(brokers, url, "paced", "paced", STEPS), url, send, seconds, call=CALL)
    producer.flush(30)
    return found


def _latency_of_rows(folder: Path, brokers: str, url: str, seconds: float) -> dict[str, Any]:
    """Measure a collection's rows, from the time tick on; one Spark driver runs the streaming node before the reads."""
    with deployment(folder) as (settings, client, _), spark_job(settings):
        fields = [FieldSpec("id", "int64", False), FieldSpec("note", "string", True)]
        collection = client.catalog.create_collection(ROWS, CollectionSchema(tuple(fields), "id"), vchannels=PARTITIONS)
        note = "n" * 980

        def send(first: int) -> None:
            table = pa.table({"id": range(first, first + CALL_ROWS), "note": [note] * CALL_ROWS})
            homes = vchannel_index(table.column("id"), PARTITIONS)
            parts = ((each, table.filter(pa.array(homes == place))) for place, each in enumerate(collection.vchannels))
            producer.send(
                [
                    builders.insert(
                        part.combine_chunks().to_batches()[0],
                        vchannel=vchannel,
                        collection_id=collection.id,
                        partition_id=1,
                        term=0,
                    )
                    for vchannel, part in parts
                    if part.num_rows
                ]
            )

        pipeline = pipeline_of(
            {
                "id": ROWS,
                "source": {"kind": "collection", "collection": ROWS},
                "sink": {"kind": "opensearch", "hosts": [url], "index_base": ROWS, "create_index": True, "ids": "key"},
                "steps": [{"kind": "constant", "fields": {"source": "bench"}}],
                "errors": {"cluster": {"bootstrap": [brokers]}},
            }
        )
        with client.new_producer() as producer:
            return _paced(settings, pipeline, url, send, seconds, call=CALL_ROWS)


def _paced(
    settings: Settings, pipeline: Flow, url: str, send: Callable[[int], None], seconds: float, *, call: int
) -> dict[str, Any]:
    """Return the latencies of what `send` sends, `call` documents each time, through a pipeline that runs smoothly."""
    name, stop = pipeline.name, threading.Event()
    thread = threading.Thread(target=run, args=(FlowRun(settings, pipeline),), kwargs={"stop": stop})
    thread.start()
    client = OpenSearch(url)
    waits: list[float] = []
    numbers = itertools.count(0, call)
    try:
        while not client.indices.exists(index=name) or any(task.lag for task in read_status(settings, name).tasks):
            send(next(numbers))
            time.sleep(0.5)
        for _ in range(int(WARM_SECONDS * 1000 / call)):
            send(next(numbers))
            time.sleep(call / 1000)
        begun = looked = time.time()
        first = next(numbers)
        send(first)
        times = [(first, begun)]
        while time.time() - begun < seconds:
            time.sleep(max(0.0, begun + len(times) * call / 1000 - time.time()))
            times.append((next(numbers), time.time()))
            send(times[-1][0])
            if time.time() - looked > 0.25:
                looked = time.time()
                found = int(client.count(index=name)["count"])
                # The oldest that is not found yet; of several channels a little younger than it is.
                late = [at for number, at in times if number >= found]
                if late and found > first:
                    waits.append(time.time() - late[0])
        status, spent = read_status(settings, name), time.time() - begun
    finally:
        stop.set()
        thread.join(60)
        client.close()
    latencies = [task.latency_ms for task in status.tasks if task.latency_ms]
    told = {f"acknowledged {name} ms": max(each[name] for each in latencies) for name in ("p50", "p95", "p99")}
    return {
        "documents": len(times) * call,
        "a second": round(len(times) * call / spent),
        **told,
        "not searchable for, p50 ms": round(1000 * statistics.median(waits)) if waits else None,
    }
