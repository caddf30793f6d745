"""``make run PIPELINE=1``: the flights of 2013 through a pipeline from Kafka to OpenSearch, then a search; no docker.

Starts Kafka, OpenSearch and MariaDB on this host. The pipeline service stores its pipelines in MariaDB. The demo sends
the flights to a topic as JSON, a few of them malformed. It creates and runs the pipeline through the service's API,
leaves its declaration in the data folder (``flights.yaml``), and compares the index and the error topic with what was
sent.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import httpx
import msgspec
import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console

from millrace.base.errors import InvalidSettings, LogUnavailable
from millrace.base.files import replace_file
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.mariadb import MariaDbServer
from millrace.brokers.opensearch import OpenSearchServer
from millrace.brokers.programs import install
from millrace.brokers.server import free_ports, is_listening
from millrace.coord.store_factory import cluster_token
from millrace.demo.flights import flights
from millrace.demo.summary import DemoInterrupted
from millrace.flows.declare.configuration import Configuration
from millrace.flows.declare.file import flow_of_file
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.positions import positions_of
from millrace.flows.sinks.opensearch.index import client_of
from millrace.flows.sinks.opensearch.model import OpenSearchSink
from millrace.flows.sources.kafka.topics import logger
from millrace.pipelines.declaration import as_pipeline
from millrace.runtime.child_processes import ChildProcess

TOPIC: Final = "flights"
PARTITIONS: Final = 2
_SECONDS: Final = 120.0
CORRUPT_EVERY: Final = 10_000
"""One flight in this many has a distance that is not a number."""
_DECLARED: Final = """\
id: flights
source:
  kind: kafka
  bootstrap: ["{brokers}"]
  topics: [flights]
steps:
  - {{kind: cast, fields: {{distance: int, air_time: float}}}}
  - {{kind: filter, keep: doc.origin != 'LGA'}}
  - {{kind: rename, fields: {{dep_delay: delay.departure, arr_delay: delay.arrival}}}}
  - {{kind: drop, fields: [year, month, day, hour, minute]}}
sink:
  kind: opensearch
  hosts: ["{opensearch}"]
  index_base: flights
  create_index: true
  ids: key
resources: {{cpus: 2, tasks: 2}}
"""


def run_pipeline(settings: Settings, rows: int | None, console: Console, stop: threading.Event) -> int:
    """Run the demo; return 0 if everything that was sent is accounted for.

    Removes what an earlier run left in the folder.
    """
    table = flights().slice(0, rows)
    folder = settings.data_dir / "pipeline"
    if settings.meta_store:
        raise InvalidSettings(
            f"MILLRACE_META_STORE is {settings.meta_store}, but this demo starts its own MariaDB: unset it"
        )
    install(["mariadb"])
    console.print(f"Data folder: [bold]{folder}[/]\nStarting Kafka, OpenSearch and MariaDB on this host …")
    with (
        KafkaBroker(folder / "kafka", settings=settings) as kafka,
        OpenSearchServer(folder / "opensearch", settings=settings) as opensearch,
        MariaDbServer(folder / "mariadb", settings=settings) as mariadb,
    ):
        console.print(
            f"Kafka: [bold]{kafka.address}[/]  OpenSearch: [bold]{opensearch.url}[/]"
            f"  MariaDB: [bold]{mariadb.address}[/]"
        )
        os.environ.update(mariadb.client_environment)  # for child processes
        settings = replace(settings, meta_store=mariadb.url, service_port=settings.service_port or _port())
        file = folder / "flights.yaml"
        replace_file(file, _DECLARED.format(brokers=kafka.address, opensearch=opensearch.url))
        pipeline = flow_of_file(file, Configuration())
        _topics(kafka)
        before = sum(each.position for each in positions_of(settings, pipeline.name).values())
        sent, spoilt, filtered = _send(kafka, table, stop)
        console.print(f"{sent:,} flights are in the topic, {spoilt} of them malformed.")
        with _service(settings, stop) as service:
            console.print(f"The pipeline service: [bold]{service.base_url}[/] ([bold]millrace flows service serve[/])")
            console.print(f"Created and run by its API, as by [bold]millrace flows service create {file} --run[/] …")
            begun = time.perf_counter()
            _make(service, pipeline)
            _run(service, before + sent, pipeline, stop)
            seconds = time.perf_counter() - begun
        return _summary(
            settings,
            pipeline,
            sent=sent,
            spoilt=spoilt,
            filtered=filtered,
            before=before,
            seconds=seconds,
            console=console,
        )


def _topics(kafka: KafkaBroker) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.address})
    if TOPIC not in admin.list_topics(timeout=30).topics:
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(30)


def _documents(table: pa.Table) -> Iterator[tuple[str, dict[str, Any]]]:
    for batch in table.to_batches(max_chunksize=10_000):
        for row in batch.to_pylist():
            yield row["id"], row


def _send(kafka: KafkaBroker, table: pa.Table, stop: threading.Event) -> tuple[int, int, int]:
    """Send all flights by id; return how many were sent, are malformed, and will be dropped by the filter."""
    producer = Producer(
        {"bootstrap.servers": kafka.address, "acks": "all", "enable.idempotence": True, "linger.ms": 20}, logger=logger
    )
    trouble: list[str] = []
    sent = spoilt = filtered = 0

    def on_delivery(error: Any, _: Any) -> None:
        if error is not None:
            trouble.append(error.str())

    for key, row in _documents(table):
        if stop.is_set():
            raise DemoInterrupted
        if sent % CORRUPT_EVERY == CORRUPT_EVERY - 1:
            row["distance"] = "far"
            spoilt += 1
        else:
            filtered += row["origin"] == "LGA"
        while True:
            try:
                producer.produce(TOPIC, msgspec.json.encode(row), key, on_delivery=on_delivery)
                break
            except BufferError:
                producer.poll(0.1)
        sent += 1
        if sent % 1000 == 0:
            producer.poll(0)
    if producer.flush(60) or trouble:
        raise LogUnavailable(f"Kafka did not accept all flights: {trouble[:1]}")
    return sent, spoilt, filtered


def _port() -> int:
    """Return the service's default port, or a free one if that is taken."""
    port = Configuration().server.httpPort
    return free_ports(1)[0] if is_listening(port) else port


