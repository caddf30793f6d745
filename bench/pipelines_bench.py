"""A pipeline against opensearch-py's parallel_bulk: the same topic, the same transform by hand, the same OpenSearch, in turn.

The baseline is given its best settings of a few that are tried first (threads and chunk sizes). Then topic to acknowledged, and topic to
searchable, at 1,000 documents a second.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from opensearchpy import OpenSearch, helpers

from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.opensearch import OpenSearchServer
from millrace.pipelines.model.pipeline import Pipeline
from millrace.pipelines.records import Record
from millrace.pipelines.transform.transform import Transform
from millrace.pipelines.worker.definition import PipelineRun
from millrace.pipelines.worker.host import run
from millrace.pipelines.worker.supervision import read_status

PARTITIONS = 2
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
    """About 1 KB of JSON."""
    made: dict[str, Any] = {
        "year": 2013, "month": 1, "day": 1, "dep_time": 517, "dep_delay": 2.0, "arr_time": 830, "carrier": "UA", "flight": number,
        "tailnum": "N14228", "origin": "EWR", "dest": "IAH", "air_time": 227.0, "distance": 1400, "time_hour": "2013-01-01T05:00:00Z",
    }  # fmt: skip
    return {**made, "note": "n" * (1000 - len(json.dumps(made)))}


def run_all(folder: Path, *, documents: int, pairs: int, seconds: float) -> dict[str, Any]:
    """What the module says."""
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
    return found


def transform_speed(documents: int) -> dict[str, int]:
    """Documents a second of a core."""
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


def _pipeline(brokers: str, url: str, topic: str, name: str, steps: list[dict[str, Any]]) -> Pipeline:
    source = {"kind": "kafka", "bootstrap": [brokers], "topics": [topic]}
    sink = {"kind": "opensearch", "hosts": [url], "index_base": name, "create_index": True}
    return Pipeline.parse(
        {"id": name, "source": source, "sink": sink, "steps": steps, "resources": {"tasks": PARTITIONS}}
    )


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
    run(PipelineRun(settings, _pipeline(brokers, url, "load", name, STEPS)), stop=threading.Event(), until_end=True)
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
    """The same transform, as one would write it for helpers.bulk."""
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


def _latency(settings: Settings, brokers: str, url: str, seconds: float) -> dict[str, Any]:
    """From a record's timestamp, at 1,000 a second: until it is acknowledged, and until a search finds it."""
    name, stop = "paced", threading.Event()
    pipeline = _pipeline(brokers, url, "paced", name, STEPS)
    thread = threading.Thread(target=run, args=(PipelineRun(settings, pipeline),), kwargs={"stop": stop})
    thread.start()
    producer, client = Producer({"bootstrap.servers": brokers, "linger.ms": 5}), OpenSearch(url)
    sent: list[float] = []
    waits: list[float] = []
    try:
        while not client.indices.exists(index=name):
            _fill(brokers, "paced", 10)
            time.sleep(0.5)
        while sum(task.lag for task in read_status(settings, name).tasks) or not read_status(settings, name).tasks:
            time.sleep(0.2)
        client.indices.refresh(index=name)
        warm = int(client.count(index=name)["count"])
        begun = time.time()
        looked = begun
        while time.time() - begun < seconds:
            sent.append(time.time())
            producer.produce(
                "paced", json.dumps(document(1_000_000 + len(sent))).encode(), partition=len(sent) % PARTITIONS
            )
            producer.poll(0)
            if time.time() - looked > 0.25:
                looked = time.time()
                hits = client.search(index=name, body={"size": 0, "track_total_hits": True})["hits"]["total"]["value"]
                if 0 < hits - warm < len(sent):
                    waits.append(time.time() - sent[hits - warm])  # the oldest that is not found yet
            time.sleep(max(0.0, begun + len(sent) / 1000 - time.time()))
        producer.flush(30)
        time.sleep(2.0)
        status = read_status(settings, name)
    finally:
        stop.set()
        thread.join(60)
    latencies = [task.latency_ms for task in status.tasks if task.latency_ms]
    return {
        "documents": len(sent),
        "acknowledged p50 ms": max(each["p50"] for each in latencies),
        "acknowledged p95 ms": max(each["p95"] for each in latencies),
        "acknowledged p99 ms": max(each["p99"] for each in latencies),
        "not searchable for, p50 ms": round(1000 * statistics.median(waits)) if waits else None,
    }