@contextmanager
def _service(settings: Settings, stop: threading.Event) -> Iterator[httpx.Client]:
    """Yield a client with all rights of a pipeline service that runs meanwhile."""
    command = [sys.executable, "-m", "millrace.service.pipelines"]
    job = ChildProcess(command, log_file=settings.run_path / "pipeline-service.log", env=settings.environment())
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{settings.service_port}",
        headers={"Authorization": f"Bearer {cluster_token(settings)}"},
        timeout=_SECONDS,
        trust_env=False,
    )
    try:
        job.wait_ready(lambda: stop.is_set() or is_listening(settings.service_port), deadline=_SECONDS)
        yield client
    finally:
        client.close()
        job.stop(deadline=settings.stop_deadline)


def _make(service: httpx.Client, pipeline: Flow) -> None:
    """Create the pipeline, or change that of an earlier run."""
    known, declared = f"/api/v1/pipelines/{pipeline.name}", as_pipeline(pipeline)
    found = service.get(known)
    if found.status_code == httpx.codes.NOT_FOUND:
        _json_of(service.put(known, json=declared))
    else:
        _json_of(service.put(f"{known}/declaration", params={"version": _json_of(found)["version"]}, json=declared))


def _run(service: httpx.Client, end: int, pipeline: Flow, stop: threading.Event) -> None:
    """Run the pipeline until it has processed everything that was sent."""
    known = f"/api/v1/pipelines/{pipeline.name}"
    _json_of(service.put(f"{known}/resume"))
    try:
        while True:
            status = _json_of(service.get(f"{known}/status"))
            if sum(task["position"] for task in status["tasks"]) >= end:
                return
            if status["state"] == "FAILED":
                raise LogUnavailable(f"the pipeline has failed: {status['cause']}")
            if stop.wait(0.2):
                raise DemoInterrupted
    finally:
        _json_of(service.put(f"{known}/stop"))


def _json_of(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()
    if not answer.is_success:
        raise LogUnavailable(f"the pipeline service answers {answer.status_code}: {found['error']['message']}")
    return found


def _summary(
    settings: Settings,
    pipeline: Flow,
    *,
    sent: int,
    spoilt: int,
    filtered: int,
    before: int,
    seconds: float,
    console: Console,
) -> int:
    sink = pipeline.sink
    assert isinstance(sink, OpenSearchSink), "the declaration above says so"
    client = client_of(sink)
    client.indices.refresh(index=sink.index_base)
    count = int(client.count(index=sink.index_base)["count"])
    places = positions_of(settings, pipeline.name).values()
    totals = {
        name: sum(getattr(each, f"records_{name}") for each in places) for name in ("in", "out", "error", "filtered")
    }
    begun = time.perf_counter()
    answer = client.search(
        index=sink.index_base,
        body={
            "size": 0,
            "track_total_hits": True,
            "query": {"range": {"delay.departure": {"gte": 60}}},
            "aggs": {"carriers": {"terms": {"field": "carrier.keyword", "size": 3}}},
        },
    )
    took = 1000 * (time.perf_counter() - begun)
    late = ", ".join(f"{each['key']} {each['doc_count']:,}" for each in answer["aggregations"]["carriers"]["buckets"])
    console.print(f"{sent:,} in {seconds:.1f} s: {sent / seconds:,.0f} flights/s, including the worker's start")
    console.print(
        f"In {totals['in']:,} = out {totals['out']:,} + errors {totals['error']:,} + filtered {totals['filtered']:,};"
        f" documents {count:,}"
    )
    console.print(
        f"Search: {answer['hits']['total']['value']:,} flights left at least an hour late; most of {late}"
        f" ({took:.0f} ms)"
    )
    whole = totals["in"] == before + sent == totals["out"] + totals["error"] + totals["filtered"]
    right = before > 0 or (totals["error"] == spoilt and totals["filtered"] == filtered and count == totals["out"])
    console.print(
        "[bold green]Everything is accounted for.[/]" if whole and right else "[bold red]The counts do not add up.[/]"
    )
    return 0 if whole and right else 1
